"""The export, weight by weight: the very tensors that the ranks hold, at every layout and ZeRO stage."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.export import export_policy
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, minibatch, policy_of, replay_of, weights_of, write_model


def train_and_export(
    rank: int, world: int, model: str, layout: Layout, zero: int, dtype: str, target: str
) -> dict[str, torch.Tensor]:
    """A tick and the export; the weights as they were gathered all at once."""
    cfg = config(Path(model), layout, zero, model={"path": model, "dtype": dtype}, optim={"lr": 1e-2})
    with policy_of(cfg) as policy:
        TickRunner(cfg, policy).run(0, replay_of(minibatch(), policy), uncompressed=False)
        export_policy(policy, Path(target), source=Path(model), tokenizer=TINY)
        return weights_of(policy)


@pytest.mark.parametrize(
    ("family", "tied", "layout", "zero", "dtype"),
    [
        ("qwen2", True, Layout(), 0, "float32"),
        ("qwen2", True, Layout(pipeline=2, tensor=2), 1, "float32"),
        ("llama", False, Layout(pipeline=2, data=2), 3, "float32"),
        ("qwen2", True, Layout(pipeline=2, data=2), 3, "bfloat16"),
        ("qwen3", False, Layout(tensor=2, data=2), 3, "float32"),
        ("llama", True, Layout(pipeline=3), 2, "float32"),
    ],
)
def test_export_holds_what_the_ranks_hold(
    family: str, tied: bool, layout: Layout, zero: int, dtype: str, tmp_path: Path
) -> None:
    """E3: the copy of a tied embedding on the last stage equals the first stage's after an update."""
    model = write_model(tmp_path / "model", family, tied=tied)
    gathered = run_ranks(
        train_and_export, layout.world_size, str(model), layout, zero, dtype, str(tmp_path / "out"), timeout_s=120.0
    )[0]
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert after.keys() == before.keys() == gathered.keys()
    assert all(torch.equal(after[name], gathered[name]) for name in after)
    assert {str(tensor.dtype) for tensor in after.values()} == {f"torch.{dtype}"}
    changed = [not torch.equal(after[name].float(), before[name]) for name in after]
    assert all(changed), "every tensor has moved"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def export_without_gradients(rank: int, world: int, model: str, folder: str) -> float:
    """The gradient norm of a tick whose advantages are all zero; every rank exports to a folder of its own."""
    cfg = config(Path(model), Layout(pipeline=2, data=2), 1)
    with policy_of(cfg) as policy:
        batch = minibatch()
        still = replace(batch, advantages_B=torch.zeros_like(batch.advantages_B))
        report = TickRunner(cfg, policy).run(0, replay_of(still, policy), uncompressed=False)
        export_policy(policy, Path(folder) / str(rank), source=Path(model), tokenizer=TINY)
    return report.values["policy/grad_norm"]


def test_g6_one_rank_writes_and_no_gradient_is_no_hang(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert run_ranks(export_without_gradients, 4, str(model), str(tmp_path / "out")) == [0.0] * 4
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]


def export_drifted(rank: int, world: int, model: str, target: str) -> None:
    with policy_of(config(Path(model), Layout(pipeline=2))) as policy:
        if rank == 1:
            policy.stage.module.output_layer.weight.data[0, 0] += 1
        export_policy(policy, Path(target), source=Path(model), tokenizer=TINY)


def test_tied_copies_that_drifted_apart_are_not_exported(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen2", tied=True)
    with pytest.raises(AssertionError, match=r"rank 0 failed first:[^$]*differs from the embedding it is tied to"):
        run_ranks(export_drifted, 2, str(model), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
