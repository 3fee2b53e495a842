"""``report``: a self-contained HTML page and PNGs of one or several runs. Imports neither torch nor an engine."""

from .write import write_report

__all__ = ["write_report"]
