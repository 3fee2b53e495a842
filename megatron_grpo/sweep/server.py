"""Imported by the fork server of a sweep alone, as it starts: the engines take eight seconds, once for all runs.

Not where there is a GPU: a forked process cannot use CUDA after its parent has looked for it.
"""

import os
import warnings

from megatron_grpo.launch import rank_environment, visible_gpus

os.setsid()  # a signal to the sweep's process group is the sweep's to handle: without the server no run can be watched
if not visible_gpus():
    os.environ |= rank_environment({}, threads=1)
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # what it says of optional packages
    import megatron_grpo.training.loop  # noqa: F401 - for its side effect: everything a run needs is imported
