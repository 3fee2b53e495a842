"""The documents against the code: commands, keys, defaults, metrics, links and paths that they name exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import Config, check_config, load_config
from megatron_grpo.launch.cluster import Cluster, choose
from megatron_grpo.sweep.spec import load_sweep
from megatron_grpo.training.metrics import METRIC_KEYS

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/formulas.md", "examples/links.md")
EXAMPLE = ROOT / "examples/tiny/k5.yaml"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def part(document: str, heading: str) -> str:
    """The text under one second-level heading."""
    return re.split(r"^## ", document.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows below a table's rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def documented_keys() -> dict[str, dict[str, str]]:
    """Section -> key -> default as the README's table writes it; a required key has the default ''."""
    table: dict[str, dict[str, str]] = {}
    for section, keys, _ in table_rows(part(read("README.md"), "Config")):
        pairs = (item.partition("=") for item in code(keys))
        table[section.strip("`")] = {key: default for key, _, default in pairs}
    return table


def config_defaults() -> dict[str, dict[str, Any]]:
    """Section -> key -> default of the config models; a required key has the default ''."""
    return {
        section: {
            key: "" if field.is_required() else field.default for key, field in model.annotation.model_fields.items()
        }
        for section, model in Config.model_fields.items()
    }


def test_config_table_names_every_section_and_key_and_no_other() -> None:
    written, real = documented_keys(), config_defaults()
    assert {section: set(keys) for section, keys in written.items()} == {
        section: set(keys) for section, keys in real.items()
    }


def test_config_table_gives_the_defaults() -> None:
    for section, keys in config_defaults().items():
        for key, default in keys.items():
            text = documented_keys()[section][key]
            value = float(text) if isinstance(default, float) else yaml.safe_load(text) if text else ""
            wanted = list(default) if isinstance(default, tuple) else default
            assert (value, type(value)) == (wanted, type(wanted)), f"{section}.{key}={text}"


def arms() -> list[str]:
    tables = [part(read("README.md"), "Arms and controls"), part(read("examples/formulas.md"), "Which GRPO")]
    return [item for table in tables for row in table_rows(table) for item in code(row[1])]


@pytest.mark.parametrize("overrides", arms())
def test_arm_is_valid_on_the_example_and_differs_from_it(overrides: str) -> None:
    config = load_config(EXAMPLE, overrides.split())
    assert check_config(config) == []
    assert config != load_config(EXAMPLE)


def commands() -> list[list[str]]:
    """Words of every command line of the README, its comment cut off."""
    indented = re.findall(r"^    (\S.*)$", read("README.md"), flags=re.MULTILINE)
    return [line.split("#")[0].split() for line in indented]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), flags=re.MULTILINE))
    named = {words[1] for words in commands() if words[0] == "make"}
    for document in DOCUMENTS:
        named |= {item.split()[1] for item in code(read(document)) if item.startswith("make ")}
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("words", [words for words in commands() if words[0] != "make"], ids=" ".join)
def test_command_is_known_with_its_options_and_its_overrides_are_valid(words: list[str]) -> None:
    command, *arguments = words[words.index("megatron_grpo" if "--module" in words else "megatron-grpo") + 1 :]
    found = get_command(app).commands[command]
    if command == "bench":
        found = found.commands[arguments[0]]
    options = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= options
    configs = [word for word in arguments if word.endswith(".yaml")]
    overrides = [word for word in arguments if re.fullmatch(r"\w+\.\w+=.*", word)]
    for path in configs:
        if command == "sweep":
            assert load_sweep(ROOT / path).arms
        else:
            assert check_config(load_config(ROOT / path, overrides)) == []
    if command in ("train", "plan"):
        assert len(configs) == 1


def test_ranks_of_the_cluster_example_fit_its_host_file() -> None:
    found = [words for words in commands() if "--hostfile" in words and "train" in words]
    for words in found:
        config = next(word for word in words if word.endswith(".yaml"))
        slots = choose(Cluster(ROOT / words[words.index("--hostfile") + 1]), load_config(ROOT / config))
        assert len(slots) == 4
    assert len(found) == 3


def test_metric_keys_in_the_readme_exist() -> None:
    named = {item for item in code(part(read("README.md"), "Metrics")) if re.fullmatch(r"[a-z]+/\w+", item)}
    assert len(named) > 20
    assert named <= set(METRIC_KEYS)


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, "examples/hook_only/README.md", "examples/reward_stage/README.md", "examples/cluster/README.md"],
)
def test_links_resolve(document: str) -> None:
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)#\s]+)\)", read(document))
    missing = [target for target in targets if "://" not in target and not (folder / target).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_code_exist(document: str) -> None:
    """Names such as `tools/bench/step.py` or `config/` (a package): somewhere at the top or in the package."""
    paths = [item for item in code(read(document)) if re.fullmatch(r"[\w.]+(/[\w.]+)*/?", item) and "/" in item]
    real = [path for path in paths if path.endswith(("/", ".py")) or path.startswith(("tests/", "tools/"))]
    made_by_a_run = {"tensorboard/", "checkpoints/", "policy/"}
    places = (ROOT, ROOT / "megatron_grpo")
    missing = [path for path in real if not any((place / path).exists() for place in places)]
    assert set(missing) <= made_by_a_run


def test_names_in_contributing_exist() -> None:
    """Classes and functions that a contributor is sent to."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("megatron_grpo", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != Path(__file__).name
    )
    for item in code(read("CONTRIBUTING.md")):
        name = item.rpartition(".")[2]
        if re.fullmatch(r"[\w.]+", item) and re.search(r"[A-Z_]", name) and not item.endswith((".py", ".md")):
            assert re.search(rf"\b{name}\b", sources), item


def test_picture_is_shipped_in_both_forms() -> None:
    assert read("examples/circuit.svg").count("<path") > 50
    assert (ROOT / "examples/circuit.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_readme_is_short_and_complete() -> None:
    readme = read("README.md")
    assert len(readme.splitlines()) < 200
    assert not re.search(r"\b(TODO|TBD|[A-Z]+_OUTPUT)\b", readme)


def test_cli_commands_in_the_readme_are_all_there_are() -> None:
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    named = {words[words.index("megatron-grpo") + 1] for words in commands() if "megatron-grpo" in words}
    assert named == set(get_command(app).commands)


def test_the_studys_results_are_of_its_arms_and_seeds() -> None:
    folder = ROOT / "examples/k_staleness"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))["arms"]
    planned = {arm.name: [run.seed for run in arm.runs] for arm in load_sweep(folder / "sweep.yaml").arms}
    assert {name: arm["seeds"] for name, arm in results.items()} == planned
