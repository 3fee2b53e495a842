"""Two checkpoints of any format, tensor by tensor.

``python tools/compare_checkpoints.py A B [--logits] [--json FILE|-]`` is the command ``megatron-grpo compare A B``. It
ends with 0 where every tensor has the same bits, with 1 where one differs, with 2 where they cannot be compared.
"""

import sys

from megatron_grpo.cli import app

if __name__ == "__main__":
    app(["compare", *sys.argv[1:]])
