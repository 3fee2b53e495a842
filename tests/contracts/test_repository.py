"""What the README promises exists: targets, documents, licence, pins."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["setup", "demo", "test", "test-all", "check", "fix"])
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("command", ["make demo", "make test", "megatron-grpo train", "deepspeed"])
def test_readme_names_the_commands(command: str) -> None:
    assert command in (ROOT / "README.md").read_text()


def test_licence_is_apache_2() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_ci_runs_the_fast_tests() -> None:
    assert "make test\n" in (ROOT / ".ci/run").read_text()


def test_every_pin_is_exact() -> None:
    lines = (ROOT / "tools/constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.\-]+==[\w.]+", line)] == []
    assert "torch==2.13.0" in pins


def test_pyproject_holds_tool_settings_only() -> None:
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"build-system", "tool"}


def test_what_is_skipped_is_named_and_nothing_is_in_test_all(tmp_path: Path) -> None:
    """For lack of a package: `make test-all` installs what the tests of real models need."""
    assert re.search(r"^test-all: \$\(MODELS\)\n\t.* --all$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    test = tmp_path / "test_one.py"
    test.write_text('import pytest\n@pytest.mark.needs("json", "no_such")\ndef test_it(): import no_such\n')
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", str(test)]
    some, every = (
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)
        for more in ([], ["--all"])
    )
    assert some.returncode == 0 and "1 skipped" in some.stdout and "needs no_such: `make test-all`" in some.stdout
    assert every.returncode == 1 and "1 failed" in every.stdout
