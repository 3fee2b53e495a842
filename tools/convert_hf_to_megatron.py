"""A Hugging Face directory as Megatron's distributed checkpoint.

``python tools/convert_hf_to_megatron.py SRC DST [--tensor N --pipeline N]`` is the command
``megatron-grpo convert SRC DST --to megatron``.
"""

import sys

from megatron_grpo.cli import app

if __name__ == "__main__":
    app(["convert", *sys.argv[1:], "--to", "megatron"])
