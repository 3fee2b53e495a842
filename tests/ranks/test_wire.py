"""What crosses a boundary, counted where torch hands it to the transport.

The ledger, the formula rows x numbers x bytes, and the tensors that ``ProcessGroup.send`` was given must be one.
Legend: B sequences, S input columns, H hidden, N rows, r rank, V vocabulary shard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_grpo.backends.megatron.schedule import ModelInput, forward_backward, forward_only
from megatron_grpo.boundary import basis as basis_module
from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.crossing import Boundaries, Pass
from megatron_grpo.config import Config
from megatron_grpo.ops.lowrank import digest, orthonormal_with_spread
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.parallel.link import DIRECTIONS, KINDS, Kind, Ledger
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.loss import ReadLogprobs, model_inputs
from megatron_grpo.training.policy import Policy, build_link
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import HIDDEN, config, minibatch, policy_of, replay_of, write_model

R = 5
WIDTH = {"identity": HIDDEN, "lowrank": R, "mask": R}
ITEMSIZE = {"float32": 4, "bfloat16": 2}
CODINGS = [(codec, payload) for codec in WIDTH for payload in ITEMSIZE]
PASSES: list[tuple[Kind, bool]] = [("fast", False), ("old_logprob", False), ("anchor", True)]
COUNTED = 4  # sequences, in micro-batches of two
LAYOUTS = {"pp2": Layout(pipeline=2), "pp4": Layout(pipeline=4), "tp2pp2": Layout(pipeline=2, tensor=2)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@dataclass(frozen=True)
class Found:
    """What one rank found, in one start of the ranks; see the functions of the same names."""

    counted: list[tuple[Any, ...]]
    crossing: dict[str, Any]
    plain_and_identity: list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]
    refreshed: dict[str, dict[str, Any]]


def everything(rank: int, world: int, model: str, layout: Layout) -> Found:
    cfg = config(Path(model), layout)
    with policy_of(cfg) as policy:
        return Found(
            counted=counted(policy, cfg),
            crossing=crossing(policy, cfg),
            plain_and_identity=plain_and_identity(policy),
            refreshed={payload: refreshed(policy, cfg, payload) for payload in ITEMSIZE},
        )


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS, scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


@pytest.fixture(scope="module")
def ranks(layout: Layout, llama: Path) -> list[Found]:
    return run_ranks(everything, layout.world_size, str(llama), layout)


@pytest.fixture(scope="module")
def two(llama: Path) -> list[Found]:
    return run_ranks(everything, 2, str(llama), Layout(pipeline=2))


@dataclass
class Wire:
    """Point-to-point messages that this rank handed to the transport: (to a later rank, the tensor)."""

    messages: list[tuple[bool, torch.Tensor]] = field(default_factory=list)

    def bytes(self, *, forward: bool) -> int:
        return sum(tensor.nbytes for onward, tensor in self.messages if onward == forward)


@contextmanager
def wiretap() -> Iterator[Wire]:
    """Every send of torch.distributed, blocking, batched or not, ends in ``ProcessGroup.send``."""
    wire = Wire()
    send = dist.ProcessGroup.send

    def recording(group: dist.ProcessGroup, tensors: list[torch.Tensor], to: int, *rest: Any) -> Any:
        wire.messages += [(to > group.rank(), tensor.detach().clone()) for tensor in tensors]
        return send(group, tensors, to, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", recording):
        yield wire


@contextmanager
def door(link: P2PCommunicator) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The stage's side of the hook: (what, tensor) in order, for sends and received tensors."""
    seen: list[tuple[str, torch.Tensor]] = []
    inner = link._communicate

    def recording(**call: Any) -> Any:
        for name in ("tensor_send_next", "tensor_send_prev"):
            if call[name] is not None:
                seen.append((name, call[name].detach().clone()))
        arrived = inner(**call)
        seen.extend((name, x) for name, x in zip(("from_prev", "from_next"), arrived, strict=False) if x is not None)
        return arrived

    with mock.patch.object(link, "_communicate", recording):
        yield seen


def rewired(policy: Policy, cfg: Config, **boundary: Any) -> Policy:
    """The policy with a fresh hook and ledger; a policy takes a second to build, a hook nothing."""
    ledger = Ledger()
    cfg = config(Path(cfg.model.path), policy.groups.layout, boundary=boundary)
    link, lean = build_link(cfg, policy.stage, policy.groups, ledger)
    return replace(policy, link=link, lean=lean, ledger=ledger)


def run_pass(policy: Policy, cfg: Config, plan: Pass, batch: Batch) -> None:
    """One pass of ``batch`` as training makes it: forward alone for old log-probs, else forward and backward."""
    replay = replay_of(batch, policy)
    if plan.kind == "old_logprob":
        inputs, plan.rows = model_inputs(replay, cfg.train.micro_batch)
        forward_only(policy.stage, policy.link, inputs, plan, ReadLogprobs(1.0, policy.vocab))
    else:
        TickRunner(cfg, policy)._pass(replay, plan)


def ledger_bytes(ledger: Ledger) -> dict[str, int]:
    """What the ledger says of pipeline links, every nonzero entry, by kind and direction."""
    entries = {f"{kind} {way}": ledger.sent("pipeline", kind, way) for kind in KINDS for way in DIRECTIONS}
    return {entry: count for entry, count in entries.items() if count}


def carrying_rows_by_hand(batch: Batch, micro_batch: int) -> list[list[int]]:
    """Rows of each micro-batch's flattened ``[S, B]``: prompt tokens and all sampled ones but the last."""
    chosen = []
    for start in range(0, len(batch), micro_batch):
        rows, width = [], min(micro_batch, len(batch) - start)
        for column in range(batch.tokens_BS.shape[1] - 1):
            for row in range(width):
                first = batch.prompt_columns - int(batch.prompt_lengths_B[start + row])
                last = batch.prompt_columns + int(batch.response_lengths_B[start + row]) - 2
                if first <= column <= last:
                    rows.append(column * width + row)
        chosen.append(rows)
    return chosen


def counted(base: Policy, cfg: Config) -> list[tuple[Any, ...]]:
    """(codec, payload, kind, bytes on the wire each way, the ledger's, its dense total) of every coding and pass."""
    found = []
    for codec, payload in CODINGS:
        for kind, dense in PASSES:
            policy = rewired(base, cfg, codec=codec, payload=payload, rank=R)
            with wiretap() as wire:
                run_pass(policy, cfg, Pass(kind, dense=dense, observe="both" if dense else None), minibatch(COUNTED))
            on_wire = (wire.bytes(forward=True), wire.bytes(forward=False))
            ledger = ledger_bytes(policy.ledger)
            counts = policy.ledger.take()
            found.append((codec, payload, kind, on_wire, ledger, int(counts[len(counts) // 2 :].sum())))
    return found


def test_bytes_are_the_ledger_and_the_formula(ranks: list[Found], layout: Layout) -> None:
    """rows x numbers x bytes a message; tensor ranks share it, the last share padded to the size of the others."""
    batch = minibatch(COUNTED)
    per_micro = [len(rows) for rows in carrying_rows_by_hand(batch, 2)]
    assert sum(per_micro) == int(batch.prompt_lengths_B.sum() + batch.response_lengths_B.sum()) - len(batch)
    assert sum(per_micro) == int(batch.carrying_BT().sum())
    for rank, found in enumerate(result.counted for result in ranks):
        stage = layout.coordinates(rank).pipeline
        sends = (stage < layout.pipeline - 1, stage > 0)
        assert len(found) == len(CODINGS) * len(PASSES)
        for codec, payload, kind, on_wire, ledger, dense in found:
            width = HIDDEN if kind == "anchor" else WIDTH[codec]
            bytes_each = ITEMSIZE[payload]
            whole = sum(-(-rows * width // layout.tensor) * bytes_each for rows in per_micro)
            expected = (whole * sends[0], whole * (sends[1] and kind != "old_logprob"))
            assert on_wire == expected, (rank, codec, payload, kind)
            named = {f"{kind} {way}": count for way, count in zip(DIRECTIONS, expected, strict=True) if count}
            assert ledger == named, (rank, codec, payload, kind)
            messages = sum(bool(count) for count in expected)
            owner = layout.coordinates(rank).tensor == 0
            assert dense == messages * sum(per_micro) * HIDDEN * 2 * owner


def crossing(policy: Policy, cfg: Config) -> dict[str, Any]:
    """One identity pass on two stages: what each side of the boundary saw, and what lay on the wire."""
    with wiretap() as wire, door(policy.link) as seen:
        run_pass(policy, cfg, Pass("fast"), minibatch())
        arrived = [x for name, x in seen if name.startswith("from")]
        return {
            "sent": [x for name, x in seen if name.startswith("tensor_send")],
            "wire": [tensor for _, tensor in wire.messages],
            "arrived": [x.detach().clone() for x in arrived],
            "leaves": [(x.is_leaf, x.requires_grad, x.grad_fn is None) for x in arrived],
            # Leaves of the forward pass get a gradient each: their own, so their memory is their own too.
            "distinct": len({x.data_ptr() for x in arrived}) == len(arrived),
            "graded": sum(x.grad is not None for x in arrived),
        }


def test_only_carrying_rows_cross_and_arrive_in_place(two: list[Found]) -> None:
    chosen = carrying_rows_by_hand(minibatch(), 2)
    first, last = (found.crossing for found in two)
    for sender, receiver in ((first, last), (last, first)):
        assert len(sender["sent"]) == len(sender["wire"]) == len(receiver["arrived"]) == len(chosen)
        for rows, x, message, y in zip(chosen, sender["sent"], sender["wire"], receiver["arrived"], strict=True):
            flat = x.reshape(-1, HIDDEN)
            assert torch.equal(message, flat[rows])
            assert len(rows) < len(flat)
            wanted = torch.zeros_like(flat)
            wanted[rows] = flat[rows]
            assert torch.equal(y, wanted.view_as(x))


def test_received_tensors_are_fresh_leaves(two: list[Found]) -> None:
    """What Megatron's schedule needs: it sets and reads ``.grad`` of what arrived from the previous stage."""
    first, last = (found.crossing for found in two)
    for result in (first, last):
        assert result["leaves"] == [(True, True, True)] * 4
        assert result["distinct"]
    assert (first["graded"], last["graded"]) == (0, 4)


class PlainP2P(P2PCommunicator):
    """Megatron's own communicator, called as ours is."""

    boundaries = Boundaries({}, 0)


def plain_and_identity(policy: Policy) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Logits and gradients of one pass with Megatron's communicator, then with ours."""
    results = []
    plain = PlainP2P(policy.groups.pipeline, policy.stage.module.config)
    inputs, _ = model_inputs(replay_of(minibatch(), policy), 2)

    def loss(logits_BSV: torch.Tensor, micro: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.linspace(-1, 1, logits_BSV.shape[-1])
        return (logits_BSV.log_softmax(-1) * weights).mean(), logits_BSV.detach().clone()

    for link in (plain, policy.link):
        policy.stage.module.zero_grad(set_to_none=True)
        outputs = forward_backward(policy.stage, link, inputs, Pass("fast"), loss, scale=1.0)
        gradients = {name: p.grad.clone() for name, p in policy.stage.module.named_parameters()}
        results.append((outputs, gradients))
    return results


def test_identity_is_megatrons_own_communicator_bit_for_bit(ranks: list[Found]) -> None:
    assert len(ranks[-1].plain_and_identity[0][0]) == 4
    for (plain_outputs, plain_gradients), (our_outputs, our_gradients) in (x.plain_and_identity for x in ranks):
        assert all(torch.equal(a, b) for a, b in zip(plain_outputs, our_outputs, strict=True))
        assert plain_gradients and plain_gradients.keys() == our_gradients.keys()
        assert all(torch.equal(our_gradients[name], g) for name, g in plain_gradients.items())


def bases_of(policy: Policy) -> dict[str, Basis]:
    """Bases of this rank's boundaries, named by boundary and direction."""
    named = {}
    for index, crossing in policy.boundaries.crossings.items():
        for way, learner in crossing.codecs.learners():
            assert isinstance(learner, Basis)
            named[f"{index} {way}"] = learner
    return named


def staged_of(bases: dict[str, Basis]) -> dict[str, torch.Tensor]:
    """What each will commit: Q ``[H, r]``, and below it the spread."""
    return {name: basis.flat().clone() for name, basis in bases.items()}


def refreshed(base: Policy, cfg: Config, payload: str) -> dict[str, Any]:
    """A dense observing pass, a refresh, a compressed pass before the commit and one after it."""
    policy = rewired(base, cfg, codec="lowrank", payload=payload, rank=R, basis="anchor")
    bases = bases_of(policy)
    result: dict[str, Any] = {"old": {name: basis.current.clone() for name, basis in bases.items()}}
    with door(policy.link) as seen:
        run_pass(policy, cfg, Pass("anchor", dense=True, observe="both"), minibatch())
    result["sent"] = seen
    policy.ledger.take()
    with wiretap() as wire:
        policy.link.refresh(policy.groups.data)
    result["refresh"] = (wire.bytes(forward=True) + wire.bytes(forward=False), ledger_bytes(policy.ledger))
    result["staged"] = staged_of(bases)
    for moment in ("before", "after"):
        with wiretap() as wire, door(policy.link) as seen:
            run_pass(policy, cfg, Pass("fast"), minibatch())
        result[moment] = ([tensor for _, tensor in wire.messages], [x for name, x in seen if "send" in name])
        policy.boundaries.commit()
    result["new"] = {name: basis.current.clone() for name, basis in bases.items()}
    return result


def reference_refresh(rows: list[torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    """orth(sum X^T X Q) with a positive diagonal of R, in fp64."""
    sketch = sum(x.double().T @ (x.double() @ q.double()) for x in rows)
    left, right = torch.linalg.qr(sketch)
    return left * right.diagonal().sign()


@pytest.mark.parametrize("payload", ITEMSIZE)
def test_both_ends_refresh_to_the_same_basis_and_use_it_after_the_commit(two: list[Found], payload: str) -> None:
    """One power step over the rows as they crossed: the sender too learns from what the receiver decoded."""
    first, last = (found.refreshed[payload] for found in two)
    chosen = carrying_rows_by_hand(minibatch(), 2)
    dtype = getattr(torch, payload)
    for name, sender in (("0 forward", first), ("0 backward", last)):
        assert torch.equal(first["old"][name], last["old"][name])
        assert torch.equal(first["staged"][name], last["staged"][name])
        assert torch.equal(first["new"][name], first["staged"][name][:HIDDEN])
        sent = [x.reshape(-1, HIDDEN)[rows] for rows, (_, x) in zip(chosen, sends_of(sender), strict=True)]
        expected = reference_refresh([x.to(dtype) for x in sent], first["old"][name])
        torch.testing.assert_close(first["new"][name].double(), expected, atol=2e-4, rtol=0)
        assert not torch.allclose(first["new"][name], first["old"][name], atol=1e-2)
        for moment, basis in (("before", "old"), ("after", "new")):
            for rows, message, x in zip(chosen, *sender[moment], strict=True):
                coordinates = x.reshape(-1, HIDDEN)[rows] @ sender[basis][name]
                close = {"atol": 1e-5, "rtol": 1e-5} if payload == "float32" else {"atol": 1e-6, "rtol": 2.0**-8}
                torch.testing.assert_close(message.float(), coordinates, **close)
    for result in (first, last):
        # a digest of 8 bytes for each direction, and nothing else
        assert result["refresh"] == (16, {"basis forward": 8, "basis backward": 8})


def sends_of(result: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, x) for name, x in result["sent"] if "send" in name]


def test_every_rank_of_a_boundary_holds_its_basis(ranks: list[Found], layout: Layout) -> None:
    results = [found.refreshed["bfloat16"] for found in ranks]
    names = {name for result in results for name in result["new"]}
    assert len(names) == 2 * (layout.pipeline - 1)
    for name in names:
        holders = [result["new"][name] for result in results if name in result["new"]]
        assert len(holders) == 2 * layout.tensor
        assert all(torch.equal(holder, holders[0]) for holder in holders)
    for rank, result in enumerate(results):
        boundaries = 2 if 0 < layout.coordinates(rank).pipeline < layout.pipeline - 1 else 1
        assert result["refresh"][0] == boundaries * 16 == sum(result["refresh"][1].values())


def nudged(sketch_Hr: torch.Tensor, amount: float) -> tuple[torch.Tensor, torch.Tensor]:
    basis_Hr, spread_r = orthonormal_with_spread(sketch_Hr)
    return basis_Hr + amount, spread_r


def disagreeing(rank: int, world: int, model: str, layout: Layout) -> list[dict[str, Any]]:
    """Two refreshes, in each of which one rank computes another Q, as other hardware might."""
    cfg = config(Path(model), layout)
    results = []
    with policy_of(cfg) as base:
        for wrong in range(world):
            policy = rewired(base, cfg, codec="lowrank", payload="float32", rank=R)
            run_pass(policy, cfg, Pass("anchor", dense=True, observe="both"), minibatch())
            policy.ledger.take()
            nudge = partial(nudged, amount=1e-6 if rank == wrong else 0.0)
            with wiretap() as wire, mock.patch.object(basis_module, "orthonormal_with_spread", nudge):
                policy.link.refresh(policy.groups.data)
            staged = staged_of(bases_of(policy))
            digests = {name: int(digest(flat)) for name, flat in staged.items()}
            on_wire = wire.bytes(forward=True) + wire.bytes(forward=False)
            ledger = ledger_bytes(policy.ledger)
            results.append({"staged": staged, "digests": digests, "wire": on_wire, "ledger": ledger})
    return results


def test_ends_that_disagree_are_put_right_by_the_lower_stage(llama: Path) -> None:
    """The digests differ by one nudge, whichever end it hits: the lower stage's Q and spread cross, fp32, counted."""
    basis_bytes = 8 + (HIDDEN + 1) * R * 4
    for first, last in zip(*run_ranks(disagreeing, 2, str(llama), Layout(pipeline=2)), strict=True):
        for name in ("0 forward", "0 backward"):
            assert torch.equal(first["staged"][name], last["staged"][name])
        assert first["digests"] == last["digests"]
        assert first["ledger"] == {"basis forward": basis_bytes, "basis backward": basis_bytes}
        assert last["ledger"] == {"basis forward": 8, "basis backward": 8}
        assert first["wire"] == 2 * basis_bytes and last["wire"] == 16
