"""The sampler as a pipeline program: what it samples, what it reports, what it sends, when it stops.

Legend: B sequences, P prompt columns, R response columns, V vocabulary.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.backends.megatron.decode import LeanStage
from megatron_grpo.backends.megatron.schedule import forward_only
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import Config
from megatron_grpo.ops.rows import Rows
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.parallel.link import Ledger
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import Finished, PipelineSampler, SamplingRule
from megatron_grpo.training.loss import ReadLogprobs, Replay, model_inputs
from megatron_grpo.training.policy import Policy, build_link
from tests.harness import run_ranks
from tests.ranks.support import HIDDEN, VOCAB, config, policy_of, write_model

# Seven prompts of one to eight tokens: no count of micro-batches divides them evenly.
PROMPTS = [[5, 9, 33], [7], [12, 3, 44, 58, 6, 21, 30, 8], [40, 41], [60, 59, 4, 3], [17, 22, 9, 9, 51], [28, 6]]
RESPONSE = 10
RANK = 4
LAYOUTS = {
    "pp1": Layout(),
    "pp2": Layout(pipeline=2),
    "pp4": Layout(pipeline=4),
    "tp2pp2": Layout(pipeline=2, tensor=2),
}
GREEDY = SamplingRule(
    temperature=None,
    top_k=0,
    top_p=1.0,
    max_response=RESPONSE,
    valid=VOCAB,
    end_ids=frozenset({2}),
    pad_id=0,
    seed=5,
)
# A third of the vocabulary ends a sequence, so that lengths differ and some sequences end at once.
DRAWN = replace(GREEDY, temperature=1.3, end_ids=frozenset(range(2, VOCAB, 3)))
ENDED_AT_ONCE = replace(DRAWN, end_ids=frozenset(range(VOCAB)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@dataclass
class CountingStage:
    """A stage that counts its calls."""

    inner: LeanStage
    calls: list[int] = field(default_factory=list)

    def open(self, place: int, padding_BP: torch.Tensor, columns: int) -> None:
        self.inner.open(place, padding_BP, columns)

    def forward(self, place: int, x: torch.Tensor, start: int, rows: Rows) -> torch.Tensor:
        self.calls.append(place)
        return self.inner.forward(place, x, start, rows)


@dataclass(frozen=True)
class Sampled:
    batch: Batch
    calls: int
    sent: tuple[int, int]
    trainer_logp_BR: torch.Tensor | None
    handed: list[Finished]


class Bench:
    """Samples with any hook, rule and split over one built policy."""

    def __init__(self, cfg: Config, policy: Policy) -> None:
        self._cfg, self._policy = cfg, policy

    def sample(
        self,
        rule: SamplingRule,
        *,
        dense: bool = True,
        in_flight: int | None = None,
        micro_batches: int | None = None,
        rows: range = range(len(PROMPTS)),
        recompute: bool = False,
        **boundary: Any,
    ) -> Sampled:
        """Sample ``rows`` of PROMPTS; ``recompute``: also the trainer's log-probs of them through the same boundary."""
        policy, ledger = self._policy, Ledger()
        handed: list[Finished] = []
        cfg = self._cfg.model_copy(update={"boundary": self._cfg.boundary.model_copy(update=boundary)})
        link, lean = build_link(cfg, policy.stage, policy.groups, ledger)
        stage = CountingStage(lean)
        sampler = PipelineSampler(
            stage,
            link,
            policy.groups,
            stages=policy.groups.layout.pipeline,
            in_flight=in_flight or policy.groups.layout.pipeline,
            micro_batches=micro_batches or in_flight or policy.groups.layout.pipeline,
            ledger=ledger,
            device=policy.device,
        )
        plan = Pass("rollout", dense=dense)
        with policy.engine.whole_parameters(), link.boundaries.running(plan):
            batch = sampler.sample([PROMPTS[row] for row in rows], torch.tensor(list(rows)), rule, handed.append)
        lean.close()
        ways = ("forward", "backward")
        sent = (ledger.sent("pipeline", "rollout", ways[0]), ledger.sent("pipeline", "rollout", ways[1]))
        trainer = None
        if recompute:
            replay = Replay(batch, None, None, tokens=batch.response_tokens, sequences=len(batch))
            inputs, carrying = model_inputs(replay, 1)
            read = ReadLogprobs(rule.temperature or 1.0, policy.vocab)
            parts = forward_only(policy.stage, link, inputs, Pass("old_logprob", carrying, dense), read)
            trainer = torch.cat(parts) if parts else None
        return Sampled(batch, len(stage.calls), sent, trainer, handed)


def everything(rank: int, world: int, model: str, layout: Layout) -> dict[str, Sampled]:
    """Every scenario of this file on one layout."""
    cfg = config(Path(model), layout, boundary={"codec": "lowrank", "rank": RANK, "payload": "float32"})
    with policy_of(cfg) as policy:
        bench = Bench(cfg, policy)
        scenes = {
            "greedy": bench.sample(GREEDY),
            "drawn": bench.sample(DRAWN, recompute=True),
            "one_in_flight": bench.sample(DRAWN, in_flight=1),
            "many_in_flight": bench.sample(DRAWN, in_flight=len(PROMPTS)),
            "one_by_one": bench.sample(DRAWN, micro_batches=len(PROMPTS)),
            "first_three": bench.sample(DRAWN, rows=range(0, 3)),
            "last_four": bench.sample(DRAWN, rows=range(3, 7)),
            "five_over_two": bench.sample(DRAWN, rows=range(1, 6), in_flight=2),
            "codec": bench.sample(DRAWN, dense=False, recompute=True),
            "codec_bfloat16": bench.sample(DRAWN, dense=False, recompute=True, payload="bfloat16"),
            "mask": bench.sample(DRAWN, dense=False, recompute=True, codec="mask"),
            "ended_at_once": bench.sample(ENDED_AT_ONCE),
            "top_k": bench.sample(replace(DRAWN, top_k=2, end_ids=frozenset())),
            "top_p": bench.sample(replace(DRAWN, top_p=0.4, end_ids=frozenset())),
            "cold": bench.sample(replace(DRAWN, temperature=0.01, end_ids=frozenset({2}))),
        }
    return scenes


@pytest.fixture(params=LAYOUTS, scope="module")
def layout_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks(layout_name: str, llama: Path) -> list[dict[str, Sampled]]:
    """What each rank of the layout sampled: one group of ranks for the whole file."""
    layout = LAYOUTS[layout_name]
    return run_ranks(everything, layout.world_size, str(llama), layout)


@pytest.fixture(scope="module")
def one_process(llama: Path) -> dict[str, Sampled]:
    return run_ranks(everything, 1, str(llama), Layout())[0]


@pytest.fixture(scope="module")
def network(llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama).eval()


def responses(sampled: Sampled) -> list[list[int]]:
    """The sampled ids of each sequence, the end token included."""
    batch = sampled.batch
    lengths = batch.response_lengths_B.tolist()
    return [ids[:length] for ids, length in zip(batch.responses_BR.tolist(), lengths, strict=True)]


def logprobs_by_hand(network: Any, sampled: Sampled, temperature: float) -> list[torch.Tensor]:
    """The whole log-distribution ``[R, V]`` behind each response, recomputed by transformers without padding."""
    found = []
    for prompt, ids in zip(PROMPTS, responses(sampled), strict=True):
        with torch.no_grad():
            logits_SV = network(torch.tensor([prompt + ids])).logits[0]
        found.append((logits_SV[len(prompt) - 1 : -1] / temperature).log_softmax(-1))
    return found


def test_greedy_equals_transformers_without_a_cache(ranks: list[dict[str, Sampled]], network: Any) -> None:
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=RESPONSE,
            use_cache=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    for scenes in ranks:
        assert responses(scenes["greedy"]) == expected


def test_draws_do_not_depend_on_the_layout(ranks: list[dict[str, Sampled]], one_process: dict[str, Sampled]) -> None:
    for scene in ("drawn", "top_k", "top_p"):
        assert responses(ranks[0][scene]) == responses(one_process[scene])


def test_draws_do_not_depend_on_the_split(ranks: list[dict[str, Sampled]]) -> None:
    """Neither on how many micro-batches are in flight, nor on what else is in the batch."""
    scenes = ranks[0]
    whole = responses(scenes["drawn"])
    assert responses(scenes["one_in_flight"]) == whole
    assert responses(scenes["many_in_flight"]) == whole
    assert responses(scenes["one_by_one"]) == whole
    assert responses(scenes["first_three"]) + responses(scenes["last_four"]) == whole
    assert len({tuple(ids) for ids in whole}) == len(whole)


def test_each_micro_batch_is_handed_on_once_and_whole(ranks: list[dict[str, Sampled]]) -> None:
    """On every rank, in one order; the shorter of those in flight first, and before the batch ends."""
    for scenes in ranks:
        sampled = scenes["one_by_one"]
        order = [done.rows.start for done in sampled.handed]
        assert sorted(order) == list(range(len(PROMPTS)))
        assert order == [done.rows.start for done in ranks[0]["one_by_one"].handed]
        for done in sampled.handed:
            (ids,) = done.responses_BR.tolist()
            assert ids[: int(done.lengths_B)] == responses(sampled)[done.rows.start]
    lengths = [len(ids) for ids in responses(ranks[0]["drawn"])]
    if len(ranks) == 2:  # two in flight: the longer of the first two is overtaken
        order = [done.rows.start for done in ranks[0]["one_by_one"].handed]
        assert order.index(lengths.index(min(lengths[:2]))) < order.index(lengths.index(max(lengths[:2])))


def test_no_ragged_sequence_is_lost(ranks: list[dict[str, Sampled]]) -> None:
    """Case D12: 5 sequences over 2 micro-batches are 3 and 2."""
    scenes = ranks[0]
    batch = scenes["five_over_two"].batch
    assert len(batch) == 5
    assert responses(scenes["five_over_two"]) == responses(scenes["drawn"])[1:6]
    prompts = [
        row[batch.prompt_columns - length : batch.prompt_columns]
        for row, length in zip(batch.tokens_BS.tolist(), batch.prompt_lengths_B.tolist(), strict=True)
    ]
    assert prompts == PROMPTS[1:6]


def test_every_rank_of_a_replica_holds_the_same_batch(ranks: list[dict[str, Sampled]]) -> None:
    """Case D11."""
    for scenes in ranks[1:]:
        for name, sampled in scenes.items():
            mine, first = sampled.batch, ranks[0][name].batch
            assert mine.prompt_columns == first.prompt_columns
            for part in ("tokens_BS", "prompt_lengths_B", "response_lengths_B", "advantages_B"):
                assert torch.equal(getattr(mine, part), getattr(first, part)), (name, part)


def test_responses_end_where_they_should(ranks: list[dict[str, Sampled]]) -> None:
    """After its end token a sequence is padding; one without an end token fills the limit."""
    batch = ranks[0]["drawn"].batch
    lengths = batch.response_lengths_B.tolist()
    assert min(lengths) < max(lengths)
    for row, length in zip(batch.responses_BR.tolist(), lengths, strict=True):
        assert not any(token in DRAWN.end_ids for token in row[: length - 1])
        assert row[length - 1] in DRAWN.end_ids or length == RESPONSE
        assert set(row[length:]) <= {0}


def test_all_ranks_stop_when_every_sequence_has_ended(ranks: list[dict[str, Sampled]], layout_name: str) -> None:
    """A micro-batch runs as many columns as its longest response, on every stage, and not one more."""
    count = LAYOUTS[layout_name].pipeline
    size = -(-len(PROMPTS) // count)
    for scenes in ranks:
        lengths = scenes["drawn"].batch.response_lengths_B
        micros = lengths.split(size)
        assert scenes["drawn"].calls == sum(int(part.max()) for part in micros)
        assert scenes["drawn"].calls < len(micros) * RESPONSE
        assert scenes["ended_at_once"].calls == len(micros)
        assert scenes["ended_at_once"].batch.response_lengths_B.tolist() == [1] * len(PROMPTS)


def test_reported_logprobs_are_a_full_recompute(ranks: list[dict[str, Sampled]], network: Any) -> None:
    """KV cache or none, our trainer or transformers: one distribution, temperature-scaled and untruncated."""
    drawn = ranks[-1]["drawn"]
    mask_BR = drawn.batch.response_mask_BR
    assert drawn.trainer_logp_BR is not None
    gap = (drawn.trainer_logp_BR - drawn.batch.sampler_logp_BR)[mask_BR].abs()
    assert len(gap) == drawn.batch.response_tokens and gap.max().item() < 1e-5
    distributions = logprobs_by_hand(network, drawn, 1.3)
    for row, (ids, logp_RV) in enumerate(zip(responses(drawn), distributions, strict=True)):
        expected = logp_RV.gather(1, torch.tensor(ids)[:, None])[:, 0]
        mine = drawn.batch.sampler_logp_BR[row, : len(ids)]
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("scene, limit", [("codec", 1e-4), ("mask", 1e-4), ("codec_bfloat16", 1e-3)])
def test_through_the_codec_sampler_and_trainer_are_one_policy(
    ranks: list[dict[str, Sampled]], scene: str, limit: float
) -> None:
    """The gap is round-off; with bfloat16 payloads round-off may flip a last bit of a payload here and there."""
    sampled = ranks[-1][scene]
    assert sampled.trainer_logp_BR is not None
    gap = (sampled.trainer_logp_BR - sampled.batch.sampler_logp_BR)[sampled.batch.response_mask_BR].abs()
    assert gap.mean().item() < limit


def test_the_codec_is_on_the_path(ranks: list[dict[str, Sampled]], layout_name: str) -> None:
    """Four of 32 numbers a token make another policy, wherever there is a boundary."""
    changed = responses(ranks[0]["codec"]) != responses(ranks[0]["drawn"])
    assert changed == (LAYOUTS[layout_name].pipeline > 1)


@pytest.mark.parametrize("scene", ["top_k", "top_p", "cold"])
def test_truncation_and_temperature_are_respected(ranks: list[dict[str, Sampled]], network: Any, scene: str) -> None:
    """Each drawn id in transformers' own distribution: of the 2 highest, in the nucleus of 0.4, likely when cold."""
    sampled = ranks[-1][scene]
    temperature = 0.01 if scene == "cold" else 1.3
    places, least = [], 1.0
    for ids, logp_RV in zip(responses(sampled), logprobs_by_hand(network, sampled, temperature), strict=True):
        for token, logp_V in zip(ids, logp_RV, strict=True):
            above_V = logp_V > logp_V[token]
            places.append(int(above_V.sum()))
            least = min(least, logp_V[token].exp().item())
            if scene == "top_p":
                assert logp_V.exp()[above_V].sum().item() < 0.4 + 1e-5
    if scene == "top_k":
        assert set(places) == {0, 1}
    if scene == "cold":
        assert least > 1e-5 and max(places) <= 1
    if scene == "top_p":
        assert max(places) > 0


@pytest.mark.parametrize("scene, row_bytes", [("drawn", HIDDEN * 4), ("codec", RANK * 4), ("codec_bfloat16", RANK * 2)])
def test_bytes_of_a_rollout(ranks: list[dict[str, Sampled]], layout_name: str, scene: str, row_bytes: int) -> None:
    """Forward a row a token, but for the last of each sequence; backward 4 bytes an id to each earlier stage."""
    layout = LAYOUTS[layout_name]
    for rank, scenes in enumerate(ranks):
        stage = layout.coordinates(rank).pipeline
        batch = scenes[scene].batch
        tokens = batch.response_tokens
        crossing = sum(len(prompt) for prompt in PROMPTS) + tokens - len(PROMPTS)
        last = stage == layout.pipeline - 1
        forward = 0 if last else crossing * row_bytes // layout.tensor
        backward = 4 * tokens * (layout.pipeline - 1) if last else 0
        assert scenes[scene].sent == (forward, backward)
