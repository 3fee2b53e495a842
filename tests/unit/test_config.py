"""Configuration: YAML and overrides, every error in words, combinations, and what the engine is given."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config import (
    BoundaryConfig,
    Config,
    ConfigError,
    Direction,
    check_config,
    deepspeed_settings,
    layer_split,
    load_config,
    reward_name,
    write_resolved,
)
from megatron_grpo.config.loading import parse_yaml
from megatron_grpo.ops.transform import waterfill_spec

ROOT = Path(__file__).parents[2]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 40,
    "max_position_embeddings": 128,
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with run.yaml beside a model directory (only the files that the checks read)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    write_model(tmp_path)
    write_tokenizer(tmp_path, 40)
    (tmp_path / "run.yaml").write_text("model: {path: model}\n")
    return tmp_path


def write_model(home: Path, **changes: Any) -> None:
    (home / "model/config.json").write_text(json.dumps(HF_CONFIG | changes))


def write_tokenizer(home: Path, size: int) -> None:
    vocab = {f"t{index}": index for index in range(size)}
    (home / "model/tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


def write_deepspeed(home: Path, **settings: Any) -> str:
    (home / "ds.json").write_text(json.dumps(settings))
    return "deepspeed.config=ds.json"


def load(home: Path, *overrides: str) -> Config:
    return load_config(home / "run.yaml", list(overrides))


def refused(home: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(home, *overrides)
    return str(caught.value)


def checked(home: Path, *overrides: str) -> str:
    return "\n".join(check_config(load(home, *overrides)))


def test_defaults_check_clean(home: Path) -> None:
    assert checked(home) == ""


def test_defaults_are_those_of_the_design(home: Path) -> None:
    """Packed and predicted forward, by tokens backward, bases of the senders' own, and no anchor."""
    config = load(home)
    boundary, anchor, rollout = config.boundary, config.anchor, config.rollout
    assert [boundary.codec_of(way) for way in DIRECTIONS] == ["lowrank", "token_waterfill"]
    assert [boundary.budget_of(way) for way in DIRECTIONS] == [0.06, 0.015]
    assert (boundary.payload_of("forward"), boundary.prediction) == ("waterfill", "embedding+previous")
    assert (boundary.basis, boundary.refresh_steps, boundary.calibration) == ("self", 16, 32)
    assert [boundary.rank_of(hidden) for hidden in (96, 3)] == [5, 3]
    assert (anchor.enabled, anchor.cadence, anchor.delay, anchor.beta) == (False, 5, 5, 0.5)
    assert (config.merger.kind, config.merger.alpha) == ("signed_ema", 0.82)
    assert (rollout.path, rollout.gap_limit) == ("auto", 0.1)
    assert (config.optim.lr, config.optim.clip, config.grpo.eps) == (5e-5, 1.0, 1e-6)


def test_derived_numbers_by_hand(home: Path) -> None:
    config = load(home, "parallel.data=2", "parallel.tensor=2", "train.micro_batch=8", "train.steps=7")
    assert config.world_size == 2 * 2 * 2
    assert config.sequences_per_step == 16 * 8
    assert config.rows_per_minibatch == 128 // 2 // 2
    assert config.micro_batches == 4
    assert config.ticks == 14
    assert config.in_flight == 2
    assert config.zero_stage == 1


def test_one_process_is_a_world_of_one_rank_with_every_stage(home: Path) -> None:
    config = load(home, "parallel.placement=one_process", "parallel.pipeline=4")
    assert (config.world_size, config.pipeline_ranks, config.in_flight) == (1, 1, 1)
    assert config.parallel.pipeline == 4 and check_config(config) == []
    ranks = load(home, "parallel.pipeline=4")
    assert (ranks.world_size, ranks.pipeline_ranks, ranks.in_flight) == (4, 4, 4)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "parallel.tensor=2",
            "parallel.tensor=2: one process holds one replica whole; use 1, or parallel.placement=ranks",
        ),
        ("parallel.data=2", "parallel.data=2: one process holds one replica whole; use 1, or parallel.placement=ranks"),
        (
            "model.recompute=true",
            "model.recompute=true: would cross the boundaries twice inside one process; "
            "use false, or parallel.placement=ranks",
        ),
        ("parallel.pipeline=5", "parallel.pipeline=5 exceeds the model's 4 layers; use at most 4"),
    ],
)
def test_what_one_process_cannot_do_is_named(home: Path, override: str, line: str) -> None:
    assert checked(home, "parallel.placement=one_process", override).splitlines() == [line]


@pytest.mark.parametrize(
    ("layers", "stages", "split"), [(7, 2, [4, 3]), (30, 4, [8, 8, 7, 7]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])]
)
def test_layers_are_split_never_dropped(layers: int, stages: int, split: list[int]) -> None:
    assert layer_split(layers, stages) == split


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1E3", 1000.0), ("-2.5e+1", -25.0), (".5e1", 5.0), ("1.0e-3", 1e-3)]
)
def test_exponents_are_numbers_in_files_and_overrides(home: Path, text: str, value: float) -> None:
    (home / "run.yaml").write_text(f"model: {{path: model}}\ngrpo: {{log_ratio_clamp: {text.lstrip('-')}}}\n")
    assert load(home).grpo.log_ratio_clamp == abs(value)
    if value > 0:
        assert load(home, f"grpo.eps={text}").grpo.eps == value


def test_text_that_looks_almost_like_a_number_stays_text(home: Path) -> None:
    assert load(home, "data.question_key=1e", "data.answer_key=e5").data.question_key == "1e"


def test_shorthands_are_resolved_by_direction() -> None:
    boundary = BoundaryConfig(codec="lowrank", backward_codec="mask", forward_payload="float32")
    assert (boundary.codec_of("forward"), boundary.codec_of("backward")) == ("lowrank", "mask")
    assert (boundary.payload_of("forward"), boundary.payload_of("backward")) == ("float32", "bfloat16")
    assert BoundaryConfig(budget=0.1, backward_budget=0.3).budget_of("forward") == 0.1
    assert BoundaryConfig(budget=0.1, backward_budget=0.3).budget_of("backward") == 0.3


@pytest.mark.parametrize(
    ("settings", "payload", "prediction"),
    [
        ({"forward_codec": "lowrank"}, "bfloat16", "none"),  # a codec that is named sends plain numbers
        ({"codec": "lowrank", "payload": "waterfill"}, "waterfill", "embedding+previous"),
        ({"payload": "int8"}, "int8", "none"),
        ({"forward_payload": "int4", "predict": "embedding"}, "int4", "embedding"),
        ({"predict": "none"}, "waterfill", "none"),
        ({"codec": "identity"}, "bfloat16", "none"),
    ],
)
def test_what_is_left_out_follows_from_what_is_named(settings: dict[str, Any], payload: str, prediction: str) -> None:
    boundary = BoundaryConfig(**settings)
    assert (boundary.payload_of("forward"), boundary.prediction) == (payload, prediction)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("anchor.cadence=5.5", ["anchor.cadence=5.5", "whole number", "default 5"]),
        ("anchor.cadence=five", ["anchor.cadence=five", "whole number"]),
        ("anchor.cadence='5'", ["anchor.cadence=5", "whole number"]),
        ("anchor.cadence=0", ["anchor.cadence=0", "at least 1", "use 1 or more"]),
        ("anchor.delay=-1", ["anchor.delay=-1", "at least 0"]),
        ("anchor.beta=1.0", ["anchor.beta=1.0", "below 1"]),
        ("anchor.enabled=1", ["anchor.enabled=1", "true or false"]),
        ("merger.alpha=1.5", ["merger.alpha=1.5", "at most 1"]),
        ("grpo.group_size=1", ["grpo.group_size=1", "at least 2"]),
        ("grpo.dual_clip=1.0", ["grpo.dual_clip=1.0", "above 1"]),
        ("grpo.kl_estimator=k3+", ["grpo.kl_estimator=k3+", "use 'k1', 'k2' or 'k3'"]),
        ("rollout.temperature=0", ["rollout.temperature=0", "above 0"]),
        ("rollout.temperature=-0.1", ["rollout.temperature=-0.1", "above 0"]),
        ("rollout.top_p=0", ["rollout.top_p=0", "above 0"]),
        ("rollout.top_p=1.1", ["rollout.top_p=1.1", "at most 1"]),
        ("boundary.rank=0", ["boundary.rank=0", "at least 1"]),
        ("optim.lr=.nan", ["optim.lr=NaN", "finite"]),
        ("merger.kind=ema", ["merger.kind=ema", "signed_ema"]),
        ("boundary.links=[ring]", ["boundary.links", "'pipeline', 'tensor' or 'data'"]),
        ("boundary.links=[]", ["boundary.links", "empty"]),
        ("boundary.backward_budget=0", ["boundary.backward_budget=0", "above 0 and at most 1", "default null"]),
        ("boundary.backward_budget=1.5", ["boundary.backward_budget=1.5", "neither auto nor a share"]),
        ("boundary.backward_budget=automatic", ["boundary.backward_budget=automatic", "neither auto nor a share"]),
        ("boundary.backward_budget=true", ["boundary.backward_budget=true", "neither auto nor a share"]),
        ("data.prompt_template=hello", ["data.prompt_template=hello", "{question}"]),
        ("anchor.cadense=20", ["anchor.cadense=20", "unknown key", "anchor.cadence"]),
        ("anchor.rank=20", ["anchor.rank=20", "unknown key", "boundary.rank"]),
        ("ancor.cadence=20", ["ancor", "unknown section", "anchor"]),
        ("cadence=20", ["cadence=20", "section.key=value"]),
        ("anchor.cadence", ["anchor.cadence", "section.key=value"]),
        ("anchor.cadence=[1", ["anchor.cadence=[1", "not valid YAML"]),
        ("data.path=nowhere.jsonl", ["data.path=nowhere.jsonl", "not found in"]),
        ("deepspeed.config=zero9.json", ["deepspeed.config=zero9.json", "not found in"]),
        ("model.path=7", ["model.path=7", "must be text"]),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_remedy(home: Path, override: str, parts: list[str]) -> None:
    message = refused(home, override)
    assert len(message.splitlines()) == 1
    assert [part for part in parts if part not in message] == []


def test_all_errors_come_at_once(home: Path) -> None:
    lines = refused(home, "anchor.cadence=0", "grpo.group_size=1", "boundary.rnk=3", "data.path=no").splitlines()
    assert sorted(line.partition("=")[0] for line in lines) == [
        "anchor.cadence",
        "boundary.rnk",
        "data.path",
        "grpo.group_size",
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "holds no sections"),
        ("- a\n- b\n", "holds no sections"),
        ("model: [unclosed\n", "not valid YAML"),
        ("anchor: {cadence: 5}\n", "model: is missing"),
        ("model: {dtype: float32}\n", "model.path: is missing"),
        ("model: {path: model}\nanchor: 5\n", "anchor=5: must be a section"),
        ("model: {path: model}\nanchor: {cadence: 5, cadence: 6}\n", "cadence: is given twice"),
        ("model: {path: model}\nmodel: {path: other}\n", "model: is given twice"),
    ],
)
def test_a_malformed_file_is_refused_in_words(home: Path, text: str, part: str) -> None:
    (home / "run.yaml").write_text(text)
    assert part in refused(home)


def test_a_mapping_may_build_on_another() -> None:
    text = "few: &few {size: 4, ticks: 1}\nmany: {<<: *few, ticks: 8}\n"
    assert parse_yaml(text, "file")["many"] == {"size": 4, "ticks": 8}
    with pytest.raises(ConfigError, match="ticks: is given twice"):
        parse_yaml("few: &few {size: 4}\nmany: {<<: *few, ticks: 8, ticks: 9}\n", "file")


def test_a_missing_file_is_refused_in_words(home: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(home / "other.yaml")


def test_an_empty_section_means_its_defaults(home: Path) -> None:
    (home / "run.yaml").write_text("model: {path: model}\nanchor:\n")
    assert load(home).anchor.cadence == 5


def test_paths_are_found_beside_above_and_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / "a/b"
    deep.mkdir(parents=True)
    (deep / "run.yaml").write_text("model: {path: model}\n")
    assert load_config(deep / "run.yaml").model.path == str(home / "model")
    (deep / "model").mkdir()
    assert load_config(deep / "run.yaml").model.path == str(deep / "model")
    (home / "here/mine").mkdir(parents=True)
    monkeypatch.chdir(home / "here")
    assert load_config(deep / "run.yaml", ["model.path=mine"]).model.path == str(home / "here/mine")


def test_the_tokenizer_is_the_models_unless_given(home: Path) -> None:
    assert load(home).tokenizer.path == str(home / "model")
    (home / "words").mkdir()
    assert load(home, "tokenizer.path=words").tokenizer.path == str(home / "words")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["boundary.codec=lowrank"],
        ["boundary.codec=identity"],
        ["boundary.payload=int4", "boundary.budget=0.1"],
        ["boundary.backward_budget=auto"],
    ],
)
def test_the_resolved_file_reads_back_as_the_same_config(home: Path, overrides: list[str]) -> None:
    """With what is left out written down, so that it means the same when defaults have changed."""
    config = load(home, "grpo.eps=1e-9", "grpo.dual_clip=null", "boundary.links=[pipeline]", *overrides)
    write_resolved(config, home / "resolved.yaml")
    again = load_config(home / "resolved.yaml")
    assert again.model_copy(update={"boundary": config.boundary}) == config
    assert again.boundary == config.boundary.resolved() == config.boundary.resolved().resolved()
    assert again.dump() == config.dump()
    written = config.dump()["boundary"]
    assert all(written[f"{way}_{key}"] is not None for way in DIRECTIONS for key in ("codec", "payload", "budget"))
    assert written["predict"] == config.boundary.prediction and written["error_feedback"] is config.boundary.feeds_back
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []
    assert yaml.safe_load((home / "resolved.yaml").read_text()) == config.dump()


def test_importance_weights_need_room_between_their_bounds(home: Path) -> None:
    line = "grpo.is_floor=2.5: is above grpo.is_cap=2.0; use at most 2.0"
    assert checked(home, "grpo.is_cap=2.0", "grpo.is_floor=2.5") == line
    assert checked(home, "grpo.is_cap=2.0", "grpo.is_floor=2.0") == ""


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("boundary.rank=900", "boundary.rank=900 exceeds hidden size 96; use at most 96"),
        ("parallel.pipeline=5", "parallel.pipeline=5 exceeds the model's 4 layers; use at most 4"),
        (
            "grpo.prompts_per_step=15",
            "grpo.prompts_per_step=15: whole groups cannot be dealt to 2 shares "
            "(parallel.data=1 x grpo.minibatches=2); use 8 or 16",
        ),
        (
            "train.micro_batch=24",
            "train.micro_batch=24: does not divide the 64 sequences of one minibatch on one rank; use 16 or 32",
        ),
        (
            "train.micro_batch=100",
            "train.micro_batch=100: does not divide the 64 sequences of one minibatch on one rank; use 64",
        ),
        ("grpo.prompts_per_step=1", "use 8"),
        ("rollout.in_flight=1", "rollout.in_flight=1 leaves stages idle; use at least 2"),
        ("rollout.max_response=100", "makes 164 tokens and the model has 128 positions"),
        ("boundary.budget=0.011", "boundary.forward_budget=0.011: rows of hidden size 96 take a share from 0.0111 to"),
        ("boundary.budget=0.52", "hidden size 96 take a share from 0.0111 to 0.5104 with payload waterfill; use one"),
        ("boundary.basis=anchor", "boundary.basis=anchor: is never refreshed with anchor.enabled=false"),
        ("boundary.commit=tick", "boundary.commit=tick: basis=self changes between steps alone"),
        ("boundary.backward_budget=0.0005", "boundary.backward_budget=0.0005: a row of token_waterfill takes a bit"),
        ("boundary.forward_codec=token_waterfill", "boundary.forward_codec=token_waterfill: shares bits out over a"),
        ("data.task=jsonl", "data.path=null: data.task=jsonl reads a file; set data.path"),
    ],
)
def test_a_combination_that_cannot_work_is_named(home: Path, override: str, line: str) -> None:
    """Case B13: the geometry of a batch, with the nearest values that fit, before anything starts."""
    assert line in checked(home, override)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["boundary.codec=mask", "boundary.backward_payload=int4"],
            "boundary.backward_payload=int4: mask sends numbers",
        ),
        (
            ["boundary.backward_codec=lowrank", "boundary.rounding=stochastic"],
            "boundary.rounding=stochastic: lowrank in bfloat16 is not rounded at random",
        ),
        (
            ["boundary.codec=lowrank", "boundary.payload=waterfill", "boundary.rounding=stochastic"],
            "boundary.rounding=stochastic: lowrank in waterfill is not rounded at random",
        ),
        (
            ["boundary.codec=identity", "boundary.forward_codec=lowrank", "boundary.backward_codec=identity"],
            "boundary.codec=identity: has no effect beside forward_codec=lowrank and backward_codec=identity",
        ),
        (
            ["boundary.codec=lowrank", "boundary.predict=embedding"],
            "boundary.predict=embedding: needs a packed forward payload",
        ),
        (
            ["boundary.backward_budget=auto", "boundary.backward_codec=lowrank"],
            "boundary.backward_budget=auto: is chosen for token_waterfill, and lowrank is another codec",
        ),
        (
            ["anchor.enabled=true", "boundary.anchor_budget=0.03", "merger.kind=delayed_ef"],
            "boundary.anchor_budget=0.03: keeps the signs of M, and merger.kind=delayed_ef does not use signs alone",
        ),
        (
            ["anchor.enabled=true", "boundary.anchor_budget=0.03", "boundary.basis=anchor"],
            "boundary.anchor_budget=0.03: boundary.basis=anchor is fitted to what anchors send uncompressed",
        ),
        (
            ["anchor.enabled=true", "boundary.anchor_budget=0.003"],
            "boundary.anchor_budget=0.003: a row of token_waterfill takes a bit",
        ),
        (["boundary.shared_basis=true"], "boundary.shared_basis=true: needs the lowrank codec in both directions"),
        (
            ["boundary.shared_basis=true", "boundary.codec=lowrank", "boundary.payload=int8"],
            "boundary.shared_basis=true: packed payloads fit",
        ),
        (["rollout.gather=layer"], "rollout.gather=layer: does nothing below ZeRO 3, and deepspeed.config="),
        (
            ["anchor.enabled=true", "merger.packed_signs=true"],
            "merger.packed_signs=true: with anchor.beta=0.5 M is a running mean",
        ),
        (
            ["anchor.enabled=true", "merger.packed_signs=true", "anchor.beta=0.0", "merger.kind=delayed_ef"],
            "merger.kind=delayed_ef does not use",
        ),
        (
            ["anchor.enabled=true", "merger.packed_signs=true", "anchor.beta=0.0", "merger.gate=cosine"],
            "signs alone have no cosine",
        ),
    ],
)
def test_two_settings_that_contradict_each_other_are_one_line(home: Path, overrides: list[str], line: str) -> None:
    (found,) = checked(home, *overrides).splitlines()
    assert line in found and "; " in found


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["boundary.links=[tensor]"],
            "boundary.links=[tensor]: parallel.tensor=1 makes no tensor link; leave tensor out",
        ),
        (["boundary.links=[pipeline, data]"], "boundary.links=[pipeline, data]: parallel.data=1 makes no data link"),
        (
            ["boundary.links=[pipeline, data]", "parallel.placement=one_process"],
            "boundary.links=[pipeline, data]: one process has no data link",
        ),
        (
            ["boundary.links=[tensor]", "parallel.tensor=2", "boundary.codec=mask"],
            "boundary.codec=mask: is the pipeline's, which boundary.links=[tensor] lacks",
        ),
        (
            ["boundary.links=[pipeline, tensor]", "parallel.tensor=2", "boundary.tensor_rank=97"],
            "boundary.tensor_rank=97 exceeds hidden size 96; use at most 96",
        ),
        (["boundary.tensor_rank=8"], "boundary.tensor_rank=8: does nothing without tensor in boundary.links"),
        (["boundary.data_warmup=0"], "boundary.data_warmup=0: does nothing without data in boundary.links"),
    ],
)
def test_links_that_are_not_there_are_named(home: Path, overrides: list[str], line: str) -> None:
    (found,) = checked(home, *overrides).splitlines()
    assert line in found and "; " in found


def test_gradients_are_compressed_where_they_are_whole_and_shrink(home: Path) -> None:
    """H3 and H4: the warm-up leaves ticks over; the largest rank is one that halves the widest matrix."""
    write_model(home, vocab_size=96, intermediate_size=256)
    two = ["boundary.links=[data]", "parallel.data=2"]
    assert checked(home, *two) == ""
    assert "boundary.data_warmup=140: the run has 140 ticks" in checked(home, *two, "boundary.data_warmup=140")
    assert checked(home, *two, "boundary.data_warmup=139") == ""
    # 512 x 96: (512 + 96) * 40 * 2 = 48640 < 49152 = 512 * 96 <= (512 + 96) * 41 * 2.
    assert checked(home, *two, "boundary.data_rank=40") == ""
    assert "boundary.data_rank=41: halves the bytes of no weight" in checked(home, *two, "boundary.data_rank=41")
    for stage in (2, 3):
        given = [*two, f"deepspeed.config={ROOT}/deepspeed_configs/zero{stage}.json"]
        assert f"boundary.links=[data]: ZeRO {stage} cuts gradients up" in checked(home, *given)


def test_without_the_pipelines_link_its_boundaries_cross_dense(home: Path) -> None:
    boundary = load(home, "boundary.links=[tensor]", "parallel.tensor=2").boundary
    assert [boundary.codec_of(way) for way in ("forward", "backward")] == ["identity"] * 2
    assert [boundary.payload_of(way) for way in ("forward", "backward")] == ["bfloat16"] * 2
    assert (boundary.prediction, boundary.feeds_back) == ("none", False)
    assert (boundary.tensor_rank_of(96), boundary.tensor_rank_of(3)) == (24, 1)


def test_a_budget_that_is_offered_can_be_built(home: Path) -> None:
    """17 of 1536 bits is one bit of codes; 784 are 8 bits in each of 96 channels."""
    for budget in (0.0111, 0.5104):
        boundary = load(home, f"boundary.budget={budget}").boundary
        assert checked(home, f"boundary.budget={budget}") == ""
        spec = waterfill_spec(96, 0, share=boundary.budget_of("forward"))
        assert (spec.row_bits, spec.kept) == {0.0111: (17, 1), 0.5104: (783, 96)}[budget]


def test_off_needs_no_quotes(home: Path) -> None:
    """YAML reads a bare ``off`` as false."""
    assert load(home, "anchor.alarm=off").anchor.alarm == "off"
    assert "anchor.alarm=true" in refused(home, "anchor.alarm=true")


def test_every_control_arm_is_one_config_away(home: Path) -> None:
    no_anchor = ["anchor.enabled=false", "merger.kind=none"]
    assert checked(home, "boundary.codec=identity", *no_anchor) == ""
    assert checked(home, "boundary.basis=random", *no_anchor) == ""
    assert checked(home, "boundary.codec=mask", *no_anchor) == ""
    assert checked(home, "boundary.basis=self", "rollout.path=auto", *no_anchor) == ""
    assert checked(home, "boundary.basis=anchor", "boundary.dense_every=5", *no_anchor) == ""
    assert checked(home, "boundary.basis=random", "anchor.enabled=false", "merger.kind=signed_ema") == ""
    anchor = ["anchor.enabled=true", "boundary.codec=lowrank", "boundary.basis=anchor"]
    assert checked(home, "merger.alpha=1.0", *anchor) == ""
    assert checked(home, "merger.kind=delayed_ef", "anchor.beta=0.0", *anchor) == ""


def test_tensor_width_must_divide_heads_and_groups(home: Path) -> None:
    """D7, Qwen2.5-0.5B."""
    write_model(home, num_attention_heads=14, num_key_value_heads=2, hidden_size=896)
    assert "14 attention heads, 2 key/value groups" in checked(home, "parallel.tensor=4")
    assert checked(home, "parallel.tensor=4").endswith("use 1 or 2")
    assert checked(home, "parallel.tensor=2") == ""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no model.safetensors"),
        ("tokenizer.json", "has neither tokenizer.json nor tokenizer.model"),
    ],
)
def test_a_missing_model_file_is_named(home: Path, name: str, part: str) -> None:
    """E8: nothing starts from random weights."""
    (home / "model" / name).unlink()
    assert part in checked(home)


def test_a_missing_shard_is_named(home: Path) -> None:
    (home / "model/model.safetensors").unlink()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (home / "model/model.safetensors.index.json").write_text(json.dumps(index))
    (home / "model/one.safetensors").touch()
    assert "lacks two.safetensors" in checked(home)


def test_an_unsupported_architecture_is_named(home: Path) -> None:
    write_model(home, architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM is not supported" in checked(home)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(home: Path) -> None:
    write_tokenizer(home, 41)
    assert "has 41 tokens but the model's vocabulary 40" in checked(home)


def test_added_tokens_count_by_their_ids_and_unigram_pieces_by_their_place(home: Path) -> None:
    tokenizer = {
        "model": {"vocab": [["a", 0.0], ["b", -1.0]]},
        "added_tokens": [{"id": 50, "content": "<x>"}],
    }
    (home / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has 51 tokens" in checked(home)


def test_mixed_tasks_are_configs_of_their_own(home: Path) -> None:
    (home / "rows.jsonl").write_text("")
    (home / "run.yaml").write_text(
        "model: {path: model}\n"
        "data:\n  mix:\n    - {task: jsonl, path: rows.jsonl, weight: 2}\n    - {task: chain_sum, terms: 2}\n"
    )
    config = load(home)
    assert [(source.task, source.weight) for source in config.data.mix] == [("jsonl", 2.0), ("chain_sum", 1.0)]
    assert config.data.mix[0].path == str(home / "rows.jsonl")
    assert Config.model_validate(config.dump()).dump() == config.dump()
    lines = refused(
        home, "data.mix=[{task: jsonl, path: nowhere.jsonl}, {task: sums}, {pth: x}, {rows: ten}, {weight: 0}]"
    )
    for part in (
        "data.mix.0.path=nowhere.jsonl: not found in",
        "data.mix.1.task=sums: is not a task; use chain_sum, jsonl, parquet, folder or reasoning_gym:NAME",
        "data.mix.2.pth=x: unknown key; use one of task, terms, options, path",
        "data.mix.3.rows=ten: is no slice; write start:stop, such as 0:1000",
        "data.mix.4.weight=0: must be above 0",
    ):
        assert part in lines
    assert "data.mix.1.path=null: data.mix.1.task=parquet reads a file" in checked(
        home, "data.mix=[{}, {task: parquet}]", "data.system=hm"
    )
    assert "data.system: is a message of a chat template; set data.chat=true" in checked(home, "data.system=hm")


def test_rewards_are_named_and_fit_their_task(home: Path) -> None:
    (home / "rows.jsonl").write_text("")
    rows = ["data.task=jsonl", "data.path=rows.jsonl"]
    assert load(home).reward.weighted == {"exact": 1.0}
    several = load(home, *rows, "reward.weights={math: 1, python:a.b:c: 0.5}")
    assert several.reward.weighted == {"math": 1.0, "python:a.b:c": 0.5}
    assert Config.model_validate(several.dump()).dump() == several.dump()
    for kind in ("fuzzy", "python:", "python:a", "python:a:", "model:"):
        line = f"reward.kind={kind}: is not a reward; use exact, math, gsm8k, choice, format, python:package."
        assert line in refused(home, f"reward.kind='{kind}'")
        assert "is not a reward" in refused(home, f"reward.weights={{'{kind}': 1.0}}")
    assert "reward.kind=math: answers of data.task=chain_sum have no ####" in checked(home, "reward.kind=math")
    assert checked(home, *rows, "reward.kind=math") == ""
    line = "reward.overlong_buffer=29: is longer than a response, rollout.max_response=28; use at most 28"
    assert checked(home, "reward.overlong_buffer=29") == line


def test_reward_models_are_folders_found_as_other_paths_are(home: Path) -> None:
    for name in ("good/judge", "other/judge"):
        (home / name).mkdir(parents=True)
    (home / "nested").mkdir()
    (home / "nested/run.yaml").write_text("model: {path: ../model}\nreward: {kind: 'model:good/judge'}\n")
    alone = load_config(home / "nested/run.yaml")
    assert alone.reward.models == {f"model:{home}/good/judge": home / "good/judge"}
    assert reward_name(alone.reward.kind) == "model:judge"
    several = load(home, "reward.weights={exact: 1.0, 'model:good/judge': 0.5}")
    assert several.reward.weighted == {"exact": 1.0, f"model:{home}/good/judge": 0.5}
    assert "reward.kind=model:nowhere: not found in" in refused(home, "reward.kind=model:nowhere")
    twins = "reward.weights={'model:good/judge': 1.0, 'model:other/judge': 0.5}"
    assert "model:judge are several" in checked(home, twins)


def test_a_reward_stage_is_a_stage_more(home: Path) -> None:
    assert load(home, "parallel.reward_stage=true").world_size == 3
    wide = "parallel.tensor=2", "parallel.pipeline=3", "parallel.data=2"
    assert load(home, "parallel.reward_stage=true", *wide).world_size == 2 * (3 + 1) * 2
    assert load(home, "parallel.reward_stage=true", "parallel.placement=one_process").world_size == 2


def test_a_batch_is_sampled_in_as_many_micro_batches_as_are_in_flight_or_more(home: Path) -> None:
    assert load(home, "rollout.in_flight=3").sampling_micro_batches == 3
    assert load(home, "rollout.micro_batches=8").sampling_micro_batches == 8
    line = "rollout.micro_batches=2: are fewer than the 3 in flight; use at least 3"
    assert checked(home, "rollout.in_flight=3", "rollout.micro_batches=2") == line


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5 but optim.clip is 1.0"),
        (  # case G7: the three numbers
            {"train_batch_size": 128},
            "train_batch_size is 128 but grpo and parallel give train_batch_size 64 = 64 a tick and rank "
            "(train_micro_batch_size_per_gpu) x 1 (gradient_accumulation_steps) x 1 data-parallel ranks",
        ),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu is 4"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type is Lion"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            "optimizer.params.lr is 0.001 but optim.lr is",
        ),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True but model.dtype is float32"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "scheduler is set"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; use 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer needs ZeRO 1 or more and the stage is 0; remove it or raise the stage",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param needs ZeRO 3 or more and the stage is 2",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            'zero_optimization.offload_param.device is nvme but only host memory is used; set it to "cpu" or "none"',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}},
            "zero_optimization.offload_optimizer.ratio is 0.4 but all of it is offloaded here; set it to 1.0",
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            'zero_optimization.cpu_offload is an old name; write offload_optimizer: {"device": "cpu"}',
        ),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_config_is_refused(
    home: Path, settings: dict[str, Any], part: str
) -> None:
    config = load(home, write_deepspeed(home, **settings))
    assert part in "\n".join(check_config(config))
    with pytest.raises(ConfigError):
        deepspeed_settings(config)


def test_auto_and_equal_values_agree_and_no_auto_is_left(home: Path) -> None:
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}}
    override = write_deepspeed(
        home,
        zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 1000},
        optimizer=auto,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        gradient_clipping=1.0,
        bf16={"enabled": "auto"},
        train_batch_size="auto",
    )
    config = load(home, override, "parallel.data=2")
    assert check_config(config) == []
    settings = deepspeed_settings(config)
    assert "auto" not in json.dumps(settings)
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1000
    assert settings["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert "scheduler" not in settings
    assert settings["optimizer"]["params"] == {
        "lr": 5e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert (settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]) == (64, 32)
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("dtype", "stage", "accumulation"),
    [("float32", 0, "fp32"), ("float32", 1, "fp32"), ("bfloat16", 1, "bf16"), ("bfloat16", 3, "fp32")],
)
def test_formats_follow_the_model(home: Path, dtype: str, stage: int, accumulation: str) -> None:
    override = write_deepspeed(home, zero_optimization={"stage": stage})
    settings = deepspeed_settings(load(home, override, f"model.dtype={dtype}"))
    assert settings["bf16"]["enabled"] is (dtype == "bfloat16")
    assert settings["data_types"] == {"grad_accum_dtype": accumulation}


@pytest.mark.parametrize("prompts", [1, 3, 7, 15, 29])
def test_the_prompts_per_step_that_are_offered_work(home: Path, prompts: int) -> None:
    message = checked(home, f"grpo.prompts_per_step={prompts}")
    for offered in message.rpartition("use ")[2].split(" or "):
        assert checked(home, f"grpo.prompts_per_step={offered}") == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.is_floor=0.5"], "grpo.is_floor=0.5: does nothing without grpo.is_cap; leave it out"),
        (["grpo.resample_rounds=5"], "grpo.resample_rounds=5: does nothing without grpo.dead_groups=resample"),
        (["reward.overlong_weight=2.0"], "reward.overlong_weight=2.0: does nothing without reward.overlong_buffer"),
        (["reward.flexible=true"], "reward.flexible=True: does nothing without the reward gsm8k"),
        (["reward.kind=math", "reward.weights={exact: 1}"], "reward.kind=math: does nothing without an empty"),
        (
            ["boundary.backward_budget=auto", "parallel.pipeline=1"],
            "boundary.backward_budget=auto: does nothing without parallel.pipeline=2 or more",
        ),
        (["boundary.anchor_budget=0.03"], "boundary.anchor_budget=0.03: does nothing without an anchor between stages"),
        (["boundary.backward_cosine=0.9"], "boundary.backward_cosine=0.9: does nothing without backward_budget=auto"),
        (["data.val_rows='0:5'"], "data.val_rows=0:5: does nothing without data.val_path or val_split"),
    ],
)
def test_what_nothing_would_heed_is_refused(home: Path, overrides: list[str], message: str) -> None:
    assert message in checked(home, *overrides)


@pytest.mark.parametrize(
    "given", ["forward_codec=mask", "forward_budget=0.12", "predict=embedding", "shared_basis=true"]
)
def test_a_forward_codec_that_no_pass_uses_is_refused(home: Path, given: str) -> None:
    """Sent once, sampled uncompressed: but for the shorthand ``codec``, which is the backward one's, too."""
    once = ["boundary.send_once=reuse", "boundary.codec=lowrank", "boundary.payload=waterfill", f"boundary.{given}"]
    wanted = f"boundary.{given.replace('true', 'True')}: does nothing without rollout.path=codec or auto"
    assert wanted in checked(home, *once, "rollout.path=dense")
    assert "does nothing" not in checked(home, *once, "rollout.path=codec")
    assert "does nothing" not in checked(home, *once[:3], "rollout.path=dense")


def test_what_a_run_writes_of_a_codec_that_no_pass_uses_reads_back(home: Path) -> None:
    config = load_config(home / "run.yaml", ["boundary.send_once=reuse", "rollout.path=dense"])
    written = config.dump()["boundary"]
    assert (written["forward_codec"], written["forward_payload"], written["predict"]) == (
        "identity",
        "bfloat16",
        "none",
    )
    again = Config.model_validate(config.dump())
    assert again.dump() == config.dump() and again.boundary_at_work.resolved() == config.boundary_at_work.resolved()
    assert check_config(again, sizes_alone=True) == check_config(config, sizes_alone=True)


def test_what_belongs_together_is_taken(home: Path) -> None:
    together = ["grpo.is_floor=0.5", "grpo.is_cap=2.0", "reward.overlong_weight=2.0", "reward.overlong_buffer=4"]
    assert "does nothing" not in checked(home, *together)
