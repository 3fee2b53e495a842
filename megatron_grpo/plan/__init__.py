"""What a run would be, from its config alone: ranks, layers, batches, bytes, memory, time. Starts no engine."""

from .time import Device, StepTime, predict, step_time
from .traffic import crossing_share, training_shares
from .view import plan_tables

__all__ = ["Device", "StepTime", "crossing_share", "plan_tables", "predict", "step_time", "training_shares"]
