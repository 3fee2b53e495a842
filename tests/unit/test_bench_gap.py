"""The gap benchmark: what it measures, against slow references, and the command on the tiny policy.

Legend: B sequences, R response columns, N rows, H hidden, V vocabulary.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_grpo.backends.huggingface import CausalModel
from megatron_grpo.bench.arms import BACKWARD_ARMS, FORWARD_ARMS, Coded
from megatron_grpo.bench.backward import RetainedPasses, boundary_gradients, compare, with_random_advantages
from megatron_grpo.bench.forward import DenseReference, rollout_gap
from megatron_grpo.bench.gap import GapSettings, pieces_of_work, run_gap
from megatron_grpo.bench.limits import context_rows, fit_limit, gaussian_channel, water_level
from megatron_grpo.bench.prompts import built_in_prompts, file_prompts
from megatron_grpo.bench.report import KEYS, bench_gap
from megatron_grpo.bench.spectra import rank_of_energy, tokens_of_energy
from megatron_grpo.bench.texts import Rowbook, SplitModel, unchanged
from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.boundary.identity import IdentityCodec
from megatron_grpo.config import ConfigError
from megatron_grpo.ops.rows import Rows, all_rows, carrying_rows
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import SamplingRule

TINY = Path(__file__).parents[2] / "examples/tiny/policy"
H, V = 16, 23
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
RULE = SamplingRule(1.0, top_k=0, top_p=1.0, max_response=6, valid=V, end_ids=frozenset({2}), pad_id=0, seed=3)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def split(llama: LlamaForCausalLM) -> SplitModel:
    return SplitModel(CausalModel(llama), (1, 3))


def halved(index: int, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A crossing that loses something of every row, in the same way in any batch."""
    return torch.cat([x_NH[:, : H // 2], 0.5 * x_NH[:, H // 2 :]], dim=1)


class Scaling(Codec):
    """Rows come out at ``factor`` of their size; the payload is one byte a row."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        return Encoded(torch.zeros(len(rows), dtype=torch.uint8), self._factor * x_NH)


def sequences(batch: Batch) -> list[tuple[list[int], int]]:
    """Every sequence without padding, and the length of its prompt."""
    found = []
    for row in range(len(batch)):
        prompt, response = int(batch.prompt_lengths_B[row]), int(batch.response_lengths_B[row])
        start = batch.prompt_columns - prompt
        found.append((batch.tokens_BS[row, start : batch.prompt_columns + response].tolist(), prompt))
    return found


def slow_logp(llama: LlamaForCausalLM, ids: list[int], prompt: int, cross: bool = False) -> torch.Tensor:
    """``[R, V]`` log-probs of one response, one sequence at a time, by transformers alone."""
    hooks = []
    if cross:
        for layer in (llama.model.layers[0], llama.model.layers[2]):
            hooks.append(layer.register_forward_hook(lambda module, inputs, out: halved(0, out[0], None)[None]))
    logits = llama(torch.tensor([ids[:-1]])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits[prompt - 1 :].log_softmax(dim=-1)


def test_rows_at_a_boundary_are_the_outputs_of_its_layer(llama: LlamaForCausalLM, split: SplitModel) -> None:
    batch = split.sample(PROMPTS, RULE)
    book = Rowbook(2)
    with torch.no_grad():
        split.response_logits(batch, book)
    for index, layer in enumerate((1, 3)):
        x_NH, rows = book.parts[index][0]
        for row, (ids, _) in enumerate(sequences(batch)):
            with torch.no_grad():
                hidden = llama(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[layer][0]
            torch.testing.assert_close(x_NH[rows.sequences_N == row], hidden, atol=1e-5, rtol=1e-5)
            assert rows.tokens_N is not None and rows.tokens_N[rows.sequences_N == row].tolist() == ids[:-1]


@pytest.mark.parametrize("crossed", [False, True])
def test_sampler_log_probs_are_those_of_single_sequences(
    llama: LlamaForCausalLM, split: SplitModel, crossed: bool
) -> None:
    """Token by token with a KV cache in a padded batch, against whole unpadded sequences through transformers."""
    batch = split.sample(PROMPTS, RULE, halved if crossed else unchanged)
    assert int(batch.response_lengths_B.max()) > 1
    for row, (ids, prompt) in enumerate(sequences(batch)):
        with torch.no_grad():
            logp_RV = slow_logp(llama, ids, prompt, cross=crossed)
        expected_R = logp_RV.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0]
        got_R = batch.sampler_logp_BR[row, : len(expected_R)]
        torch.testing.assert_close(got_R, expected_R, atol=1e-4, rtol=1e-4)


def test_gap_and_divergence_by_single_sequences(llama: LlamaForCausalLM, split: SplitModel) -> None:
    batch = split.sample(PROMPTS, RULE)
    gaps, divergences = [], []
    for ids, prompt in sequences(batch):
        with torch.no_grad():
            dense, coded = (slow_logp(llama, ids, prompt, cross=crossed).double() for crossed in (False, True))
        for column, token in enumerate(ids[prompt:]):
            gaps.append(abs(dense[column, token] - coded[column, token]).item())
            p = dense[column].exp()
            divergences.append(sum(float(p[v] * (dense[column, v] - coded[column, v])) for v in range(V)))
    gap = DenseReference(split, batch.split(3)).gap(halved)
    assert gap.mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-3) and gap.mean > 0.01
    assert gap.median == pytest.approx(torch.tensor(gaps).median().item(), rel=1e-3)
    assert gap.kl == pytest.approx(sum(divergences) / len(divergences), rel=1e-3)


def test_rollout_gap_sees_a_sampler_that_codes_otherwise(split: SplitModel) -> None:
    same = [Scaling(0.9), Scaling(0.9)]
    assert rollout_gap(split, PROMPTS, RULE, same)["rollout_gap_mean"] < 1e-5

    class Fading(Scaling):
        """Codes a whole pass otherwise than single columns: what a codec of activations must not do."""

        def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
            return Encoded(torch.zeros(len(rows), dtype=torch.uint8), x_NH * (1.0 if len(rows) > len(PROMPTS) else 0.3))

    gap = rollout_gap(split, PROMPTS, RULE, [Fading(1.0), Fading(1.0)])
    assert gap["rollout_gap_mean"] > 1e-2 and gap["rollout_gap_median"] > 1e-2


def test_gradients_of_the_group_loss(llama: LlamaForCausalLM, split: SplitModel) -> None:
    """dX at a boundary, and the stages' gradients: a stage sees the product of all scales behind it."""
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    batch = with_random_advantages(split.sample(prompts, RULE), 2, seed=0)
    assert batch.advantages_B.view(-1, 2).sum(dim=1).abs().max() < 1e-5 and batch.advantages_B.abs().min() > 0.1
    book = boundary_gradients(split, batch.split(3))
    passes = RetainedPasses(split, batch.split(3))
    row = passes.row([Scaling(0.5), Scaling(0.25)])
    assert row["cosine"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert row["norm_ratio"] == pytest.approx([0.125, 0.25], rel=1e-5)
    assert row["error"] == pytest.approx([0.5, 0.75], rel=1e-5) and row["bytes"] == 1 / (2 * H)
    assert passes.row([IdentityCodec(H, torch.float32)] * 2)["norm_ratio"] == [1.0, 1.0]

    tokens = batch.response_tokens
    llama.zero_grad()
    states = []
    for (ids, prompt), advantage in zip(sequences(batch), batch.advantages_B, strict=True):
        hook = llama.model.layers[2].register_forward_hook(lambda module, inputs, out: states.append(out) or out)
        logp_RV = slow_logp(llama, ids, prompt)
        hook.remove()
        states[-1].retain_grad()
        (-advantage * logp_RV.gather(1, torch.tensor(ids[prompt:])[:, None]).sum() / tokens).backward()
    weight = llama.model.layers[0].mlp.up_proj.weight
    assert weight.grad is not None
    expected = torch.cat([state.grad[0] for state in states]).norm().item()
    assert book.rows_NH(1).norm().item() == pytest.approx(expected, rel=1e-4)
    dense = passes._gradients(unchanged)[0]
    found = [grad for grad in dense if grad.shape == weight.shape and torch.allclose(grad, weight.grad, atol=1e-6)]
    assert len(found) == 1
    llama.zero_grad()


def test_compare_takes_a_stage_as_one_vector() -> None:
    """(1, 2, 2) against (2, 1, 2): product 8, norms 3 and 3."""
    first, second = [torch.tensor([1.0, 2.0]), torch.tensor([2.0])], [torch.tensor([2.0, 1.0]), torch.tensor([2.0])]
    assert compare(first, second) == pytest.approx((8 / 9, 1.0))
    assert compare([torch.zeros(2)], [torch.ones(2)]) == (0.0, 0.0)


def test_errors_by_energy_and_by_token() -> None:
    """One huge row exact, three small ones lost: little by energy, everything by token."""
    x = torch.tensor([[10.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])

    class KeepsTheFirst(Scaling):
        def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
            return Encoded(torch.zeros(2), torch.cat([x_NH[:1], 0.0 * x_NH[1:]]))

    coded = Coded([KeepsTheFirst(1.0)])
    coded(0, x, all_rows(4, 1, x.device))
    energy, median = coded.errors()
    assert energy == [pytest.approx((3 / 103) ** 0.5)] and median == [1.0]
    assert coded.share == 8 / 16


def test_ranks_and_tokens_by_hand() -> None:
    """Directions of energy 100, 25, 4; tokens of energy 64, 36, 25, 4."""
    x = torch.tensor([[8.0, 0, 0], [-6.0, 0, 0], [0, 5.0, 0], [0, 0, 2.0]])
    assert [rank_of_energy(x, share) for share in (0.7, 0.8, 0.96, 0.98)] == [1, 2, 2, 3]
    assert tokens_of_energy(x, 0.4) == 0.25 and tokens_of_energy(x, 0.9) == 0.75


def test_water_level_by_hand() -> None:
    """1 bit: all to the first channel, 4 / theta = 4. 2 bits: 4 / theta * 1 / theta = 16."""
    variance = torch.tensor([4.0, 1.0])
    assert [water_level(variance, bits) for bits in (1.0, 2.0)] == pytest.approx([1.0, 0.5], rel=1e-6)


def test_the_channel_loses_what_rate_distortion_theory_says() -> None:
    variance = torch.tensor([4.0, 1.0, 0.25])
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(200_000, 3, generator=generator) * variance.sqrt()
    lost = (gaussian_channel(u, variance, 0.5, generator) - u).square().mean(dim=0)
    torch.testing.assert_close(lost, torch.tensor([0.5, 0.5, 0.25]), rtol=0.02, atol=0)


def test_context_is_the_embedding_and_the_row_before() -> None:
    carrying = torch.tensor([[False, True], [True, True]])
    rows = carrying_rows(carrying, torch.tensor([[0, 1], [2, 0]]))
    unit = torch.nn.functional.normalize(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), dim=-1)
    embedding = torch.tensor([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]])
    # In column order: sequence 1's first (token 2), sequence 0's first (token 1), sequence 1's second (token 0).
    expected = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.6, 0.8, *unit[0].tolist()]]
    torch.testing.assert_close(context_rows(unit, rows, embedding), torch.tensor(expected))


def test_prediction_lowers_the_limit_where_rows_follow_their_tokens() -> None:
    """Rows are a token's own direction and a tenth of noise: with a prediction, at few bits, little is lost."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(50, H, generator=generator)
    turn = torch.linalg.qr(torch.randn(H, H, generator=generator))[0]

    def part() -> tuple[torch.Tensor, Rows]:
        tokens = torch.randint(50, (8, 100), generator=generator)
        rows = carrying_rows(torch.ones_like(tokens, dtype=torch.bool), tokens)
        assert rows.tokens_N is not None
        unit_NH = torch.nn.functional.normalize(embedding[rows.tokens_N], dim=-1) @ turn
        return 7.0 * unit_NH + 0.7 * torch.randn(800, H, generator=generator) / H**0.5, rows

    fitted, (x, rows) = [part() for _ in range(4)], part()
    plain, predicted = (
        (fit_limit(fitted, known).code(x, rows, 0.15, generator) - x).norm() / x.norm() for known in (None, embedding)
    )
    assert predicted < 0.2 and plain > 2 * predicted


def test_prompts_differ_and_are_the_same_again() -> None:
    prompts = built_in_prompts(90, seed=1)
    assert len(set(prompts)) == 90 and prompts == built_in_prompts(90, seed=1) != built_in_prompts(90, seed=2)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"question": "b"}\n{"text": "c"}\n')
    assert file_prompts(file, 2) == ["a", "b"]
    with pytest.raises(ConfigError, match="line 3 is no object with a text"):
        file_prompts(file, 3)
    with pytest.raises(ConfigError, match="has 3 prompts; give 4"):
        file_prompts(file, 4)


SMALL = GapSettings(shares=(), texts=4, fit_texts=8, max_response=8)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The whole measurement on the tiny policy: hidden 96, boundaries after layers 2 and 3."""
    notes: list[str] = []
    found = run_gap(TINY, 2, [0.1, 0.18], settings=SMALL, device="cpu", note=notes.append)
    assert len(notes) == pieces_of_work(2)
    return found


def test_every_codec_is_measured_within_its_bytes(result: dict[str, Any]) -> None:
    for rows, arms in ((result["forward"], FORWARD_ARMS), (result["backward"], BACKWARD_ARMS)):
        assert {row["codec"] for row in rows} == {arm.name for arm in arms}
        for row in rows:
            if row["share"] is not None:
                assert 0.85 * row["share"] < row["bytes"] <= 1.05 * row["share"], row


def test_an_arm_is_what_it_says_whatever_the_defaults_are() -> None:
    forward = {arm.name: arm.config(0.05, 576) for arm in FORWARD_ARMS}
    assert [forward[name].predict for name in ("int4", "waterfill", "waterfill, embedding")] == [
        "none",
        "none",
        "embedding",
    ]
    assert forward["waterfill"].budget_of("forward") == 0.05 and forward["waterfill"].rank is None
    ranks = {arm.name: arm.config(0.05, 576).rank for arm in BACKWARD_ARMS}
    # 5 % of 576 numbers of 16 bits: 28.8 numbers, or 460.8 bits less 16 for the scale
    assert (ranks["lowrank"], ranks["int8"], ranks["int4"], ranks["int3"]) == (29, 55, 111, 148)


def test_what_must_be_exact_is(result: dict[str, Any]) -> None:
    rows = {(row["codec"], row["share"]): row for row in result["forward"]}
    exact = rows["identity float32", None]
    assert exact["bytes"] == 2.0 and exact["error"] == [0.0, 0.0] and exact["gap_mean"] < 1e-5 and exact["kl"] < 1e-5
    assert rows["identity bfloat16", None]["bytes"] == 1.0 and 0 < rows["identity bfloat16", None]["gap_mean"] < 0.05
    assert all(row["rollout_gap_median"] < 1e-3 for row in result["forward"])


def test_more_bytes_lose_less(result: dict[str, Any]) -> None:
    for key, worse, name in (("forward", "error", "waterfill"), ("backward", "error", "token_waterfill")):
        few, many = (row[worse] for row in result[key] if row["codec"] == name)
        assert all(first > second for first, second in zip(few, many, strict=True))
    few, many = (row["cosine"] for row in result["backward"] if row["codec"] == "token_waterfill")
    assert min(many) > 0.9 and sum(many) > sum(few)


def paths(value: Any, name: str = "") -> set[str]:
    """Keys of the JSON object as report.KEYS names them."""
    if isinstance(value, list):
        return {name}.union(*(paths(part, name) for part in value))
    if isinstance(value, dict) and name != "settings":
        return {name for name in [name] if name}.union(
            *(paths(part, f"{name}/{key}" if name else key) for key, part in value.items())
        )
    return {name}


def test_every_key_is_documented(result: dict[str, Any]) -> None:
    inner = {key for key in KEYS for other in KEYS if other.startswith(f"{key}/")}
    found = paths(json.loads(json.dumps(result)))
    assert found - {"tokens", "spectra/forward", "spectra/backward"} == set(KEYS), inner


def test_the_command_writes_json_and_a_figure(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**result, "seconds": float("inf")}
    monkeypatch.setattr("megatron_grpo.bench.report.run_gap", lambda *args, **keys: broken)
    bench_gap(TINY, 2, "0.1,0.18", json_file=Path("-"), figure=tmp_path / "gap.png")
    printed = json.loads(capsys.readouterr().out)
    assert printed["seconds"] is None and printed["forward"] == result["forward"]
    pixels = imread(tmp_path / "gap.png")
    assert min(pixels.shape[:2]) > 500 and pixels[..., :3].std() > 0.05
    bench_gap(TINY, 2, "0.1,0.18", json_file=tmp_path / "gap.json")
    assert json.loads((tmp_path / "gap.json").read_text()) == printed
    assert "token_waterfill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"shares": "0.1,x"}, "--bytes=0.1,x: is no list of numbers"),
        ({"shares": "0.1,1.5"}, "--bytes=1.5: must be above 0"),
        ({"shares": "0.1,0.9"}, "--bytes=0.9: .* take a share from 0.0111 to 0.5104 with payload waterfill"),
        ({"device": "nothing"}, "--device=nothing: .*; use cpu, or leave it out"),
        ({"after": "2,9"}, "--after=2,9: must rise from 1 to 3"),
        ({"after": "3,2"}, "--after=3,2"),
        ({"boundaries": 4}, "--boundaries=4: the model has 4 layers"),
        ({"settings": replace(SMALL, texts=3)}, "--texts=3: must be a multiple of the 2 answers"),
        ({"json_file": Path("nowhere/gap.json")}, "--json=nowhere/gap.json"),
        ({"model_dir": Path("nowhere")}, "nowhere has no config.json|nowhere holds no config.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(keys: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model_dir": TINY, "boundaries": 2, "shares": "0.1", "settings": SMALL, **keys}
    with pytest.raises(ConfigError, match=message):
        bench_gap(**given)
