"""The words that may stand after a number without changing it. All of them in the singular, as `singular` cuts them.

After what a policy says, a word is a unit only when it is listed: no list of the words that change a number is ever
whole (`3 pi`, `5 factorial`, `5 bn`, `2 xy`). After a gold, which somebody wrote down as an answer, every word is one
that is too long to be a formula's and not known to change a number.
"""

from __future__ import annotations

import re
from itertools import product

_METRIC = map("".join, product(("", "kilo", "centi", "milli"), ("gram", "meter", "metre", "liter", "litre")))
_MONEY = "dollar cent euro pound pence penny pennie buck rupee yen yuan peso usd eur gbp inr"
_SPACE = "mm cm dm km in inch ft foot feet yd yard mi mile acre hectare ml cl dl cup pint quart gallon gal mph kmh kph"
_MASS_AND_TIME = """mg gm kg kilo oz ounce lb lbs ton tonne ms sec second min minute hr hrs hour day week month year
    decade century centurie time"""
_OTHERS = "percent degree deg radian celsius fahrenheit kelvin bit byte kb mb gb tb hz volt watt kw kwh joule newton"
_COUNTED = """people person man men woman women boy girl child children kid friend student teacher player worker guest
    animal dog cat bird chicken hen duck cow horse sheep pig fish leg apple orange banana pear egg cookie candy candie
    cake pie pizza slice sandwich piece item unit object book page word letter pen pencil card ball marble toy game
    point goal ticket coin box bag bottle glass can jar flower tree car bus bike house room chair seat hat shirt"""
"""What problems in words often ask for."""
_UNITS = frozenset(_METRIC).union(*(words.split() for words in (_MONEY, _SPACE, _MASS_AND_TIME, _OTHERS, _COUNTED)))
_BEFORE = frozenset({"square", "cubic", "us", "degree"})
"""What may stand before one of them, and not alone: `5 square cm`, `20 degrees Celsius`."""

_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion
    trillion quadrillion lakh crore dozen gross bn mn mln mil half halve third quarter fourth fifth sixth seventh eighth
    ninth tenth eleventh twelfth twentieth hundredth thousandth millionth billionth squared cubed sqrt factorial pi
    alpha beta gamma delta theta lambda sigma omega infinity modulo"""
_BETWEEN = "or and to not of plus minus over by than into from less more equal base divided multiplied"
_CHANGE = frozenset(_NUMBERS.split())
_NOT_AFTER_A_GOLD = _CHANGE.union(_BETWEEN.split())
_KNOWN = _UNITS | _BEFORE | _NOT_AFTER_A_GOLD
_LONGEST_SYMBOLS = 3
_PER = frozenset("hsmgl")
"""Single letters that are a unit after a slash: `km/h`."""
_WORD = re.compile(r"[^\W\d_]+")


def singular(word: str) -> str:
    """`dollars` as `dollar`, `inches` as `inch`; a word that only looks like a plural is cut alike on both sides."""
    if len(word) < 4 or word.endswith(("ss", "us")):
        return word
    return re.sub(r"(?<=[hxs])es$|s$", "", word)


def canonical(unit: str) -> str:
    """`miles per Hour` as `mile/hour`, `cm ^ {2}` as `cm^2`: the singular, and small letters but in short symbols that
    the list does not have (`mN` is no `Mn`)."""
    compact = re.sub(r"\s*([/^])\s*", r"\1", re.sub(r"\s+per\s+", "/", re.sub(r"[{}]", "", unit)))
    return " ".join(_WORD.sub(_canonical_word, compact).split())


def _canonical_word(word: re.Match[str]) -> str:
    small = singular(word[0].lower())
    return small if len(word[0]) > _LONGEST_SYMBOLS or small in _KNOWN else word[0]


def is_unit(words: str) -> bool:
    """Whether one or two words, each in the singular, are a unit of the list."""
    *before, last = words.split()
    return last in _UNITS and _BEFORE.issuperset(before)


def is_golds_unit(unit: str) -> bool:
    """Whether a canonical unit after a gold is taken for one: with a power only those of the list."""
    over, _, under = re.sub(r"\^\d", "", unit).partition("/")
    if "^" in unit:
        return is_unit(over) and (not under or under in _PER or is_unit(under))
    return _is_golds(over) and (not under or under in _PER or _is_golds(under))


def _is_golds(words: str) -> bool:
    strange = (word in _NOT_AFTER_A_GOLD or len(word) <= _LONGEST_SYMBOLS for word in words.split())
    return is_unit(words) or not any(strange)


def is_texts_unit(unit: str) -> bool:
    """Whether a canonical unit that a gold marks as text is one: it has no word that changes a number."""
    return _NOT_AFTER_A_GOLD.isdisjoint(word[0] for word in _WORD.finditer(unit))


def changes_a_number(following: str) -> bool:
    """Whether what stands after a number in a sentence makes another one of it: ` million`, ` x`, `k`, `\\pi`, `!`."""
    word = singular(following.strip().lower())
    if following[:1].isspace():
        return word in _CHANGE or (len(word) == 1 and following.strip() not in ("a", "A", "I"))
    return bool(word) and not is_unit(word)
