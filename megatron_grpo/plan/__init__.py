"""What a run would be, from its config alone: ranks, layers, batches, bytes, memory, time. Starts no engine."""

from .build import Plan, build_plan
from .network import Rates, parse_rate
from .time import Device, StepTime, predict, step_time
from .traffic import crossing_share, training_shares
from .view import outline_tables, plan_tables

__all__ = [
    "Device",
    "Plan",
    "Rates",
    "StepTime",
    "build_plan",
    "crossing_share",
    "outline_tables",
    "parse_rate",
    "plan_tables",
    "predict",
    "step_time",
    "training_shares",
]
