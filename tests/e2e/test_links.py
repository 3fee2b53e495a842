"""The tensor and data links as a user turns them on: two tensor ranks, two replicas, from training to evaluation."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_run import ROOT, megatron_grpo, rows_of

pytestmark = pytest.mark.slow

EXAMPLE = str(ROOT / "examples/tiny/tensor_link.yaml")
BOTH = [
    *("boundary.links=[tensor, data]", "boundary.data_rank=4", "boundary.data_warmup=1", "parallel.data=2"),
    *("model.dtype=bfloat16", "train.steps=2", "train.eval_every=2", "data.val_size=8", "train.micro_batch=16"),
]


def test_a_bfloat16_run_over_both_links_trains_and_is_scored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megatron_grpo("train", EXAMPLE, *BOTH, "--run-dir", str(run))
    assert result.returncode == 0, result.stderr
    assert "tensor link" in result.stdout and "data link" in result.stdout
    rows = rows_of(run)
    assert [row["train/skipped"] for row in rows] == [0.0] * 4
    # Rank 24 of hidden 96 in the same format: a quarter, but for the calibration, which is counted in the first row,
    # and the sketches that the second step sends in its last one (seen in the next step).
    assert rows[1]["boundary/bytes_tensor"] * 4 == rows[1]["boundary/bytes_tensor_dense"]
    whole, *coded = [row["boundary/bytes_data"] / row["boundary/bytes_data_dense"] for row in rows]
    assert whole == 1.0 and max(coded) < 0.2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["links"]["data"]["dense"] == sum(row["boundary/bytes_data_dense"] for row in rows)
    scored = megatron_grpo("eval", str(run))
    assert scored.returncode == 0, scored.stderr
    score = json.loads(scored.stdout.splitlines()[-1])["val/score"]
    assert abs(score - rows[-1]["val/score"]) <= 1 / 8  # one of eight answers may round the other way
