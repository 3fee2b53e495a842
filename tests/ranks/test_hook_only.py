"""``examples/hook_only``: a plain Megatron-core script that gains a compressed boundary."""

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/hook_only/train.py"
STEPS, EVERY = 12, 5


def script() -> ModuleType:
    spec = spec_from_file_location("hook_only_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(rank: int, world: int) -> list[dict[str, float]]:
    history: list[dict[str, float]] = script().train(STEPS, EVERY)
    return history


@pytest.mark.parametrize("world", [2, 4])
def test_the_loss_falls_and_the_bytes_are_the_formula(world: int) -> None:
    """4 micro-batches of 8 x 32 rows, both ways, over each boundary; 64 numbers a row or 8, of 2 bytes."""
    history = run_ranks(trained, world)[-1]
    losses = [row["loss"] for row in history]
    # A uniform guess over 128 ids costs ln 128 = 4.85.
    assert losses[0] == pytest.approx(4.85, abs=0.15)
    assert losses[-1] < losses[0] - 0.2
    boundaries, rows = world - 1, 2 * 4 * 8 * 32
    for step, row in enumerate(history):
        assert row["dense"] == boundaries * rows * 64 * 2
        if step % EVERY == 0:
            # both ends of a boundary send a digest of 8 bytes for each direction
            assert row["sent"] == boundaries * (rows * 64 * 2 + 2 * 2 * 8)
        else:
            assert row["sent"] == boundaries * rows * 8 * 2


def test_the_readme_shows_lines_of_the_script() -> None:
    readme = (SCRIPT.parent / "README.md").read_text()
    source = SCRIPT.read_text()
    for line in (
        "boundaries = build_boundaries(BOUNDARY, stages=stages, stage=stage, hidden=HIDDEN, seed=SEED)",
        "ledger = Ledger()",
        "link = CodecP2PCommunicator(groups.pp, model.config, boundaries=boundaries, stage=stage, ledger=ledger)",
        "p2p_communicator=link",
    ):
        assert line in readme and line in source
    assert source.count("# +") == 3 + 2 + 1


@pytest.mark.slow
def test_it_starts_under_the_deepspeed_launcher() -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [sys.executable, str(launcher), "--num_gpus", "2", str(SCRIPT), "--steps", "3", "--refresh-every", "2"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"step +\d+  loss 4\.\d+  sent [\d,]+ of [\d,]+ bytes", done.stdout)) == 3
