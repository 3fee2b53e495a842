"""A Hugging Face directory as Megatron's distributed checkpoint.

``python tools/convert_hf_to_megatron.py SRC DST [--tensor N --pipeline N]`` is the same as
``megatron-grpo convert SRC DST --to megatron``.
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
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dtype", choices=DTYPES, help="of all weights; kept by default")
    parser.add_argument("--config-from", type=Path, help="directory with config.json, where the source has none")
    given = parser.parse_args()
    if min(given.tensor, given.pipeline) < 1:
        parser.error("--tensor and --pipeline are at least 1")
    layout = {"tensor": given.tensor, "pipeline": given.pipeline}
    wish = Wish(to="megatron", dtype=given.dtype, config_dir=given.config_from, **layout)
    try:
        convert_on_screen(given.source, given.target, wish)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
