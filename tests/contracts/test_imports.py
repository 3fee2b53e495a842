"""The command line answers without an engine, and config, ops and conversion stay what they are."""

import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = (
    "torch",
    "transformers",
    "megatron",
    "deepspeed",
    "sentencepiece",
    "tensorboard",
    "matplotlib",
    "apex",
)


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in ``sys.modules`` of a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


LIGHT = (
    *("cli", "launch", "launch.cluster", "plan", "report", "sweep.runner", "config", "config.checks", "backends.apex"),
    *("conversion.names", "data", "rollout.rewards"),
)


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_no_engine(module: str) -> None:
    assert not loaded_after(f"import megatron_grpo.{module}") & set(ENGINES)


def test_help_loads_no_engine() -> None:
    statement = "import sys\nfrom megatron_grpo.cli import app\napp(['--help'], standalone_mode=False)"
    assert not loaded_after(statement) & set(ENGINES)


def test_a_plan_loads_no_engine() -> None:
    recipe = Path(__file__).parents[2] / "examples/cluster/recipes/70b.yaml"
    statement = f"from megatron_grpo.cli import app\napp(['plan', {str(recipe)!r}], standalone_mode=False)"
    assert not loaded_after(statement) & set(ENGINES)
