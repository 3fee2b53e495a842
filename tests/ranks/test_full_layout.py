"""Every way of cutting a model at once: ZeRO 3 x pipeline 2 x data 2 x tensor 2, eight ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import HIDDEN, config, minibatch, policy_of, replay_of, weights_of, write_model
from tests.ranks.test_zero import update_difference

pytestmark = pytest.mark.slow
EIGHT = Layout(pipeline=2, data=2, tensor=2)
FULL_RANK = {
    "boundary": {
        "codec": "lowrank",
        "rank": HIDDEN,
        "links": ["pipeline", "tensor"],
        "tensor_rank": HIDDEN,
        "payload": "float32",
        "basis": "random",
    }
}


def two_ticks(
    rank: int, world: int, model: str, layout: Layout, zero: int, sections: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], int]:
    """The change of every weight, and the bytes of this rank's optimizer state (moments and fp32 masters)."""
    cfg = config(Path(model), layout, zero, optim={"lr": 1e-3, "clip": 0.5}, **sections)
    with policy_of(cfg) as policy:
        before = weights_of(policy)
        runner = TickRunner(cfg, policy)
        for tick in range(2):
            runner.run(tick, replay_of(minibatch(seed=tick), policy), uncompressed=False)
        after = weights_of(policy)
        engine = policy.engine.engine.optimizer
        optimizer = engine.optimizer if zero else engine
        state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
        held = [flat for flat, _ in policy.engine.shards.masters()] + [x for x in state if x.ndim]
        return {name: after[name] - before[name] for name in before}, sum(x.nbytes for x in held)


@pytest.mark.parametrize("sections", [{}, FULL_RANK], ids=["identity", "full rank on both links"])
def test_eight_ranks_leave_the_weights_of_one(tmp_path: Path, sections: dict[str, Any]) -> None:
    model = str(write_model(tmp_path / "llama"))
    [(reference, whole_bytes)] = run_ranks(two_ticks, 1, model, Layout(), 0, {})
    eight = run_ranks(two_ticks, 8, model, EIGHT, 3, sections, timeout_s=240.0)
    assert all(update_difference(update, reference) < 1e-4 for update, _ in eight)
    four = run_ranks(two_ticks, 4, model, Layout(pipeline=2, tensor=2), 3, sections, timeout_s=240.0)
    for rank, (_, held) in enumerate(eight):
        alone = four[rank // 4 * 2 + rank % 2][1]  # the same stage and tensor shard without replicas
        # Half of it; ZeRO pads each of some 20 parameters to an even number of elements, 3 tensors of 4 bytes.
        assert alone / 2 <= held <= alone / 2 + 3 * 4 * 20
        assert held < whole_bytes / 6
