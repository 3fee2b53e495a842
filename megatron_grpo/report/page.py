"""The HTML page: a table of arms, figures that draw themselves from a block of JSON, the config. No network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .arms import Arm
from .figures import KIND_COLORS, KIND_LABELS, line_style, longest_run
from .markup import swatch, toggle
from .plots import DENSE, Plot, build_figures
from .tables import count, headline, notes, settings

HEADINGS = {
    "learning": "Observed learning",
    "telemetry": "Codec and policy telemetry",
    "bytes": "Bytes",
    "anchor": "Anchor and merger",
}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the page may load nothing, from anywhere."""


def render_page(arms: Sequence[Arm]) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs  # five megabytes that no other part of the package needs

    plots: list[Plot] = []
    sections = []
    for name, heading in HEADINGS.items():
        figures = build_figures(name, arms, plots)
        if figures:
            sections.append(f"<section><h2>{heading}</h2>{figures}</section>")
    runs = sum(len(arm.runs) for arm in arms)
    body = [
        "<h1>Training report</h1>",
        f'<p class="small">{count(len(arms), "arm")}, {count(runs, "run")}</p>',
        notes(arms),
        headline(arms),
        _legend(arms)
        if plots
        else "<p><strong>No tick has been recorded yet, so there is nothing to draw.</strong></p>",
        *sections,
        settings(arms),
    ]
    return _document("\n".join(body), _data(arms, plots), get_plotlyjs())


def _document(body: str, data: Mapping[str, Any], plotly: str) -> str:
    # Inside a script element only "<" could end the block; as an escape it is the same JSON.
    block = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training report</title>
<style>{_asset("page.css")}</style>
</head>
<body>
{body}
<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>
<script type="application/json" id="data">{block}</script>
<script>{plotly}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _data(arms: Sequence[Arm], plots: Sequence[Plot]) -> dict[str, Any]:
    """What page.js reads."""
    styles = [line_style(index) for index in range(len(arms))]
    last = max(longest_run(arms) - 1, 1)
    return {
        "arms": [
            {"name": arm.name, "color": color, "dash": dash} for arm, (color, dash) in zip(arms, styles, strict=True)
        ],
        "seeds": max(len(arm.runs) for arm in arms),
        "tickRange": [-0.02 * last, 1.02 * last],
        "kinds": {kind: {"label": KIND_LABELS[kind], "color": KIND_COLORS[kind]} for kind in KIND_LABELS},
        "dense": DENSE,
        "plots": plots,
    }


def _legend(arms: Sequence[Arm]) -> str:
    """Buttons that show and hide arms in every figure, where there are several."""
    if len(arms) == 1:
        return ""
    buttons = [toggle("arm", str(index), arm.name, swatch(*line_style(index))) for index, arm in enumerate(arms)]
    actions = ["all", "none", *(["bands"] if any(len(arm.runs) > 1 for arm in arms) else [])]
    buttons += [f'<button type="button" class="action" data-act="{act}">{act}</button>' for act in actions]
    return f'<div class="legend">{"".join(buttons)}</div>'
