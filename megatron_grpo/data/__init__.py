"""Problems to sample on: the task protocol, the built-in tasks and the encoding of prompts."""

from megatron_grpo.data.problem import Problem, Task
from megatron_grpo.data.rows import Reading
from megatron_grpo.data.tasks import ChainSum, build_task, encode_prompts

__all__ = ["ChainSum", "Problem", "Reading", "Task", "build_task", "encode_prompts"]
