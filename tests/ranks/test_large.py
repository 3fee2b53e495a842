"""What keeps a large model small on a rank: cut as it is built, gathered layer by layer, offloaded to the host."""

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_grpo.backends.deepspeed.runtime import cut_at_once, deepspeed_runtime
from megatron_grpo.backends.huggingface import load_hf_config
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.model import build_stage, stage_layers
from megatron_grpo.config import deepspeed_settings
from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.files import stage_weights
from megatron_grpo.conversion.reader import hf_source
from megatron_grpo.ops.host import HostShards
from megatron_grpo.parallel.groups import Layout, build_groups
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import SamplingRule
from megatron_grpo.training.checkpoint import load_checkpoint, load_universal, save_checkpoint
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.gathering import weights_for_sampling
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.resume import Progress, read_progress
from tests.harness import run_ranks
from tests.ranks.support import ROOT, VOCAB, config, minibatch, policy_of, replay_of, runner_of, weights_of, write_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and that are still alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.device.type != "meta":
                self._see(made.untyped_storage(), given)
        return out

    def _see(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        if storage._cdata not in self._known | given:
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("deep"), "qwen2", tied=True, layers=24))


def build(rank: int, world: int, model: str, zero: int) -> tuple[int, int, int, int]:
    """Bytes alive at the most and at the end of building a stage; of the whole stage; of its largest parameter."""
    cfg = config(Path(model), Layout(pipeline=2, data=2), zero)
    settings, groups = deepspeed_settings(cfg), build_groups(Layout(pipeline=2, data=2), 60.0)
    shape = model_shape(load_hf_config(Path(model)))
    with megatron_runtime(CPU), deepspeed_runtime(groups), hf_source(Path(model), shape) as source:
        with LiveBytes() as seen:
            stage = build_stage(
                source,
                shape,
                groups,
                split=(12, 12),
                dtype=torch.float32,
                recompute=False,
                device=CPU,
                settle=cut_at_once(groups, settings),
            )
        layers = stage_layers((12, 12), groups.at.pipeline)
        places = {"first": groups.is_first_stage, "last": groups.is_last_stage}
        options = {**places, "tensor_rank": 0, "tensor_size": 1, "dtype": torch.float32}
        sizes = {name: x.nbytes for name, x in stage_weights(source, shape, layers, **options)}
    assert sizes.keys() == {name for name, _ in stage.module.named_parameters()}
    return seen.peak, seen.live, sum(sizes.values()), max(sizes.values())


def test_at_zero_3_no_rank_ever_holds_its_stage(deep: str) -> None:
    """The most that is alive while a stage is built: a replica's share, and two copies of the parameter in work."""
    for peak, live, stage, largest in run_ranks(build, 4, deep, 3):
        assert stage > 20 * largest
        assert live == pytest.approx(stage / 2, rel=0.01)
        assert peak <= live + 2 * largest
    for peak, _, stage, _ in run_ranks(build, 4, deep, 1):
        assert peak > stage


def differing(rank: int, world: int, model: str, zero: int, dtype: str) -> list[str]:
    """Parameters of this rank's stage that are not, bit for bit, what the checkpoint holds."""
    cfg = config(Path(model), Layout(pipeline=2, data=2), zero, model={"dtype": dtype})
    with policy_of(cfg) as policy, hf_source(Path(model), policy.shape) as source:
        groups = policy.groups
        places = {"first": groups.is_first_stage, "last": groups.is_last_stage}
        options = {**places, "tensor_rank": 0, "tensor_size": 1, "dtype": getattr(torch, dtype)}
        with policy.engine.whole_parameters():
            mine = {name: x.detach().clone() for name, x in policy.stage.module.named_parameters()}
        wanted = dict(stage_weights(source, policy.shape, policy.stage.layers, **options))
        assert mine.keys() == wanted.keys()
        frequencies = policy.stage.module.rotary_pos_emb.inv_freq
        return [name for name, x in mine.items() if not torch.equal(x, wanted[name])] + (
            [] if frequencies.dtype == torch.float32 else ["rotary frequencies"]
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_cut_at_once_is_the_checkpoint(deep: str, dtype: str) -> None:
    """The tied head of the last stage too; and RoPE's frequencies are as exact as ever."""
    assert run_ranks(differing, 4, deep, 3, dtype) == [[]] * 4


ANCHORED: dict[str, dict[str, Any]] = {
    "boundary": {"codec": "lowrank", "rank": 8, "payload": "float32"},
    "anchor": {"enabled": True, "cadence": 2, "delay": 2, "beta": 0.5},
    "merger": {"kind": "delayed_ef", "gate": "agreement"},
    "optim": {"lr": 1e-3, "clip": 0.5},
}
HOST: dict[str, Any] = {"anchor": ANCHORED["anchor"] | {"place": "cpu"}}
TICKS = 6


def ticks_of(policy: Any, steps: Any, ticks: range) -> list[dict[str, float]]:
    values = []
    for tick in ticks:
        policy.boundaries.commit()
        values.append(steps.ticks.run(tick, replay_of(minibatch(seed=tick), policy), uncompressed=False).values)
    return values


def train(rank: int, world: int, model: str, zero: int, sections: dict[str, Any]) -> Any:
    """Six ticks with an anchor: what they report, the weights after them, and which kind of list M is."""
    cfg = config(Path(model), Layout(data=2), zero, **(ANCHORED | sections))
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        values = ticks_of(policy, steps, range(TICKS))
        return values, weights_of(policy), type(steps.ticks._memory.m)


def settings_file(folder: Path, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed file with that ``zero_optimization``, as a section of the config."""
    settings = json.loads((ROOT / "deepspeed_configs/zero1.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {"zero_optimization": zero}))
    return {"deepspeed": {"config": str(folder / "settings.json")}}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("small")))


ON_HOST = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("zero", "dtype"),
    [
        (1, "float32"),
        (2, "float32"),
        (3, "float32"),
        (2, "bfloat16"),
        (3, "bfloat16"),
    ],
)
def test_offload_changes_no_bit(small: str, zero: int, dtype: str, tmp_path: Path) -> None:
    """Optimizer, M, what it is made of and snapshots in host memory: every gradient and weight is as it was."""
    options: dict[str, Any] = {"offload_param": ON_HOST} if zero == 3 else {}
    file = settings_file(tmp_path, stage=zero, offload_optimizer=ON_HOST, **options)
    model = {"model": {"dtype": dtype}}
    plain = run_ranks(train, 2, small, zero, model, timeout_s=120.0)
    hosted = run_ranks(train, 2, small, zero, model | HOST | file, timeout_s=120.0)
    for (values, weights, kind), (other, others, hosted_kind) in zip(plain, hosted, strict=True):
        assert [row["anchor/fired"] for row in values] == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
        assert values == other
        assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
        assert (kind, hosted_kind) == (list, HostShards)


WORDS = [[5, 9, 33], [7], [12, 3, 44, 58, 6, 21, 30, 8], [40, 41]]
# A third of the vocabulary ends a sequence, so that lengths differ.
DRAWN = SamplingRule(
    temperature=1.3,
    top_k=0,
    top_p=1.0,
    max_response=8,
    valid=VOCAB,
    end_ids=frozenset(range(2, VOCAB, 3)),
    pad_id=0,
    seed=5,
)


@dataclass(frozen=True)
class Sampled:
    """``gathers``: how often weights were made whole; ``peak``: the most bytes alive of what sampling made."""

    batch: Batch
    gathers: int
    peak: int


def sample(policy: Policy, mode: Any, prompts: list[list[int]], rule: SamplingRule) -> Sampled:
    """One batch of this replica, in the way that ``rollout.gather`` says."""
    gathers = 0
    whole_parameters = policy.engine.whole_parameters

    @contextmanager
    def counted(*some: torch.nn.Parameter) -> Iterator[None]:
        nonlocal gathers
        gathers += 1
        with whole_parameters(*some):
            yield

    rows = torch.arange(len(prompts)) + len(prompts) * policy.groups.at.data
    with patch.object(policy.engine, "whole_parameters", counted), LiveBytes() as seen:
        with weights_for_sampling(policy, mode, sequences=len(prompts), columns=16):
            batch = policy.sampler.sample(prompts, rows, rule)
        policy.lean.close()
    return Sampled(batch, gathers, seen.peak)


def in_each_mode(rank: int, world: int, model: str, layout: Layout) -> tuple[list[Sampled], int]:
    """Sampled in every mode, with ``auto`` once more where one replica is short of memory; the whole stage's bytes."""
    with policy_of(config(Path(model), layout, 3)) as policy:
        whole, prompts = policy.engine.whole_bytes(), WORDS[policy.groups.at.data :]
        found = [sample(policy, mode, prompts, DRAWN) for mode in ("once", "layer", "auto")]
        short = policy.groups.at.data == 1
        with patch("megatron_grpo.training.gathering.free_bytes", lambda _: 2 * whole if short else 100 * whole):
            return [*found, sample(policy, "auto", prompts, DRAWN)], whole


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(pipeline=2, data=2)], ids=["dp2", "pp2dp2"])
def test_gathering_by_layer_samples_the_same(deep: str, layout: Layout) -> None:
    """Bit for bit, though replicas end at different times; and no more than a few layers are whole at a time."""
    results = run_ranks(in_each_mode, layout.world_size, deep, layout)
    for (once, layer, roomy, tight), whole in results:
        for part in ("tokens_BS", "response_lengths_B", "sampler_logp_BR"):
            assert torch.equal(getattr(once.batch, part), getattr(layer.batch, part)), part
        assert once.gathers == 1 and layer.gathers > 24
        assert roomy.gathers == 1, "a toy fits into half of any memory"
        assert tight.gathers == layer.gathers, "the weights are half of what is free, and a cache comes on top"
        assert once.peak > whole > 2 * layer.peak
    lengths = [sampled.batch.response_lengths_B.max() for (sampled, *_), _ in results]
    assert len(set(lengths)) > 1


def of_two_and_five(rank: int, world: int, model: str) -> tuple[int, float]:
    """Case G1: the length of this replica's one response, and how often all its layers were gathered."""
    with policy_of(config(Path(model), Layout(data=2), 3)) as policy:
        free = sample(policy, "once", [[7, 9]], replace(DRAWN, end_ids=frozenset()))
        ids = free.batch.responses_BR[0].tolist()
        last = (1, 4)[rank]
        assert len(ids) == 8 and ids[last] not in ids[:last]
        ended = sample(policy, "layer", [[7, 9]], replace(DRAWN, end_ids=frozenset({ids[last]})))
        portions = len(list(policy.lean._portions()))
        return int(ended.batch.response_lengths_B), ended.gathers / portions


def test_replicas_that_end_early_gather_along(small: str) -> None:
    """Case G1: ends at the second and the fifth token of at most eight; all layers are gathered five times on both."""
    assert run_ranks(of_two_and_five, 2, small) == [(2, 5.0), (5, 5.0)]


def go_on(rank: int, world: int, model: str, zero: int, root: str, sections: dict[str, Any]) -> Any:
    """Four ticks, a checkpoint, two more; then these two from the checkpoint, in host memory and on the device."""
    plain = config(Path(model), Layout(data=2), zero, **ANCHORED)
    cfg = config(Path(model), Layout(data=2), zero, **(ANCHORED | sections))
    folder = CheckpointFolder(Path(root), 1)
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        ticks_of(policy, steps, range(4))
        save_checkpoint(cfg, folder, policy, steps, Progress(4, {}))
        went_on = ticks_of(policy, steps, range(4, TICKS)), weights_of(policy)
    [checkpoint], resumed = Path(root).glob("tick*"), []
    for again in (cfg, plain):
        with policy_of(again) as policy:
            steps = runner_of(again, policy)
            assert read_progress(checkpoint, again).steps == 4
            load_checkpoint(checkpoint, policy, steps)
            kind = type(steps.ticks._memory.m)
            resumed.append((kind, ticks_of(policy, steps, range(4, TICKS)), weights_of(policy)))
    return went_on, resumed


def from_universal(rank: int, world: int, model: str, universal: str, sections: dict[str, Any]) -> Any:
    """Two ticks from a universal checkpoint, and the weights after them."""
    cfg = config(Path(model), Layout(data=2), 1, **(ANCHORED | sections))
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        dropped = load_universal(cfg, Path(universal), policy, steps)
        return ticks_of(policy, steps, range(4, TICKS)), weights_of(policy), dropped


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_offloaded_run_goes_on_from_its_checkpoint(small: str, zero: int, tmp_path: Path) -> None:
    """Bit for bit from its own files, and from what they are converted to without offload, and with it."""
    hosted = HOST | settings_file(tmp_path, stage=zero, offload_optimizer=ON_HOST)
    root, universal = tmp_path / "run", tmp_path / "universal"
    results = run_ranks(go_on, 2, small, zero, str(root), hosted, timeout_s=120.0)
    [(values, weights), resumed] = results[0]
    assert [kind for kind, *_ in resumed] == [HostShards, list] and values[0]["anchor/fired"] == 1.0
    [checkpoint] = root.glob("tick*")
    convert(checkpoint, universal, Wish(to="deepspeed-universal"), note=lambda _: None, progress=lambda *_: None)
    plain = {"deepspeed": {"config": str(ROOT / f"deepspeed_configs/zero{zero}.json")}}
    for sections in (plain, hosted):
        again, others, dropped = run_ranks(from_universal, 2, small, str(universal), sections, timeout_s=120.0)[0]
        assert dropped == []
        resumed.append((None, again, others))
    for _, again, others in resumed:
        assert again == values
        assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("name", ["zero3", "zero3_offload", "zero2", "zero1_bf16"])
def test_every_shipped_file_of_large_runs_trains(small: str, name: str, tmp_path: Path) -> None:
    """Ticks of two replicas in the format that the file is for: finite norms, and weights that moved alike on both."""
    dtype = "bfloat16" if name == "zero1_bf16" else "float32"
    file = {"deepspeed": {"config": str(ROOT / f"deepspeed_configs/{name}.json")}, "model": {"dtype": dtype}}
    first, second = run_ranks(train, 2, small, 1, file, timeout_s=120.0)
    assert all(0 < row["policy/grad_norm"] < float("inf") and row["train/skipped"] == 0 for row in first[0])
    start = {name: x.to(getattr(torch, dtype)) for name, x in load_file(Path(small) / "model.safetensors").items()}
    for key, weight in first[1].items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, second[1][key]) and not torch.equal(weight, start[key]), key
