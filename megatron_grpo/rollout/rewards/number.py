"""Numbers as people and models write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from megatron_grpo.rollout.rewards.units import canonical, is_golds_unit, is_texts_unit, is_unit

DASHES = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-"})
_DECORATION = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:| )|\\?\$|[\u00a2\u00a3\u00a5\u20ac]|\*\*|~|\\?%")
_DEGREES = re.compile(r"(?<!\s)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\N{DEGREE SIGN}")
_SUBSCRIPT = re.compile(r"_\{(\w+)\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_NAME = re.compile(r"^[A-Za-z]\w{0,20}\s*=\s*(?=[^=])")
_SIGN_SPACE = re.compile(r"^([+-])\s+")
_POWER = r"(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?"
_PER = rf"(?:(?:\s*/\s*|\s+per\s+)[^\W\d_]+{_POWER})?"
_UNIT = re.compile(rf"(?<=[\d}}.])\s+([^\W\d_]{{2,}}(?:\s+[^\W\d_]{{2,}})?{_POWER}{_PER})\s*\Z")
_TOUCHING = re.compile(r"(?<=[\d.])([^\W\d_]{2,})\Z")
_IN_TEXT = r"\\(?:text|mbox)\s*\{([^{}]*)\}"
_TEXT_UNIT = re.compile(rf"{_IN_TEXT}{_POWER}(?:\s*/\s*{_IN_TEXT}{_POWER})?[\s$.]*\Z")
_UNIT_FORM = re.compile(rf"[^\W\d_]+(?:\s+[^\W\d_]+)?{_POWER}{_PER}")

_DECIMAL = re.compile(r"[+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?")
_RATIO = re.compile(r"([+-]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")
_LATEX_RATIO = re.compile(r"([+-]?)\s*(\d+)?\s*\\[cdt]?frac\s*(?:\{\s*([+-]?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_LONGEST_NUMBER = 60


def plain(text: str) -> str:
    """The answer without dress: `$`, `%`, bold, `x =`, LaTeX spacing, text in `\\text{}`, a final dot."""
    bare = text.translate(DASHES).replace("{,}", ",")
    bare = _SUBSCRIPT.sub(r"_\1", _DEGREES.sub(" degrees ", bare))
    bare = _TEXT.sub(r" \1 ", _DECORATION.sub(" ", bare))
    bare = _NAME.sub("", bare.strip())
    bare = _SIGN_SPACE.sub(r"\1", bare.strip())
    return bare.removesuffix(".").strip()


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and the unit after it, as `units.canonical` writes it (empty when there is none)."""

    value: Fraction
    unit: str

    def reads(self, said: Quantity) -> bool:
        """Whether the words after a response's number are a unit: one of the list, or this gold's own."""
        return said.unit in ("", self.unit) or is_unit(said.unit)

    def agrees_with(self, said: Quantity) -> bool:
        """Equal values, words that are a unit, and no two different ones."""
        return self.value == said.value and self.reads(said) and (not self.unit or said.unit in ("", self.unit))


def parse_quantity(text: str) -> Quantity | None:
    """The exact value of a plain number, with a unit after it or not; None for anything else.

    Reads decimals with thousands commas (`1,234.50`), powers of ten (`1e3`), ratios (`3/4`, `1 1/2`) and
    LaTeX ratios (`\\frac{3}{4}`, `\\frac12`, `1\\frac{1}{2}`). After it may stand up to two words, with a power or a
    per (`5 cm^2`, `5 km/h`, `5 dollars per hour`), or, touching it, a word of the list of units (`18cm`). Whether the
    words are a unit is for the gold to say.
    """
    unit, match = "", _UNIT.search(text)
    if match is None and (touching := _TOUCHING.search(text)) and is_unit(canonical(touching[1])):
        match = touching
    if match:
        unit, text = canonical(match[1]), text[: match.start()]
    value = _number(text)
    return None if value is None else Quantity(value, unit)


def parse_gold(text: str) -> Quantity | None:
    """As :func:`parse_quantity`, of a gold in its dress: `18, 20`, `18 million`, `3 pi` and `2 xy` are none.

    What stands in `\\text{}` at its end is no formula, so there a single letter is a unit, too.
    """
    if match := _TEXT_UNIT.search(text):
        value, words = _number(plain(text[: match.start()])), plain(match[0])
        if value is not None and _UNIT_FORM.fullmatch(words) and is_texts_unit(canonical(words)):
            return Quantity(value, canonical(words))
    gold = parse_quantity(plain(text))
    return None if gold is None or (gold.unit and not is_golds_unit(gold.unit)) else gold


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _RATIO.fullmatch(text):
        sign, whole, over, under = match.groups()
    elif match := _LATEX_RATIO.fullmatch(text):
        sign, whole, *parts = match.groups()
        over, under = (part for part in parts if part is not None)
    else:
        return None
    if int(under) == 0:
        return None
    value = int(whole or 0) + Fraction(int(over), int(under))
    return -value if sign == "-" else value
