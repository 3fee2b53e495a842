"""``write_report``: the page and its figures on disk."""

from pathlib import Path

from megatron_grpo.config import ConfigError
from megatron_grpo.training.files import write_text_atomic

from .arms import build_arms
from .page import render_page
from .runs import read_runs


def write_report(runs: list[Path], out: Path) -> list[Path]:
    """Write the report of run and sweep directories; the files written, the page first.

    Args:
        runs: directories that ``train`` or ``sweep`` wrote, finished or not; the first arm is what others are
            compared with.
        out: the page. PNGs go beside it, such as ``STEM-learning.png``, for figures that have something to show.

    Errors: ConfigError for a path that is no run, and for an ``out`` that cannot be written.
    """
    if out.is_dir():
        raise ConfigError(f"--out={out}: is a directory; give the name of an HTML file")
    arms = build_arms(read_runs(runs))
    from .images import write_images  # matplotlib, which takes longer to import than errors should take to show

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(out, render_page(arms).encode("utf-8", "replace").decode("utf-8"))
        return [out, *write_images(arms, out)]
    except OSError as error:
        raise ConfigError(f"--out={out}: cannot be written ({error}); give another path") from error
