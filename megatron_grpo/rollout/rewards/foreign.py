"""The `python:package.module:function` reward: a function of the user's own."""

from __future__ import annotations

from megatron_grpo.config import ConfigError
from megatron_grpo.rollout.rewards.limit import LimitedFunction, Patience
from megatron_grpo.rollout.rewards.verdict import ABSTAINS, UNREADABLE, UNSCORABLE, Verdict

PREFIX = "python:"
LARGEST = 3.4e38
"""Scores are fp32."""


class ForeignReward:
    """Calls `function(response, answer, finished)`: a number, None where it has nothing to say, or a `Verdict`.

    Functions, partials and objects with `__call__` are all the same to it. Past the time limit a response scores 0; an
    exception, an exit, and the end of ``patience`` leave a sample out of the statistics. Anything else that is returned
    is a ConfigError: the function does not do what a reward does.
    """

    def __init__(self, kind: str, *, limit_s: float, patience: Patience | None = None) -> None:
        """Start the function's process. Raises ConfigError when the function cannot be imported."""
        self._kind = kind
        self._call = LimitedFunction(kind.removeprefix(PREFIX), limit_s=limit_s, patience=patience)
        try:
            self._call.start()
        except (ValueError, TimeoutError) as error:
            raise ConfigError(f"reward.kind={kind}: {error}; name a function that can be imported from here") from error

    def __call__(self, response: str, answer: str, finished: bool) -> Verdict:
        outcome = self._call(response, answer, finished)
        if outcome.late:
            return UNREADABLE
        if outcome.untried or outcome.error is not None:
            return UNSCORABLE
        value, parsed = outcome.value, True
        if isinstance(value, dict) and value.keys() == {"reward", "parsed"}:
            value, parsed = value["reward"], bool(value["parsed"])
        if value is None:
            return ABSTAINS if parsed else UNSCORABLE
        if not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise ConfigError(
                f"reward.kind={self._kind}: returned {str(outcome.value)[:100]}; return a finite number, or None"
            )
        return Verdict(float(value), parsed)
