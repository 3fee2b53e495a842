"""What a checkpoint holds: ``python tools/inspect_checkpoint.py PATH``.

Format, model, and name, shape and dtype of every tensor, without reading the weights.
"""

import argparse
import sys
from pathlib import Path

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.inspect import describe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="directory of a checkpoint")
    try:
        for line in describe(parser.parse_args().path):
            print(line)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
