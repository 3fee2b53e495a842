"""Megatron's distributed checkpoint as a Hugging Face directory.

``python tools/convert_megatron_to_hf.py SRC DST [--config-from DIR]`` is the same as
``megatron-grpo convert SRC DST --to hf``.
"""

import argparse
import sys
from pathlib import Path

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.convert import DTYPES, Wish, convert_on_screen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="checkpoint; its format is recognised")
    parser.add_argument("target", type=Path, help="directory to write; an older one of the same kind is replaced")

    parser.add_argument("--dtype", choices=DTYPES, help="of all weights; kept by default")
    parser.add_argument("--config-from", type=Path, help="directory with config.json, where the source has none")
    given = parser.parse_args()
    wish = Wish(to="hf", dtype=given.dtype, config_dir=given.config_from)
    try:
        convert_on_screen(given.source, given.target, wish)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
