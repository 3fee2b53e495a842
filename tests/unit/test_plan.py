"""The plan's numbers, by hand: parameters, schedule, links, memory; and the CLI around them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from megatron_grpo.boundary.build import build_codecs
from megatron_grpo.boundary.crossing import Crossing, Pass
from megatron_grpo.boundary.store import BLOCK_BYTES
from megatron_grpo.cli import app
from megatron_grpo.config import DIRECTIONS, BoundaryConfig, ConfigError, load_config
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.launch.hosts import Host
from megatron_grpo.ops.rows import carrying_rows
from megatron_grpo.plan import Device, Rates, build_plan, parse_rate, predict
from megatron_grpo.plan.coding import Work, coding_work
from megatron_grpo.plan.memory import CACHE_BLOCK, snapshots, stage_memory
from megatron_grpo.plan.network import FRAME, Line, Placement, placement_of
from megatron_grpo.plan.schedule import StageTimes, pass_seconds, prefill_seconds, round_seconds
from megatron_grpo.plan.sizes import parameter_count, read_shape, stage_sizes
from megatron_grpo.plan.sums import gradient_payload, tensor_row
from megatron_grpo.plan.traffic import basis_bytes, training_passes
from megatron_grpo.plan.zero import read_engine
from tests.unit.test_config import home
from tools.bench.fit import least_squares
from tools.bench.scaling import HIDDEN, PIPELINES, Point, contradictions, crossover

__all__ = ["home"]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny/k5.yaml"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def test_parameters_of_published_models() -> None:
    """Qwen2.5-1.5B has 1,543,714,304; the others are in the recipes."""
    recipes = ROOT / "examples/cluster/recipes"
    counts = [parameter_count(model_shape(QWEN))]
    counts += [
        parameter_count(model_shape(json.loads((recipes / name / "config.json").read_text())))
        for name in ("qwen2.5-7b", "qwen2.5-32b", "llama-3-70b")
    ]
    assert counts == [1_543_714_304, 7_615_616_512, 32_763_876_352, 70_553_706_496]


def test_a_stage_of_llama_70b_by_hand() -> None:
    """H 8192, F 28672, 64 heads of 128 and 8 KV groups, V 128256, which 256 divides; 10 layers, two tensor ranks."""
    shape = model_shape(json.loads((ROOT / "examples/cluster/recipes/llama-3-70b/config.json").read_text()))
    first, *_, last = stages = stage_sizes(shape, pipeline=8, tensor=2)
    matrices = (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) // 2
    layer, head = matrices + 2 * 8192, 128256 * 8192 // 2
    assert [size.parameters for size in stages[1:7]] == [10 * layer] * 6
    assert first.parameters == 10 * layer + head and last.parameters == 10 * layer + head + 8192
    assert first.multiplied == 10 * matrices and last.multiplied == 10 * matrices + head
    assert (last.queries, last.keys, last.ffn, last.vocab, last.largest) == (4096, 512, 14336, 64128, layer)
    assert first.flops(tokens=3, columns=5) == 2 * 10 * matrices * 3 + 4 * 10 * 4096 * 5 * 3


def test_a_tied_head_is_multiplied_where_it_is() -> None:
    shape = model_shape(QWEN)
    (whole,) = stage_sizes(shape, pipeline=1, tensor=1)
    first, last = stage_sizes(shape, pipeline=2, tensor=1)
    table = 152064 * 1536 if 151936 % 128 else 151936 * 1536
    assert first.parameters + last.parameters == whole.parameters + table  # its copy on the last stage
    assert first.multiplied + last.multiplied == whole.multiplied


CODINGS: list[dict[str, Any]] = [
    {},
    {"predict": "embedding"},
    {"predict": "none"},
    {"codec": "lowrank"},
    {"codec": "lowrank", "payload": "float32", "rank": 7},
    {"codec": "lowrank", "payload": "int4", "rank": 6},
    {"codec": "lowrank", "payload": "waterfill", "budget": 0.1},
    {"codec": "lowrank", "shared_basis": True},
    {"codec": "mask"},
    {"codec": "identity", "basis": "random"},
]


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_what_a_basis_costs_is_what_crosses(coding: dict[str, Any]) -> None:
    """The plan's arithmetic against the codecs themselves."""
    cfg = BoundaryConfig(**coding)
    codecs = build_codecs(cfg, hidden=96, index=0, seed=0, embedding_VH=torch.empty(0, 96))
    assert basis_bytes(cfg, 96) == sum(learner.flat().nbytes for _, learner in codecs.learners())


def even(stages: int, *, work: float, way: float = 0.0) -> StageTimes:
    return StageTimes([work] * stages, [2 * work] * stages, [way] * (stages - 1), [way] * (stages - 1))


@pytest.mark.parametrize(
    ("times", "micros", "backward", "seconds"),
    [
        (even(1, work=1), 4, True, 12),
        (even(4, work=1), 8, True, (8 + 3) * 3),  # 1F1B: micro-batches and a bubble of all stages but one
        (even(4, work=1), 2, True, (2 + 3) * 3),
        (even(4, work=1), 8, False, 8 + 3),
        # the wire alone: F0, then F1 and B0 pass each other, and so on, then the last B
        (even(2, work=0, way=5), 4, True, (4 + 1) * 5),
        (even(2, work=0, way=5), 4, False, 4 * 5),
        # one micro-batch: there and back again
        (even(3, work=1, way=10), 1, True, 3 * 3 + 4 * 10),
        # two stages, forward 1 and 3, nothing back: 1, way 2, then 3 and its way by turns; the other one waits
        (StageTimes([1, 3], [0, 0], [2], [0]), 3, False, 1 + 3 * (2 + 3)),
    ],
)
def test_passes_by_hand(times: StageTimes, micros: int, backward: bool, seconds: float) -> None:
    assert pass_seconds(times, micros, backward=backward) == pytest.approx(seconds)


def test_sampling_rounds_by_hand() -> None:
    """Three stages; the second takes a micro-batch up for 4 + 2. With two in flight the way of one decides: 15 + back;
    with four the second stage."""
    work, ways = [1.0, 2.0, 3.0], [4.0, 2.0]
    assert round_seconds(work, ways, 3.0, in_flight=2) == 12 + 3
    assert round_seconds(work, ways, 3.0, in_flight=4) == 4 * 6
    assert prefill_seconds(work, ways, in_flight=3) == 12 + 2 * 6


def test_links_by_hand() -> None:
    link = Line(8e6, 0.25)
    assert link.seconds(0) == 0 and link.seconds(1e6) == pytest.approx(0.25 + FRAME)
    assert replace(link, shared=3).seconds(1e6) == pytest.approx(0.25 + 3 * FRAME)
    assert Line(8e6).ring(4e6, 4) == pytest.approx(6 * FRAME)  # six messages of a quarter
    assert Line(8e6).gather(4e6, 4) == pytest.approx(3 * FRAME)
    assert link.ring(1e6, 1) == 0


def test_hosts_decide_what_is_slow_and_shared() -> None:
    """Stages 0 and 1 on a, 2 on b: both replicas cross 1>2, one host pair; replicas and tensor ranks are neighbours."""
    config = load_config(EXAMPLE, ["parallel.pipeline=3", "parallel.data=2", "parallel.tensor=2"])
    network = placement_of(config, [Host("a", 8), Host("b", 4)]).network(Rates(1e6, 0.5, 1e9, 0.25))
    near, far = Line(1e9, 0.25), Line(1e6, 0.5, 2)
    assert network.boundaries == (near, far)
    assert (network.tensor, network.data, network.embedding) == (near, near, far)
    # a replica a host: gradients of both shards and all stages meet on it
    config = load_config(EXAMPLE, ["parallel.pipeline=1", "parallel.data=2", "parallel.tensor=2"])
    assert placement_of(config, [Host("a", 2), Host("b", 2)]).network(Rates(1e6, 0.5)).data == Line(1e6, 0.5, 2)


def test_hosts_that_do_not_fit_are_refused() -> None:
    config = load_config(EXAMPLE, ["parallel.tensor=2"])
    with pytest.raises(ConfigError, match="2 hosts have 3 slots and the config needs 4 ranks"):
        placement_of(config, [Host("a", 1), Host("b", 2)])
    with pytest.raises(ConfigError, match=r"parallel.tensor=2: ranks 0 to 1 .* a and b"):
        placement_of(config, [Host("a", 1), Host("b", 3)])


@pytest.mark.parametrize(("text", "rate"), [("100mbit", 1e8), ("2.5GBIT", 2.5e9), ("56kbit", 56e3), ("1tbit", 1e12)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, "--x") == rate


@pytest.mark.parametrize("text", ["100", "0mbit", "fast", "-1mbit", "10 mbit", "10mbyte"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--x={text}: is no rate; write a number"):
        parse_rate(text, "--x")


@pytest.mark.parametrize(
    ("cadence", "delay", "most"), [(5, 5, 2), (5, 0, 1), (20, 5, 1), (5, 20, 5), (1, 3, 4), (20, 20, 2)]
)
def test_snapshots_at_once(cadence: int, delay: int, most: int) -> None:
    """With both 5: tick 5 is remembered before what tick 0 left is replayed."""
    assert snapshots(cadence, delay) == most


def test_memory_by_hand() -> None:
    """ZeRO 1 in float32: weights, three numbers an element, two snapshots, M; and what 1F1B has under way."""
    config = load_config(EXAMPLE)
    shape = read_shape(config)
    first, last = stage_memory(config, shape)
    size = stage_sizes(shape, pipeline=2, tensor=1)[0].parameters
    parts = first.parts
    assert parts["weights"] == parts["M"] == parts["gradients"] == parts["averaged gradients"] == 4 * size
    assert (parts["optimizer"], parts["snapshots"]) == (12 * size, 8 * size)
    columns = 64 + 28 - 1  # prompt and response up to so many, the last token is no input
    assert parts["KV cache"] == 2 * 2 * (2 * 24) * columns * 64 * 2 * 4  # L, k and v, 2 KV heads, 2 x 64 sequences
    layer = 4 * 96 * 4 + 4 * (2 * 96 + 4 * 96 + 5 * 352) + 4 * columns * 4
    assert parts["activations"] == 2 * last.parts["activations"] == 2 * 2 * 32 * columns * layer
    assert last.parts["logits"] == 32 * 128 * (2 * 4 * columns + 3 * 4 * 28)
    assert first.peak == sum(parts.values()) - parts["KV cache"]


def test_a_check_of_the_backward_budget_keeps_a_gradient(home: Path) -> None:
    """In float32 over two replicas' shards, of every stage whose gradient crossed a boundary."""
    config = load_config(home / "run.yaml", ["boundary.backward_budget=auto", "parallel.data=2"])
    first, last = stage_memory(config, read_shape(config))
    size = stage_sizes(read_shape(config), pipeline=2, tensor=1)[0].parameters
    assert first.parts["compared gradients"] == 4 * size / 2 and "compared gradients" not in last.parts
    assert first.peak == sum(first.parts.values()) - first.parts["KV cache"]


def test_kept_rows_by_hand() -> None:
    """Of the example 128 sequences of 91 rows of 96 numbers, in blocks of 2^22 bytes; anchors replay two rollouts more,
    where those crossed dense."""
    assert CACHE_BLOCK == BLOCK_BYTES
    once = ["boundary.send_once=reuse", "boundary.basis=self"]
    shape = read_shape(load_config(EXAMPLE))

    def kept(*more: str) -> tuple[float, float, float]:
        entry = stage_memory(load_config(EXAMPLE, [*once, *more]), shape)[0]
        parts, host, disk = (where.get("kept rows", 0.0) for where in (entry.parts, entry.host, entry.disk))
        return parts, host, disk

    bfloat16, float32 = 2**22 // 192 * 192, 2**22 // 384 * 384  # 21845 and 10922 rows; 11648 are needed
    assert kept("anchor.enabled=false") == (bfloat16, 0, 0)
    assert kept("boundary.cache_place=host") == (0, 3 * bfloat16, 0)
    assert kept("boundary.cache_place=disk", "boundary.cache_gib=0.001") == (0, 0, 3 * (2**30 // 1000))
    assert kept("rollout.path=codec") == (2 * float32, 0, 0)  # as they were decoded
    assert kept("rollout.path=auto") == (3 * 2 * float32, 0, 0)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], {}),
        (["boundary.links=[pipeline,tensor]", "parallel.tensor=2"], {(True, 0): 1.0}),
        (["rollout.path=codec", "boundary.dense_every=4"], {(False, 192): 0.25}),
        (["rollout.path=codec", "boundary.commit=tick"], {(True, 0): 2.0}),
    ],
    ids=["one policy", "tensor link", "dense ticks", "basis inside a step"],
)
def test_old_log_probs_where_rows_are_sent_once(overrides: list[str], passes: dict[tuple[bool, float], float]) -> None:
    """Of two ticks a step: coded or not, bytes of a row of 96 numbers, and how many."""
    config = load_config(EXAMPLE, ["boundary.send_once=reuse", *overrides])
    found = [part for part in training_passes(config, 96) if part.kind == "old log-probs"]
    assert {(part.coded, part.forward): part.count for part in found} == passes


def test_memory_goes_to_the_host_where_the_file_says_so(tmp_path: Path) -> None:
    """ZeRO 3 over 4 ranks: shards of weights; the optimizer's 12 bytes and two of float32 gradients are the host's."""
    file = tmp_path / "offload.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    overrides = [f"deepspeed.config={file}", "model.dtype=bfloat16", "parallel.data=4", "train.micro_batch=16"]
    config = load_config(EXAMPLE, [*overrides, "anchor.enabled=false", "boundary.basis=self"])
    shape = read_shape(config)
    entry = stage_memory(config, shape)[0]
    size = stage_sizes(shape, pipeline=2, tensor=1)[0].parameters
    assert entry.host == {"optimizer": 12 * size / 4, "averaged gradients": 2 * 4 * size / 4}
    assert (entry.parts["weights"], entry.parts["gathered weights"], entry.parts["buffers"]) == (
        size / 2,
        2 * size,
        2000,
    )


def test_prediction_on_a_slow_link_by_hand() -> None:
    """Two stages, nothing but the wire: 10 Mbit/s without latency; 2 micro-batches of 32, prompts of 64, 28 tokens."""
    config = load_config(EXAMPLE, ["boundary.codec=identity", "anchor.enabled=false", "boundary.basis=random"])
    step = predict(config, link_bit_s=1e7, device_flop_s=1e30, latency_s=0.0)
    row = 96 * 2 * 8 * FRAME / 1e7
    crossing = 32 * 91 * row
    assert step.fast == pytest.approx(2 * 3 * crossing)  # two ticks, of two micro-batches each
    assert step.old_logprobs == pytest.approx(2 * crossing)
    ids = 64 * 4 * 8 * FRAME / 1e7
    sampled = 64 * 65 * row + 64 * 64 * row + ids - 64 * row  # prompts of both micro-batches, one behind the other
    sampled += 27 * 2 * 64 * row  # then both by turns
    assert step.rollout == pytest.approx(sampled)
    assert step.compute == pytest.approx(0.0, abs=1e-12) and step.wire == step.total
    assert step.bytes["fast_fwd"] == step.bytes["fast_bwd"] == step.bytes["rollout"] == 128 * 91 * 192


def test_prediction_takes_measured_lengths_and_devices() -> None:
    config = load_config(EXAMPLE, ["parallel.pipeline=1", "boundary.codec=identity", "anchor.enabled=false"])
    given = {"link_bit_s": 1e9, "latency_s": 0.0, "prompt_tokens": 20.0, "response_tokens": 8.0}
    step = predict(config, device_flop_s=1e9, longest_response=10, **given)
    shape = read_shape(config)
    (size,) = stage_sizes(shape, pipeline=1, tensor=1)
    assert step.fast == pytest.approx(2 * 2 * 3 * size.flops(32 * 29, 29) / 1e9)
    overheads = {"overhead_s": 0.5, "decode_overhead_s": 0.25, "pass_overhead_s": 0.125}
    slower = predict(config, device_flop_s=1e9, longest_response=10, **overheads, **given)
    assert slower.fast - step.fast == pytest.approx(2 * 2 * 3 * 4 * 0.5 + 2 * 0.125)
    assert slower.old_logprobs - step.old_logprobs == pytest.approx(2 * 4 * 0.5)
    assert slower.rollout - step.rollout == pytest.approx(10 * 4 * 0.25)
    assert step.total == pytest.approx(step.compute)


def test_the_plan_as_json(home: Path) -> None:
    (home / "hosts").write_text("a slots=1\nb slots=1\n")
    arguments = ["plan", str(home / "run.yaml"), "--json", "--hostfile", str(home / "hosts"), "--link-rate", "10mbit"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert plan["errors"] == [] and plan["parameters"] == 4 * 101_568 + 2 * 40 * 96 + 96
    assert [rank["host"] for rank in plan["ranks"]] == ["a", "b"]
    assert plan["links"][0]["where"] == "a to b" and plan["links"][0]["line"]["bit_s"] == 1e7
    seconds = plan["seconds_per_step"]["config"]
    assert seconds["total"] == pytest.approx(
        sum(v for k, v in seconds.items() if k not in ("total", "compute", "coding", "wire"))
    )


def test_the_json_has_every_error(home: Path) -> None:
    result = CliRunner().invoke(
        app, ["plan", str(home / "run.yaml"), "--json", "boundary.rank=900", "--link-rate", "9"]
    )
    assert result.exit_code == 2
    errors = json.loads(result.stdout)["errors"]
    assert len(errors) == 2 and "boundary.rank=900 exceeds" in errors[0] and "--link-rate=9: is no rate" in errors[1]


def test_the_json_has_the_errors_of_a_config_that_does_not_load(home: Path) -> None:
    arguments = ["plan", str(home / "run.yaml"), "--json", "grpo.group_size=1", "boundary.rank=900"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    errors = json.loads(result.stdout)["errors"]
    assert len(errors) == 2 and "grpo.group_size=1" in errors[0] and "boundary.rank=900" in errors[1]


@pytest.mark.parametrize("names", [("a", "b", "c", "c"), ("c", "c", "a", "b")])
def test_replicas_share_the_link_of_the_host_that_sends_or_receives(names: tuple[str, ...]) -> None:
    """Two stages of two replicas, one stage of both on host c: its one link carries both either way."""
    assert Placement(pipeline=2, data=2, tensor=1, names=names).boundary_shared(0, 1) == 2


def test_sizes_alone_can_be_planned_and_not_trained() -> None:
    recipe = ROOT / "examples/cluster/recipes/7b.yaml"
    plan, train = (
        CliRunner().invoke(app, [command, str(recipe)], env={"COLUMNS": "200"}) for command in ("plan", "train")
    )
    assert plan.exit_code == 0 and "sizes alone" in plan.output
    assert (
        train.exit_code == 2 and "has no model.safetensors" in train.output and "has neither tokenizer" in train.output
    )
    assert not (ROOT / "examples/cluster/recipes/runs").exists()


def test_the_plan_shows_the_codecs_that_run(home: Path) -> None:
    """Sent once and sampled uncompressed, no forward codec is built."""
    once = ["boundary.send_once=reuse", "rollout.path=dense", "boundary.cache_place=host"]
    result = CliRunner().invoke(app, ["plan", str(home / "run.yaml"), *once], env={"COLUMNS": "160"})
    lines = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.count("│") == 3}
    assert "identity, bfloat16, 100.0% of a bfloat16 crossing, in sampling alone" in lines["forward"]
    assert "token_waterfill, 1.5%" in lines["backward"]
    assert "reuse, kept on host" in lines["send once"]
    assert "nothing is fitted" in lines["basis"]


def test_build_plan_is_the_same_run_with_and_without_codec() -> None:
    """The dense side of the plan is the identity codec in bfloat16, no anchor, whatever the config has."""
    config = load_config(EXAMPLE)
    plan = build_plan(config, [], Rates(1e7), Device(1e12))
    plain = load_config(EXAMPLE, ["boundary.codec=identity", "anchor.enabled=false", "boundary.basis=random"])
    assert plan.dense == build_plan(plain, [], Rates(1e7), Device(1e12)).time


def test_compressed_tensor_and_data_links_by_hand() -> None:
    """A tensor sum of r bfloat16 numbers for H; of a 400 x 100 gradient two factors of rank 8, of 20 x 20 nothing."""
    links = ["boundary.links=[pipeline,tensor,data]", "boundary.tensor_rank=6", "boundary.data_rank=8"]
    config = load_config(EXAMPLE, ["parallel.tensor=2", "parallel.data=2", "anchor.enabled=false", *links])
    assert [tensor_row(config, 96, side, coded=True) for side in DIRECTIONS] == [12, 12]
    assert tensor_row(config, 96, "forward", coded=False) == 192
    assert tensor_row(load_config(EXAMPLE), 96, "forward", coded=True) == 384  # the model's own float32
    size = stage_sizes(read_shape(config), pipeline=2, tensor=2)[0]
    size = replace(size, matrices=((400, 100), (20, 20)), parameters=40_500)
    assert size.factored(8) == 40_500 - 40_000 + 8 * 500
    fast, old = training_passes(config, 96)
    engine = read_engine(config)
    assert (fast.kind, old.kind) == ("fast", "old log-probs")
    assert gradient_payload(config, size, engine, fast) == 4 * 4500
    assert gradient_payload(load_config(EXAMPLE), size, engine, fast) == 4 * 40_500


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_with_stages_are_a_way_that_is_tested(home: Path, stage: int) -> None:
    """Case D8: DeepSpeed's own pipeline refuses them; ``tests/ranks/test_zero.py`` runs them, and the plan says how."""
    file = ROOT / f"deepspeed_configs/zero{stage}.json"
    arguments = ["plan", str(home / "run.yaml"), f"deepspeed.config={file}", "parallel.data=2"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert f"stage {stage} over 2 data-parallel ranks of each stage, whose gradients are reduced after" in result.output


def point(rate: float, dense: float, coded: float = 100.0) -> Point:
    return Point(2, 1024, rate, dense, coded, 1000.0, 50.0)


def test_crossovers_by_hand() -> None:
    """Where dense takes 1 / 0.9 times as long: half way, on logarithms, between gains of it squared and of nothing."""
    square = 100 / 0.9**2
    assert crossover([point(1e6, 500), point(1e7, square), point(1e9, 100)]) == pytest.approx(1e8)
    assert crossover([point(1e6, 500), point(1e7, 400)]) is None
    assert crossover([point(1e6, 500), point(1e7, 200), point(1e9, 50)], worth=1.0) == pytest.approx(1e8)


def test_contradictions_are_named() -> None:
    points = [point(1e6, 500.0), point(1e7, 400.0)]
    rising = {(p, h): 1e9 * p / h for p in PIPELINES for h in HIDDEN}
    assert contradictions({(2, 1024): points}, rising) == []
    slower, dearer = [points[1], points[0]], [replace(points[0], coded_bytes=1001.0)]
    assert "takes longer" in contradictions({(2, 1024): slower}, rising)[0]
    coding = [replace(points[0], coded_s=505.0, coding_s=6.0), points[1]]
    assert contradictions({(2, 1024): coding}, rising) == []
    assert "takes longer" in contradictions({(2, 1024): [replace(coding[0], coding_s=4.0)]}, rising)[0]
    assert "sends more" in contradictions({(2, 1024): dearer}, rising)[0]
    assert len(contradictions({}, rising | {(4, 4096): None})) == 2  # of four stages, and of hidden 4096


def test_a_fit_never_takes_less_than_no_time() -> None:
    """y = 2a + 3b exactly; then b alone, where the best a would be negative: b = (1 x 1 + 2 x 2) / (1 + 4)."""
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 0.0]])
    assert least_squares(table, np.array([5.0, 8.0, 2.0])) == pytest.approx([2, 3])
    assert least_squares(np.array([[1.0, 1.0], [1.0, 2.0], [9.0, 0.0]]), np.array([1.0, 2.0, -1.0])) == pytest.approx(
        [0, 1]
    )


def test_hosts_are_chosen_as_train_chooses_them_and_a_reward_stage_has_one(home: Path) -> None:
    (home / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\nd slots=1\n")
    arguments = ["plan", str(home / "run.yaml"), "--json", "parallel.reward_stage=true", "--hostfile"]
    too_many = CliRunner().invoke(app, [*arguments, str(home / "hosts")])
    assert too_many.exit_code == 2 and "has 4 slots" in json.loads(too_many.stdout)["errors"][0]
    chosen = CliRunner().invoke(app, [*arguments, str(home / "hosts"), "--exclude", "b"])
    ranks = json.loads(chosen.stdout)["ranks"]
    assert [(rank["rank"], rank["stage"], rank["host"]) for rank in ranks] == [(0, 0, "a"), (1, 1, "c"), (2, 2, "d")]
    assert [rank["layers"] for rank in ranks] == [[0, 1], [2, 3], None]


def test_overheads_that_were_measured_elsewhere_are_in_the_time(home: Path) -> None:
    arguments = ["plan", str(home / "run.yaml"), "--json"]
    plain, loaded = (
        json.loads(CliRunner().invoke(app, [*arguments, *more]).stdout)["seconds_per_step"]["config"]
        for more in ([], ["--pass-overhead", "500", "grpo.minibatches=1"])
    )
    alone = json.loads(CliRunner().invoke(app, [*arguments, "grpo.minibatches=1"]).stdout)["seconds_per_step"]["config"]
    assert loaded["fast"] == pytest.approx(alone["fast"] + 0.5) and plain["fast"] > 0


CODED = [
    *CODINGS,
    {"forward_payload": "int4", "backward_payload": "int3", "codec": "lowrank", "rank": 6, "predict": "embedding"},
    {"codec": "lowrank", "payload": "waterfill", "budget": 0.06, "predict": "embedding+previous"},
]


@pytest.mark.parametrize("hidden", [96, 1028])
@pytest.mark.parametrize("coding", CODED, ids=str)
def test_coding_takes_the_products_that_the_codecs_make(coding: dict[str, Any], hidden: int) -> None:
    """Against torch's own count of them, at both ends of a boundary in both directions, of rows that are all alike."""
    cfg = BoundaryConfig(**coding)
    embedding = torch.randn(7, hidden)
    codecs = build_codecs(cfg, hidden=hidden, index=0, seed=0, embedding_VH=embedding)
    tokens = torch.arange(6).repeat(4, 1)
    rows = carrying_rows(torch.ones_like(tokens, dtype=torch.bool), tokens)
    x = torch.nn.functional.normalize(torch.randn(len(rows), hidden))
    for side in DIRECTIONS:
        crossing, plan = Crossing(codecs), Pass("fast")
        with FlopCounterMode(display=False) as encoding:
            payload = crossing.encode(side, x, rows, plan).payload
        with FlopCounterMode(display=False) as decoding:
            crossing.decode(side, payload, rows, plan, torch.float32)
        work = coding_work(cfg, side, hidden)
        counted = (encoding.get_total_flops() / len(rows), decoding.get_total_flops() / len(rows))
        # A row of whole bytes and scalars: of a tight budget some rows of token_waterfill stay at home.
        spare = 0.35 if cfg.codec_of(side) == "token_waterfill" else 0.02
        for planned, real in zip((work.encode.total, work.decode.total), counted, strict=True):
            assert (1 - spare) * planned <= real <= 1.001 * planned


def test_coding_column_by_column_reads_its_matrices_every_time() -> None:
    """100 operations a row on 50 numbers of 4 bytes: at 1 kB/s a column takes 0.2 s, at 1 kFLOP/s 3 rows 0.3 s."""
    assert Work(by_column=100.0).seconds(3, 10, 1e3, 1e3) == pytest.approx(10 * 0.2)
    assert Work(by_column=100.0).seconds(30, 10, 1e3, 1e3) == pytest.approx(3.0)
    assert Work(at_once=100.0).seconds(3, 10, 1e3, 1e3) == pytest.approx(0.3)
    assert Work(50.0, 50.0).seconds(3, 10, 1e3) == pytest.approx(0.3)


def test_coding_is_part_of_a_step_by_hand() -> None:
    """k5 on perfect links, 1 GFLOP/s: rank 5 of 96 is 960 operations a row and product. In a pass of two micro-batches
    the first stage encodes (two products) and the second decodes (one), backward the other way round."""
    config = load_config(EXAMPLE, ["anchor.enabled=false", "boundary.basis=self", "grpo.minibatches=1"])
    config = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": 128})})
    given = {"link_bit_s": 1e30, "latency_s": 0.0, "device_flop_s": 1e9}
    step = predict(config, **given)
    product = 960 * 128 * 91 / 1e9
    assert step.coding == pytest.approx(6 * product)  # one micro-batch: forward two and one, backward two and one
    plain = predict(config.model_copy(update={"boundary": BoundaryConfig(codec="identity", basis="random")}), **given)
    assert step.compute - plain.compute == pytest.approx(6 * product) and plain.coding == 0
    halves = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    assert predict(halves, **given).coding == pytest.approx(15 * 6 * product)
    coded = config.model_copy(update={"rollout": config.rollout.model_copy(update={"path": "codec"})})
    assert predict(coded, **given).coding > step.coding


def test_sums_over_tensor_ranks_are_coded_too() -> None:
    """Each takes two products of 24 x 96, there and back; a row-parallel one a projector more in its backward."""
    links = ["boundary.links=[tensor]", "boundary.codec=null", "boundary.payload=null", "boundary.rank=null"]
    changes = ["parallel.tensor=2", "parallel.pipeline=1", "anchor.enabled=false", "boundary.basis=self"]
    config = load_config(EXAMPLE, [*links, *changes, "rollout.path=dense", "grpo.minibatches=1"])
    step = predict(config, link_bit_s=1e30, latency_s=0.0, device_flop_s=1e9)
    assert step.coding == pytest.approx(4 * 2 * 3 * (4 * 96 * 24) * 128 * 91 / 1e9)


def test_reward_models_take_memory_where_they_score() -> None:
    """264,768 numbers in the judge's file; Megatron pads its 64 rows of embedding to 128, of 96 numbers each."""
    parts = {}
    for behind in ("true", "false"):
        config = load_config(ROOT / "examples/reward_stage/run.yaml", [f"parallel.reward_stage={behind}"])
        parts[behind] = [entry.parts.get("reward models") for entry in stage_memory(config, read_shape(config))]
    weights = 4 * (264_768 + 64 * 96)
    assert parts == {"true": [None, None, weights], "false": [None, weights]}
    plain = load_config(EXAMPLE, ["parallel.reward_stage=true"])
    assert stage_memory(plain, read_shape(plain))[-1].parts == {}


@pytest.mark.parametrize("broken", ["grpo.group_size=1", "boundary.rank=900"], ids=["does not load", "is refused"])
def test_a_plan_says_everything_that_is_wrong_at_once(home: Path, broken: str) -> None:
    (home / "hosts").write_text("a slots=1\na slots=1\n")
    arguments = [str(home / "run.yaml"), broken, "--hostfile", str(home / "hosts")]
    result = CliRunner().invoke(app, ["plan", "--json", *arguments, "--link-rate", "1", "--local-rate", "2"])
    assert result.exit_code == 2
    errors = json.loads(result.stdout)["errors"]
    assert len(errors) == 4 and broken in errors[0] and "line 2: a is there twice" in errors[1]
    assert "--link-rate=1" in errors[2] and "--local-rate=2" in errors[3]


def test_hosts_that_do_not_suffice_are_said_beside_config_errors(home: Path) -> None:
    (home / "hosts").write_text("a slots=1\n")
    arguments = ["plan", "--json", str(home / "run.yaml"), "boundary.rank=900", "--hostfile", str(home / "hosts")]
    errors = json.loads(CliRunner().invoke(app, arguments).stdout)["errors"]
    assert len(errors) == 2 and "boundary.rank=900 exceeds" in errors[0] and "has 1 slots" in errors[1]
