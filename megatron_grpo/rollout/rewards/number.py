"""Numbers as people and models write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DASHES = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-"})
_DECORATION = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:| )|\\?\$|\*\*|~|\\?%")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\N{DEGREE SIGN}")
_SUBSCRIPT = re.compile(r"_\{(\w+)\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_NAME = re.compile(r"^[A-Za-z]\w{0,20}\s*=\s*(?=[^=])")
_SIGN_SPACE = re.compile(r"^([+-])\s+")
_UNIT = re.compile(r"(?<=[\d}.])\s+([^\W\d_]{2,}(?:\s+[^\W\d_]{2,})?)\s*\Z")
_DIGITS = "one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
_SCALES = "hundred thousand million billion trillion quadrillion lakh crore dozen gross myriad zero nought"
_PARTS = (
    "half halve third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth twentieth hundredth "
    "thousandth millionth billionth first double triple"
)
_FUNCTIONS = (
    "squared cubed root sqrt factorial power exponent exponential logarithm sine cosine tangent modulo "
    "divided multiplied infinity"
)
_LETTERS = (
    "alpha beta gamma delta epsilon zeta theta iota kappa lambda omicron sigma upsilon omega radical imaginary euler"
)
_CONNECTIVES = "or and to not plus minus over by than into from less more equals base remainder"
_NOT_UNITS = frozenset(
    f"{_DIGITS} {_TEENS} {_DECADES} {_SCALES} {_PARTS} {_FUNCTIONS} {_LETTERS} {_CONNECTIVES}".split()
)
"""Words after a number that make another one of it, or no number."""
_SHORT = (
    "mm cm dm km in ft yd mi oz lb lbs kg mg gm ml cl dl hr hrs min sec ms hz kb mb gb tb mph kph kmh usd eur gbp inr "
    "day man men boy cup box egg pie car bus cat dog pen bag toy hat way set row kid bar can jar tin pot"
)
_SHORT = (
    "mm cm dm km in ft yd mi oz lb lbs kg mg gm ml cl dl hr hrs min sec ms hz kb mb gb tb mph kph kmh usd eur gbp inr "
    "day man men boy cup box egg pie car bus cat dog pen bag toy hat way set row kid bar can jar tin pot"
)
_SHORT_UNITS = frozenset(_SHORT.split())
"""Of fewer than four letters. Any other word so short is taken for symbols: `xy`, `pi`, `ln`, `bn`."""

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
    """A number and the words of unit after it, each in the singular (empty when there are none)."""

    value: Fraction
    unit: str

    def agrees_with(self, other: Quantity) -> bool:
        """Equal values, and no two different units."""
        return self.value == other.value and (self.unit == other.unit or not self.unit or not other.unit)


def parse_quantity(text: str) -> Quantity | None:
    """The exact value of a plain number, with up to two words of unit after it; None for anything else.

    Reads decimals with thousands commas (`1,234.50`), powers of ten (`1e3`), ratios (`3/4`, `1 1/2`) and
    LaTeX ratios (`\\frac{3}{4}`, `\\frac12`, `1\\frac{1}{2}`). `18, 20`, `18 million`, `3 pi` and `3 quarters` are
    none.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    unit = ""
    if match := _UNIT.search(text):
        words, text = [_singular(word) for word in match[1].lower().split()], text[: match.start()]
        if not all(map(_is_unit, words)):
            return None
        unit = " ".join(words)
    value = _number(text)
    return None if value is None else Quantity(value, unit)


def _is_unit(word: str) -> bool:
    """Whether a word in the singular only says of what there are so many."""
    return word in _SHORT_UNITS or (len(word) > 3 and word not in _NOT_UNITS)


def _singular(word: str) -> str:
    """`dollars` as `dollar`, `inches` as `inch`; a word that only looks like a plural is cut alike on both sides."""
    if word in _NOT_UNITS or len(word) < 4 or word.endswith("ss"):
        return word
    return re.sub(r"(?<=[hxs])es$|s$", "", word)


def _number(text: str) -> Fraction | None:
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
