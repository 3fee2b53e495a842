"""Pieces of HTML that several parts of the page share. Names come in as text and are escaped here."""

from collections.abc import Sequence
from html import escape

DASH_ARRAYS = {"solid": "none", "dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3"}


def swatch(color: str, dash: str) -> str:
    """A short line in an arm's colour and dash."""
    return (
        '<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4"'
        f' stroke="{color}" stroke-width="3" stroke-dasharray="{DASH_ARRAYS[dash]}"/></svg>'
    )


def toggle(group: str, value: str, label: str, mark: str) -> str:
    """A button that shows and hides an arm or a byte kind in every figure."""
    return (
        f'<button type="button" data-group="{group}" data-value="{value}" aria-pressed="true"'
        f' title="{escape(label)}">{mark}{escape(label)}</button>'
    )


def arm_name(name: str, mark: str = "") -> str:
    """The first cell of a row."""
    return f'<div class="name">{mark}<span>{escape(name)}</span></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "headline") -> str:
    """A table of cells that are HTML already; the heads are text."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    ]
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{body}</table></div>'
