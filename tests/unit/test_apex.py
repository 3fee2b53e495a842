"""NVIDIA Apex is told from the web toolkit of the same name, without importing either."""

import sys
from pathlib import Path

import pytest

from megatron_grpo.backends.apex import nvidia_apex_available


def package(folder: Path, *parts: str) -> Path:
    """A fake ``apex`` whose import would fail the test."""
    for part in ("", *parts):
        (folder / "apex" / part).mkdir(parents=True, exist_ok=True)
        (folder / "apex" / part / "__init__.py").write_text("raise AssertionError('imported')")
    return folder


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("normalization", "optimizers"), True),
        (("forms", "models"), False),
        (("normalization",), False),
        ((), False),
    ],
)
def test_only_nvidias_apex_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], expected: bool
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, *parts)))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert nvidia_apex_available() is expected
    assert "apex" not in sys.modules


def test_absent_and_single_file_apex_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nvidia_apex_available() is False
    (tmp_path / "apex.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "."])
    assert nvidia_apex_available() is False
