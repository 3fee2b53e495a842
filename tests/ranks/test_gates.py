"""An ageing M, its gates and its packed form over ranks: every topology and ZeRO stage merges the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import config, largest_difference, minibatch, policy_of, replay_of, weights_of, write_model

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
TICKS = 6


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def ticks(
    rank: int, world: int, model: str, layout: Layout, zero: int, sections: dict[str, Any], resumed: bool
) -> Result:
    """What six uncompressed ticks report, and the weights after them; C = 2, K = 1, so that M is held for two ticks.

    ``resumed``: another runner goes on after the fourth tick, from the first one's state.
    """
    anchor = {"enabled": True, "cadence": 2, "delay": 1, "beta": 0.0}
    cfg = config(Path(model), layout, zero, **{"anchor": anchor} | sections)
    with policy_of(cfg) as policy:
        runner = TickRunner(cfg, policy)
        values = []
        for tick in range(TICKS):
            if resumed and tick == 4:
                state = runner.state_dict()
                runner = TickRunner(cfg, policy)
                runner.load_state_dict(state)
            replay = replay_of(minibatch(seed=tick), policy)
            values.append(runner.run(tick, replay, uncompressed=False).values)
        return values, weights_of(policy)


def merged(model: Path, layout: Layout, zero: int, merger: dict[str, Any], *, resumed: bool = False) -> Result:
    sections = {"merger": {"kind": "signed_ema", "alpha": 0.25} | merger}
    world = layout.pipeline * layout.data * layout.tensor
    results = run_ranks(ticks, world, str(model), layout, zero, sections, resumed, timeout_s=120.0)
    assert all(values == results[0][0] for values, _ in results)
    return results[0]


@pytest.mark.parametrize("gate", ["cosine", "agreement"])
def test_a_gate_is_the_same_over_stages_replicas_and_shards(llama: Path, gate: str) -> None:
    """Elements and sums count once, whoever holds them."""
    merger = {"gate": gate, "gate_threshold": 0.0, "decay": 0.5}
    whole, weights = merged(llama, Layout(pipeline=1), 0, merger)
    used = [row["merger/weight"] for row in whole]
    for row, weight in zip(whole[2:], used[2:], strict=True):
        full = 0.75 if row["anchor/age"] == 1 else 0.375
        assert weight == (full if row["merger/gate_cos"] > 0.0 else 0.0) if gate == "cosine" else 0 < weight < full
    assert used[:2] == [0.0, 0.0] and len(set(used)) > 2
    for layout, zero in ((Layout(pipeline=2), 1), (Layout(pipeline=2, data=2), 3)):
        sharded, others = merged(llama, layout, zero, merger)
        for mine, theirs in zip(sharded, whole, strict=True):
            assert mine["merger/weight"] == pytest.approx(theirs["merger/weight"], rel=1e-3)
            assert ("merger/gate_cos" in mine) == ("anchor/age" in mine)
            assert mine.get("merger/gate_cos", 0.0) == pytest.approx(theirs.get("merger/gate_cos", 0.0), abs=1e-3)
        assert largest_difference(others, weights) < 1e-6


def test_resumed_gates_and_signs_go_on_bit_for_bit(llama: Path) -> None:
    merger = {"gate": "agreement", "packed_signs": True, "decay": 0.5}
    whole, weights = merged(llama, Layout(pipeline=2), 1, merger)
    again, others = merged(llama, Layout(pipeline=2), 1, merger, resumed=True)
    assert again == whole
    assert all(torch.equal(others[name], tensor) for name, tensor in weights.items())
    assert all("anchor/cos_fast" not in row and "merger/gate_cos" not in row for row in whole)
    assert "anchor/sign_agreement" in whole[-1]


def test_controls_are_the_plain_merger_bit_for_bit(llama: Path) -> None:
    """A cosine gate that is always open, M packed to its signs, a hold that ends after the next arrival."""
    plain, weights = merged(llama, Layout(pipeline=2), 1, {})
    assert [row["merger/weight"] for row in plain] == [0.0, 0.0, 0.75, 0.75, 0.75, 0.75]
    for merger in ({"gate": "cosine", "gate_threshold": -1.0}, {"packed_signs": True}, {"hold": 2}):
        _, others = merged(llama, Layout(pipeline=2), 1, merger)
        assert all(torch.equal(others[name], tensor) for name, tensor in weights.items()), merger


def test_m_is_used_as_long_as_its_settings_say(llama: Path) -> None:
    decayed, _ = merged(llama, Layout(pipeline=2), 1, {"decay": 0.5})
    assert [row["merger/weight"] for row in decayed] == [0.0, 0.0, 0.75, 0.375, 0.75, 0.375]
    held, _ = merged(llama, Layout(pipeline=2), 1, {"hold": 1})
    assert [row["merger/weight"] for row in held] == [0.0, 0.0, 0.75, 0.0, 0.75, 0.0]
