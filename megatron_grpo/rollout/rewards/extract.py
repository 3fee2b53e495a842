"""Where in a text the final answer stands."""

from __future__ import annotations

import re

MARKER = "####"
LONGEST_ANSWER = 200

_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*)?\{|\}")
_WORD = re.compile(r"\banswer(?:[ \t]+is)?[ \t*]*:[ \t*]*([^\n]*)", re.IGNORECASE)


def extract_answer(text: str, *, finished: bool) -> str | None:
    """The line after the last `####`, else what the last box or `<answer>` holds, else the line after the last
    `Answer:`; None where there is none of them.

    `finished=False` refuses a last line that more tokens might have continued.
    """
    if MARKER in text:
        return after_marker(text, finished=finished)
    for closed in (last_boxed(text), last_tagged(text)):
        if closed is not None:
            return closed
    return _after_word(text, finished=finished)


def after_marker(text: str, *, finished: bool) -> str | None:
    """The line after the last `####`, or the box in it; None without one, and on a line that is cut off."""
    _, marker, tail = text.rpartition(MARKER)
    line, newline, _ = tail.partition("\n")
    if not marker or not (finished or newline):
        return None
    line = line.strip().strip("*").strip()
    return last_boxed(line) or line


def last_boxed(text: str) -> str | None:
    """What is in the braces of the last closed `\\boxed{}` or `\\fbox{}` of up to `LONGEST_ANSWER` characters."""
    opened: list[tuple[int, bool]] = []  # where the inside begins, and whether it is a box's
    last = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[1] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box and brace.start() - start <= LONGEST_ANSWER and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[slice(*last)].strip()


def last_tagged(text: str) -> str | None:
    """What stands in the last closed `<answer></answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def _after_word(text: str, *, finished: bool) -> str | None:
    """The rest of the line after the last `Answer:`."""
    matches = list(_WORD.finditer(text))
    if not matches or not (finished or matches[-1].end() < len(text)):
        return None
    return matches[-1][1].strip().strip("*").strip()
