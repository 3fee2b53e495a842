"""The recipes' plans in ``examples/cluster/recipes`` are what ``plan`` says today."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_grpo.cli import app

RECIPES = Path(__file__).parents[2] / "examples/cluster/recipes"
LINKS = {"7b": ["--link-rate", "1gbit"], "32b": ["--link-rate", "1gbit"], "70b": ["--latency", "10"]}


def planned(name: str) -> list[str]:
    """Lines without the spaces that fill titles."""
    command = ["plan", f"{RECIPES}/{name}.yaml", "--hostfile", f"{RECIPES}/{name}.hosts", *LINKS[name]]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


@pytest.mark.parametrize("name", LINKS)
def test_the_committed_plan_is_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parents[2])
    text = (RECIPES / f"{name}.plan.txt").read_text(encoding="utf-8")
    command, *lines = text.splitlines()
    assert command == f"$ megatron-grpo plan examples/cluster/recipes/{name}.yaml --hostfile " + " ".join(
        [f"examples/cluster/recipes/{name}.hosts", *LINKS[name]]
    )
    assert planned(name) == lines
