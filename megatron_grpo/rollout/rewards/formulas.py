"""Whether two small formulas are equal. Only `math`'s child imports this, before it says that it is ready: sympy takes
seconds, which are in no call's time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, expand

_NORMAL = replace(LatexExtractionConfig().normalization_config, units=False)
"""math-verify's units are letters, too: to it `5m` and `5g` are 5."""
_READER = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMAL)]
_PLACE = 0.7390851
"""Where two terms are compared: no zero of anything that people ask for."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit: the child has one


def formulas_equal(gold: str, said: str) -> bool:
    """Whether two small formulas are the same to math-verify; one that does not parse equals nothing. For the child."""
    gold_parts, said_parts = (
        parse(rf"\boxed{{{text}}}", _READER, fallback_mode="no_fallback", parsing_timeout=None) for text in (gold, said)
    )
    if not gold_parts or not said_parts:
        return False
    early = decided(gold_parts[0], said_parts[0])
    return bool(verify(gold_parts, said_parts, timeout_seconds=None)) if early is None else early


def decided(gold: Any, said: Any) -> bool | None:
    """Whether two parsed terms are equal, where that costs little to prove; None elsewhere.

    What multiplying out leaves nothing of is nothing; terms that differ by more than any rounding at one place are not
    the same. It saves most wrong answers, and many right ones, a simplification.
    """
    if not (isinstance(gold, Expr) and isinstance(said, Expr)):
        return None
    difference = expand(gold - said)
    if difference == 0:
        return True
    place = {symbol: Float(_PLACE + number) for number, symbol in enumerate(sorted(difference.free_symbols, key=str))}
    apart, size = (abs(term.evalf(8, subs=place)) for term in (difference, gold))
    if not (apart.is_Float and size.is_Float):
        return None
    return False if apart > 1e-4 * (1 + size) else None


formulas_equal("(1, 2x)", "(1, 3x)")  # what parser and comparison load at their first use, before the clock runs
