"""A run's checkpoint, at ZeRO 0 to 3, without its topology: DeepSpeed's universal form.

``python tools/convert_deepspeed_to_universal.py SRC DST [--tensor N --pipeline N --data N]`` is the command
``megatron-grpo convert SRC DST --to deepspeed-universal``; ``train --resume DST`` goes on from it at any topology.
"""

import sys

from megatron_grpo.cli import app

if __name__ == "__main__":
    app(["convert", *sys.argv[1:], "--to", "deepspeed-universal"])
