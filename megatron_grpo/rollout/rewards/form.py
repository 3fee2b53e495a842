"""The `format` reward: thoughts in `<think>` tags, then the answer."""

from __future__ import annotations

from megatron_grpo.rollout.rewards.verdict import Verdict, without_stop_text

_OPEN, _CLOSE = "<think>", "</think>"


def format_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the response begins with `<think>`, closes it once, and has no other such tag. The answer is not read."""
    text = without_stop_text(response).lstrip()
    once = text.count(_OPEN) == 1 and text.count(_CLOSE) == 1
    return Verdict(float(once and text.startswith(_OPEN)), True)
