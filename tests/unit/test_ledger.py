"""The ledger and the metric keys made from it, with sums written out by hand."""

import torch

from megatron_grpo.parallel.link import Ledger, byte_metrics


def test_counts_add_up_and_are_taken_once() -> None:
    ledger = Ledger()
    ledger.add("pipeline", "fast", "forward", sent=10, dense=200)
    ledger.add("pipeline", "fast", "forward", sent=5, dense=100)
    assert ledger.sent("pipeline", "fast", "forward") == 15
    assert ledger.sent("pipeline", "fast", "backward") == 0
    taken = ledger.take()
    assert taken.dtype == torch.int64 and taken.sum().item() == 315
    assert ledger.take().sum().item() == 0


def test_metrics_by_hand() -> None:
    """Each entry has its own power of ten, so that any mix-up shows."""
    ledger = Ledger()
    ledger.add("pipeline", "fast", "forward", sent=1, dense=1_000)
    ledger.add("pipeline", "fast", "backward", sent=10, dense=2_000)
    ledger.add("pipeline", "anchor", "forward", sent=100, dense=10_000_000)
    ledger.add("pipeline", "anchor", "backward", sent=200, dense=10_000_000)
    ledger.add("pipeline", "basis", "forward", sent=3)
    ledger.add("data", "basis", "backward", sent=40)
    ledger.add("pipeline", "old_logprob", "forward", sent=7, dense=30_000)
    ledger.add("pipeline", "rollout", "forward", sent=11, dense=400_000)
    ledger.add("pipeline", "rollout", "backward", sent=22, dense=500_000)
    ledger.add("pipeline", "validation", "forward", sent=5_000, dense=10_000_000)
    ledger.add("tensor", "fast", "forward", sent=6_000)
    assert byte_metrics(ledger.take()) == {
        "boundary/bytes_fast": 11,
        "boundary/bytes_fast_fwd": 1,
        "boundary/bytes_fast_bwd": 10,
        "boundary/bytes_anchor": 300,
        "boundary/bytes_basis": 43,
        "boundary/bytes_old_logprob": 7,
        "boundary/bytes_rollout": 33,
        "boundary/bytes_dense_equivalent": 3_000,
        "boundary/bytes_dense_total": 933_000,
    }


def test_a_compressed_link_has_keys_of_its_own() -> None:
    """All kinds but validation; sums of the sketches over replicas are in the basis already."""
    ledger = Ledger()
    for number, kind in enumerate(("fast", "old_logprob", "anchor", "basis", "rollout", "validation")):
        ledger.add("tensor", kind, "forward", sent=10**number, dense=2 * 10**number)  # type: ignore[arg-type]  # kinds
    ledger.add("data", "fast", "backward", sent=5, dense=50)
    ledger.add("data", "anchor", "backward", sent=60)
    ledger.add("data", "basis", "backward", sent=700)
    metrics = byte_metrics(ledger.take())
    assert {key: value for key, value in metrics.items() if value} == {
        "boundary/bytes_basis": 700,
        "boundary/bytes_tensor": 11_111,
        "boundary/bytes_tensor_dense": 20_022,
        "boundary/bytes_data": 65,
        "boundary/bytes_data_dense": 50,
    }


def test_ranks_add_up() -> None:
    """A message is counted by its sender alone: the sum of two ranks' counts is the traffic of both."""
    first, second = Ledger(), Ledger()
    first.add("pipeline", "fast", "forward", sent=64, dense=128)
    second.add("pipeline", "fast", "backward", sent=32, dense=128)
    metrics = byte_metrics(first.take() + second.take())
    assert metrics["boundary/bytes_fast"] == 96
    assert metrics["boundary/bytes_dense_equivalent"] == 256
