"""What gathering costs while sampling at ZeRO 3: ``python tools/bench/gather.py [--hidden H] [--layers L]``.

Makes a random Llama, trains it on two replicas with ``rollout.gather=once`` and ``=layer``, drops the first step and
prints one JSON object: seconds and response tokens a second of sampling, peak memory of the ranks, and what is gathered
for a token. The run's own output goes to stderr. Exits 1 where the two did not sample and train the same, bit for bit.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/tiny/policy"
STEPS = 3
QUICK = (
    f"train.steps={STEPS}",
    "train.eval_every=1000",
    "train.save_every=1000",
    "train.micro_batch=4",
    "data.val_size=2",
    "logging.tensorboard=false",
    "parallel.pipeline=1",
    "parallel.data=2",
    "boundary.codec=identity",
    "anchor.enabled=false",
    "grpo.prompts_per_step=4",
    "grpo.group_size=4",
    "grpo.minibatches=1",
    f"deepspeed.config={ROOT / 'deepspeed_configs/zero3.json'}",
)
UNTIMED = ("time/", "rollout/tokens_per_s")

Row = dict[str, Any]


def write_model(folder: Path, hidden: int, layers: int) -> int:
    """A random Llama with the tiny policy's tokenizer; its parameters."""
    shutil.copytree(TINY, folder)
    fields = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    fields |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 64, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(model: Path, run_dir: Path, mode: str) -> tuple[list[Row], Row]:
    """Rows of every step but the first, and the summary."""
    command = [sys.executable, "-m", "megatron_grpo", "train", str(ROOT / "examples/tiny/k5.yaml"), *QUICK]
    overrides = [f"model.path={model}", f"tokenizer.path={model}", f"rollout.gather={mode}", "--run-dir", str(run_dir)]
    subprocess.run([*command, *overrides], check=True, stdout=sys.stderr, cwd=ROOT)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return rows[1:], json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def untimed(rows: list[Row]) -> list[Row]:
    """What does not come from a clock."""
    return [{key: value for key, value in row.items() if not key.startswith(UNTIMED)} for row in rows]


def measure(hidden: int, layers: int) -> dict[str, Any]:
    """The whole report."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model", hidden, layers)
        runs = {mode: run(folder / "model", folder / mode, mode) for mode in ("once", "layer")}
    arms = {
        mode: {
            "seconds_per_rollout": sum(row["time/rollout"] for row in rows) / len(rows),
            "response_tokens_per_second": sum(row["rollout/tokens_per_s"] for row in rows) / len(rows),
            "peak_memory_mb": summary["peak_memory_mb"],
        }
        for mode, (rows, summary) in runs.items()
    }
    return {
        "parameters": parameters,
        "replicas": 2,
        "whole_weights_mb": 4 * parameters / 2**20,
        "one_layer_mb": 4 * parameters / layers / 2**20,
        "gathered_mb_per_column": {"once": 0.0, "layer": 4 * parameters / 2**20},
        "arms": arms,
        "same_rows": untimed(runs["once"][0]) == untimed(runs["layer"][0]),
    }


def main() -> int:
    """Print the report; 1 where the arms differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    report = measure(arguments.hidden, arguments.layers)
    print(json.dumps(report, indent=2))
    return 0 if report["same_rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
