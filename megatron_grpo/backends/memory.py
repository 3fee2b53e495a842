"""How much memory is free for this rank."""

import os

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """What a rank can still take on its device.

    On a GPU: what the driver has left and what torch's allocator holds without using it. On the CPU: this rank's equal
    share, among the ranks that the launcher started on this host, of what the kernel calls available.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available: int = psutil.virtual_memory().available
    return available // int(os.environ.get("LOCAL_SIZE", "1"))
