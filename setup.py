"""Package metadata. Tool settings are in pyproject.toml, exact versions in tools/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="megatron-grpo",
    version="0.1.0",
    description="GRPO post-training across pipeline stages joined by slow links",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megatron_grpo", "megatron_grpo.*"]),
        "megatron_grpo.deepspeed_configs",
    ],
    package_dir={"megatron_grpo.deepspeed_configs": "deepspeed_configs"},
    package_data={"megatron_grpo.deepspeed_configs": ["*.json"], "megatron_grpo.report": ["*.css", "*.js"]},
    install_requires=[
        "deepspeed",
        "megatron-core",
        "torch",
        "transformers",
        "sentencepiece",
        "pydantic",
        "pyyaml",
        "typer",
        "rich",
        "safetensors",
        "tensorboard",
        "math-verify",
        "matplotlib",
        "plotly",
        "psutil",
    ],
    extras_require={
        "dev": ["pytest", "pytest-xdist", "ruff", "mypy", "import-linter"],
        "data": ["pyarrow", "reasoning-gym"],
        "models": ["gguf", "accelerate", "requests"],
        "peers": ["trl"],
        "wandb": ["wandb"],
    },
    entry_points={"console_scripts": ["megatron-grpo = megatron_grpo.cli:main"]},
)
