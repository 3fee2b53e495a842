"""Megatron's distributed checkpoint as a Hugging Face directory.

``python tools/convert_megatron_to_hf.py SRC DST [--config-from DIR]`` is the command
``megatron-grpo convert SRC DST --to hf``.
"""

import sys

from megatron_grpo.cli import app

if __name__ == "__main__":
    app(["convert", *sys.argv[1:], "--to", "hf"])
