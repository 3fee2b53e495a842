"""Run checkpoints of real engines to universal ones, and from them to any topology and ZeRO stage."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import enable_universal_checkpoint
from deepspeed.checkpoint.ds_to_universal import main as deepspeeds_converter
from safetensors.torch import load_file

from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.engine_files import STATES
from megatron_grpo.conversion.names import global_name
from megatron_grpo.conversion.runs import stage_weights_of
from megatron_grpo.conversion.shards import slice_of
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.checkpoint import load_universal, save_checkpoint
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.loss import SUMS
from megatron_grpo.training.resume import Progress
from megatron_grpo.training.step import StepRunner
from tests.harness import run_ranks
from tests.ranks.support import ROOT, config, minibatch, policy_of, replay_of, runner_of, write_model

ANCHORED = {
    "boundary": {"codec": "lowrank", "rank": 8, "payload": "float32"},
    "anchor": {"enabled": True, "cadence": 2, "delay": 2, "beta": 0.5},
    "merger": {"kind": "delayed_ef", "gate": "agreement"},
    "optim": {"lr": 1e-3},
}
TICKS = 5
slow = pytest.mark.slow
Tensors = dict[str, torch.Tensor]


def run_ticks(steps: StepRunner, policy: Any, ticks: range) -> list[dict[str, float]]:
    values = []
    for tick in ticks:
        policy.boundaries.commit()
        replay = replay_of(minibatch(seed=tick), policy)
        report = steps.ticks.run(tick, replay, uncompressed=False)
        values.append(report.values | {"loss": report.sums[SUMS.index("loss")].item()})  # of this rank
    return values


def train_and_save(
    rank: int, world: int, model: str, layout: Layout, zero: int, root: str, sections: dict[str, Any]
) -> Any:
    """A checkpoint after five ticks; then what two more ticks report."""
    cfg = config(Path(model), layout, zero, **{**ANCHORED, **sections})
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        run_ticks(steps, policy, range(TICKS))
        save_checkpoint(cfg, CheckpointFolder(Path(root), 1), policy, steps, Progress(TICKS, {}))
        return run_ticks(steps, policy, range(TICKS, TICKS + 2))


def load_and_train(
    rank: int, world: int, model: str, layout: Layout, zero: int, universal: str, sections: dict[str, Any]
) -> Any:
    """What the engine holds after loading, checked against the files; then what two ticks report."""
    cfg = config(Path(model), layout, zero, **{**ANCHORED, **sections})
    with policy_of(cfg) as policy:
        steps = runner_of(cfg, policy)
        dropped = load_universal(cfg, Path(universal), policy, steps)
        wrong = differences(policy, Path(universal))
        return dropped, wrong, run_ticks(steps, policy, range(TICKS, TICKS + 2))


def differences(policy: Any, universal: Path) -> list[str]:
    """Parameters whose masters, moments or weights are not, bit for bit, the slices of what the files hold."""
    groups, shape = policy.groups, policy.shape
    optimizer = (
        policy.engine.engine.optimizer if policy.engine.zero_stage == 0 else policy.engine.engine.optimizer.optimizer
    )
    local = {x.megatron: x for x in stage_weights_of(shape, groups.layout.pipeline, groups.at.pipeline)}
    tied = "embedding.word_embeddings.weight" if shape.tied else "output_layer.weight"
    wrong = []

    def whole(name: str, state: str) -> torch.Tensor:
        stored = tied if name == "output_layer.weight" else global_name(local[name])
        tensor = torch.load(universal / "zero" / stored / f"{state}.pt")["param"]
        return slice_of(tensor, local[name], shape, groups.at.tensor, groups.layout.tensor)

    for flat, places in policy.engine.shards.masters():
        held = {"fp32": flat.data, **{state: optimizer.state[flat][state] for state in STATES[1:]}}
        assert optimizer.state[flat]["step"] == TICKS
        for fragment, start in places:
            for state in STATES:
                if fragment.name is not None:
                    mine = held[state].reshape(-1)[start : start + fragment.numel]
                    want = whole(fragment.name, state).flatten()[fragment.start : fragment.start + fragment.numel]
                    wrong += [] if torch.equal(mine, want) else [f"{fragment.name} {state}"]
    for fragment, shard in zip(policy.engine.shards.weight_fragments(), policy.engine.weights(), strict=True):
        want = fragment.cut(whole(str(fragment.name), "fp32")).to(shard.dtype)
        wrong += [] if torch.equal(shard, want) else [f"{fragment.name} weights"]
    return wrong


def universal_of(root: Path, target: Path, **wish: int) -> list[str]:
    said: list[str] = []
    [checkpoint] = root.glob("tick*")
    asked = Wish(to="deepspeed-universal", **wish)
    convert(checkpoint, target, asked, note=said.append, progress=lambda done, total: None)
    return said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tied"), "qwen2", tied=True))


def saved(path: str, tmp_path: Path, layout: Layout, zero: int, **sections: Any) -> list[dict[str, float]]:
    results = run_ranks(
        train_and_save, layout.world_size, path, layout, zero, str(tmp_path / "run"), sections, timeout_s=120.0
    )
    return results[0]  # type: ignore[no-any-return]


SOURCE = Layout(pipeline=2, data=2)


@pytest.mark.parametrize(
    ("zero", "dtype"),
    [
        pytest.param(0, "float32", marks=slow),
        (1, "float32"),
        pytest.param(1, "bfloat16", marks=slow),
        pytest.param(2, "float32", marks=slow),
        pytest.param(3, "float32", marks=slow),
        pytest.param(3, "bfloat16", marks=slow),
    ],
)
def test_the_same_topology_goes_on_bit_for_bit(model: str, zero: int, dtype: str, tmp_path: Path) -> None:
    """M, its excess, the gate's mean, snapshots and codecs come along: the next two ticks are those of the old run."""
    sections = {"model": {"path": model, "dtype": dtype}}
    went_on = saved(model, tmp_path, SOURCE, zero, **sections)
    universal_of(tmp_path / "run", tmp_path / "universal")
    given = (model, SOURCE, zero, str(tmp_path / "universal"), sections)
    for dropped, wrong, values in run_ranks(load_and_train, 4, *given, timeout_s=120.0):
        assert (dropped, wrong) == ([], [])
        assert [value | {"loss": 0.0} for value in values] == [value | {"loss": 0.0} for value in went_on]
    assert [value["anchor/fired"] for value in went_on] == [0.0, 1.0], "the replay of a snapshot that came along"


TARGETS = [
    (Layout(pipeline=2), 3, {}),
    pytest.param(Layout(pipeline=2, data=2), 1, {}, marks=slow),
    (Layout(pipeline=2, tensor=2), 0, {}),
    pytest.param(Layout(pipeline=2, tensor=2), 3, {}, marks=slow),
    pytest.param(Layout(tensor=2, data=2), 2, {}, marks=slow),
    pytest.param(Layout(pipeline=4), 1, {}, marks=slow),
    (Layout(), 3, {"parallel": {"placement": "one_process", "pipeline": 2}}),
]


@pytest.fixture(scope="module", params=[1, pytest.param(0, marks=slow), pytest.param(3, marks=slow)])
def universal(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """From two stages of two tensor ranks at ZeRO 0, two data ranks at 1, and sub-groups of 3,000 numbers at 3."""
    path = tmp_path_factory.mktemp("source")
    layout = Layout(pipeline=2, tensor=2) if request.param == 0 else SOURCE
    went_on = saved(model, path, layout, request.param, **(sub_groups(path) if request.param == 3 else {}))
    universal_of(path / "run", path / "universal")
    return path / "universal", went_on


def sub_groups(folder: Path) -> dict[str, Any]:
    """E12: ZeRO 3 in several sub-groups."""
    settings = json.loads((ROOT / "deepspeed_configs/zero3.json").read_text())
    settings["zero_optimization"]["sub_group_size"] = 3000
    (folder / "zero3.json").write_text(json.dumps(settings))
    return {"deepspeed": {"config": str(folder / "zero3.json")}}


@pytest.mark.parametrize(("layout", "zero", "sections"), TARGETS)
def test_every_topology_and_zero_stage_holds_the_same_bits(
    model: str, universal: Any, layout: Layout, zero: int, sections: dict[str, Any]
) -> None:
    """Ticks go on as they would have, where the boundaries are the same."""
    folder, went_on = universal
    given = (model, layout, zero, str(folder), sections)
    for dropped, wrong, values in run_ranks(load_and_train, layout.world_size, *given, timeout_s=120.0):
        assert wrong == []
        if layout.pipeline == 2:
            assert dropped == []
            for mine, theirs in zip(values, went_on, strict=True):
                # Losses are a rank's own, and the weight is a mean over the padded vocabulary too.
                theirs = theirs | {"loss": mine["loss"], "merger/weight": mine["merger/weight"]}
                assert mine == pytest.approx(theirs, rel=2e-4)
        else:
            [sentence] = dropped
            assert "the fitted codecs (Q) of boundary 0, which belong to 2 stages" in sentence


def test_stages_become_no_stages_at_an_equal_loss(model: str, tmp_path: Path) -> None:
    """E14, without codecs: the loss of the next ticks, and the norm of their gradients."""
    plain = {"boundary": {"codec": "identity", "payload": "float32"}, "anchor": {"enabled": False}}
    plain |= {"merger": {"kind": "none"}}
    results = run_ranks(train_and_save, 2, model, Layout(pipeline=2), 1, str(tmp_path / "run"), plain, timeout_s=120.0)
    universal_of(tmp_path / "run", tmp_path / "universal")
    [(dropped, wrong, values)] = run_ranks(load_and_train, 1, model, Layout(), 2, str(tmp_path / "universal"), plain)
    assert (dropped, wrong) == ([], [])
    assert values[-1]["loss"] == pytest.approx(results[1][-1]["loss"], rel=1e-3) and values[-1]["loss"] != 0
    assert values[-1]["policy/grad_norm"] == pytest.approx(results[1][-1]["policy/grad_norm"], rel=1e-3)


def test_a_topology_that_is_named_is_told_what_it_starts_without(model: str, tmp_path: Path) -> None:
    saved(model, tmp_path, SOURCE, 1)
    said = universal_of(tmp_path / "run", tmp_path / "universal", pipeline=4, data=1)
    assert "dropped: the fitted codecs (Q) of boundary 0, which belong to 2 stages; this run has 4 stages" in said[-1]
    assert len(universal_of(tmp_path / "run", tmp_path / "other", tensor=2, data=1)) == 1, "only what the source is"


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=slow), 3])
def test_deepspeeds_own_converter_finds_the_same(model: str, zero: int, tmp_path: Path) -> None:
    """One stage and one tensor rank, where it needs no help: every fp32 weight and moment, and the step."""
    saved(model, tmp_path, Layout(data=2), zero)
    universal_of(tmp_path / "run", tmp_path / "ours")
    [checkpoint] = (tmp_path / "run").glob("tick*")
    for file in (checkpoint / "engine").glob(
        "*model_states.pt"
    ):  # it cannot read the empty states of Megatron's modules
        content = torch.load(file, weights_only=False)
        content["module"] = {name: x for name, x in content["module"].items() if x is not None}
        torch.save(content, file)
    settings = SimpleNamespace(
        input_folder=str(checkpoint / "engine"),
        output_folder=str(tmp_path / "theirs"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=False,
        inject_missing_state=True,
    )
    deepspeeds_converter(settings)
    for file in sorted((tmp_path / "ours/zero").glob("*/*.pt")):
        if file.stem == "step" and zero == 3:  # it writes none
            continue
        other = torch.load(tmp_path / "theirs/zero" / file.parent.name / file.name, weights_only=False)
        mine = torch.load(file)
        if file.stem == "step":
            assert float(other) == float(mine) == TICKS
            continue
        tensor = other["param"] if isinstance(other, dict) else other
        if file.parent.name.startswith("embedding"):
            tensor = tensor.view(-1, mine["param"].shape[1])[: len(mine["param"])]  # theirs keeps the padding
        assert torch.equal(tensor.flatten(), mine["param"].flatten()), file


def read_by_deepspeed(rank: int, world: int, model: str, universal: str) -> list[str]:
    """Two stages of two tensor ranks, loaded by DeepSpeed's own loader of ZeRO 1."""
    cfg = config(Path(model), Layout(pipeline=2, tensor=2), 1, **ANCHORED)
    with policy_of(cfg) as policy:
        optimizer = policy.engine.engine.optimizer
        shape, groups = policy.shape, policy.groups
        local = {x.megatron: x for x in stage_weights_of(shape, 2, groups.at.pipeline)}
        names = {
            parameter: "embedding.word_embeddings.weight" if name == "output_layer.weight" else global_name(local[name])
            for name, parameter in policy.stage.module.named_parameters()
        }
        optimizer.param_names = names
        enable_universal_checkpoint(list(names))
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", universal)
        for parameter in names:
            address = parameter._hp_mapping.hp_fragment_address
            flat = optimizer.single_partition_of_fp32_groups[0]
            parameter.data.copy_(flat[address.start : address.start + address.numel].view_as(parameter))
        return differences(policy, Path(universal))


@pytest.mark.slow
def test_deepspeeds_own_loader_reads_ours(model: str, tmp_path: Path) -> None:
    """It cuts QKV, gate over up, rows and the vocabulary for two tensor ranks as the tensors' notes say."""
    saved(model, tmp_path, SOURCE, 3)
    universal_of(tmp_path / "run", tmp_path / "universal")
    for wrong in run_ranks(read_by_deepspeed, 4, model, str(tmp_path / "universal"), timeout_s=120.0):
        assert wrong == []


def test_a_run_checkpoint_is_exported_like_the_policy(model: str, tmp_path: Path) -> None:
    """Straight to Hugging Face, from a run and from its universal form: the same bits."""
    saved(model, tmp_path, SOURCE, 3)
    universal_of(tmp_path / "run", tmp_path / "universal")
    [checkpoint] = (tmp_path / "run").glob("tick*")
    for source, name in ((checkpoint, "a"), (tmp_path / "universal", "b")):
        convert(source, tmp_path / name, Wish(to="hf"), note=lambda text: None, progress=lambda done, total: None)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    norm = torch.load(tmp_path / "universal/zero/decoder.final_layernorm.weight/fp32.pt")["param"]
    assert torch.equal(one["model.norm.weight"], norm) and "lm_head.weight" not in one
