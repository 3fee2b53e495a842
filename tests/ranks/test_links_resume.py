"""Case F11: bases of the tensor link, warm factors and remainders of the data link are in the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.ops.lowrank import digest
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.checkpoint import load_checkpoint, load_universal
from tests.harness import run_ranks
from tests.ranks.support import config, policy_of, runner_of, write_model
from tests.ranks.test_universal import (
    ANCHORED,
    TICKS,
    differences,
    load_and_train,
    run_ticks,
    train_and_save,
    universal_of,
)

pytestmark = pytest.mark.slow

LAYOUT = Layout(data=2, tensor=2)
LINKED: dict[str, Any] = {
    "boundary": {
        "codec": None,
        "links": ["tensor", "data"],
        "payload": "float32",
        "basis": "anchor",
        "tensor_rank": 8,
        "data_rank": 2,
        "data_warmup": 1,
    }
}


def resume(rank: int, world: int, model: str, checkpoint: str) -> Any:
    cfg = config(Path(model), LAYOUT, 1, **{**ANCHORED, **LINKED})
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        load_checkpoint(Path(checkpoint), policy, steps)
        return run_ticks(steps, policy, range(TICKS, TICKS + 2))


def load_bases(
    rank: int, world: int, model: str, layout: Layout, zero: int, universal: str, sections: dict[str, Any]
) -> Any:
    """Digests of the tensor link's bases after loading, and of those in the file, for this stage's layers."""
    cfg = config(Path(model), layout, zero, **{**ANCHORED, **sections})
    with policy_of(cfg) as policy:
        dropped = load_universal(cfg, Path(universal), policy, runner_of(cfg, policy))
        assert policy.boundaries.tensor is not None
        mine = policy.boundaries.tensor.state_dict()
        stored = torch.load(Path(universal) / "state/run.pt", weights_only=True)["tensor_link"]
        assert {int(name.split()[0]) for name in mine} == set(policy.stage.layers) and len(stored) == 16
        digests = [{name: int(digest(states[name]["current"])) for name in sorted(mine)} for states in (mine, stored)]
        return dropped, differences(policy, Path(universal)), *digests


def lossless(values: list[dict[str, float]]) -> list[dict[str, float]]:
    return [value | {"loss": 0.0} for value in values]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[dict[str, float]]]:
    """A model, the folder of its run after five ticks, what two more ticks report."""
    folder = tmp_path_factory.mktemp("run")
    model = str(write_model(folder / "model"))
    given = (model, LAYOUT, 1, str(folder / "run"), LINKED)
    return model, folder, run_ranks(train_and_save, 4, *given, timeout_s=120.0)[0]


def test_a_checkpoint_goes_on_bit_for_bit(run: tuple[str, Path, list[dict[str, float]]]) -> None:
    model, folder, went_on = run
    [checkpoint] = (folder / "run").glob("tick*")
    for values in run_ranks(resume, 4, model, str(checkpoint), timeout_s=120.0):
        assert lossless(values) == lossless(went_on)
    assert [value["anchor/fired"] for value in went_on] == [0.0, 1.0]


def test_so_does_its_form_without_a_topology_and_elsewhere_says_what_it_lacks(
    run: tuple[str, Path, list[dict[str, float]]],
) -> None:
    model, folder, went_on = run
    assert not any("dropped" in sentence for sentence in universal_of(folder / "run", folder / "universal"))
    given = (model, LAYOUT, 1, str(folder / "universal"), LINKED)
    for dropped, wrong, values in run_ranks(load_and_train, 4, *given, timeout_s=120.0):
        assert (dropped, wrong) == ([], [])
        assert lossless(values) == lossless(went_on)
    elsewhere = Layout(pipeline=2, tensor=2)
    moved = {"boundary": LINKED["boundary"] | {"links": ["tensor"], "data_rank": None, "data_warmup": None}}
    given = (model, elsewhere, 0, str(folder / "universal"), moved)
    for dropped, wrong, held, learned in run_ranks(load_bases, 4, *given, timeout_s=120.0):
        assert len(dropped) == 1 and dropped[0].startswith("dropped: the warm factors and remainders of compressed")
        assert wrong == [] and learned and held == learned, "bases belong to layers, wherever they lie"
    said = universal_of(folder / "run", folder / "elsewhere", data=4)
    assert said[-1].startswith("dropped: the warm factors and remainders of compressed gradients")
