"""Two pipeline stages joined by a slow link: step times of compressed and dense training, and what `plan` predicts.

    python tools/bench/wire.py [--rate 10mbit]

Runs as root. The stages are two network namespaces (``namespaces.py``); a policy of random weights is small enough that
its dense run spends nearly all its time on the wire. Every arm trains twice, behind the slow link and behind one that
``tc`` does not limit, with the same seeds and prompts. Prints one JSON object and exits 1 when a goal is missed.

The share of the wire is 1 - (seconds behind the fast link / seconds behind the slow one). An arm's seconds are means
over whole steps as rank 0 saw them: for the compressed arm 20 successive ones, a whole period of its anchor, so that
one uncompressed pass is in them, and the refresh of the basis that follows it; for the one whose rows are sent once, in
sampling, as many, with three refreshes of the basis that its senders own. What comes before (start, the first
validation and the dropped steps) is in no mean. The plan knows the config, the rate, the lengths
that were sampled, and two overheads, one for sampling and one for training, fitted to the arm's times behind the fast
link.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from namespaces import INTERFACE, network, why_not
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_grpo.config import Config, load_config
from megatron_grpo.plan import StepTime, parse_rate, predict

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "examples/tiny/policy"
GOALS = {"wire_share": 0.95, "speedup": 5.0, "speedup_send_once": 8.0, "plan_error": 0.15}
"""At least, but the last: at most."""

HIDDEN = 384
INNER = 32
"""Width of attention and feed-forward: a thin layer computes little for the bytes that leave it."""
LATENCY_S = 1e-4
KINDS = ("fast", "old_logprob", "anchor", "basis", "rollout")
COMMON = (
    "data.val_size=8",
    f"parallel.interface={INTERFACE}",
    *("grpo.prompts_per_step=64", "grpo.group_size=8", "grpo.minibatches=1", "train.micro_batch=128"),
    *("rollout.path=codec", "train.eval_every=1000000", "train.save_every=1000000", "logging.tensorboard=false"),
)

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Arm:
    """Overrides, steps to train, and how many of the first ones are in no mean."""

    overrides: tuple[str, ...]
    steps: int
    dropped: int


LOWRANK = ("boundary.codec=lowrank", "boundary.rank=18")
"""4.7 % of the numbers, in bfloat16."""

ARMS = {
    "dense": Arm(("boundary.codec=identity", "anchor.enabled=false"), steps=3, dropped=1),
    "compressed": Arm(
        (*LOWRANK, "boundary.basis=anchor", "anchor.enabled=true", "anchor.cadence=20"), steps=22, dropped=2
    ),
    "send_once": Arm((*LOWRANK, "boundary.send_once=reuse", "anchor.enabled=false"), steps=22, dropped=2),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the steps that count: seconds, tokens of a sequence, and bytes of a step by kind."""

    step_s: float
    rollout_s: float
    prompt_tokens: float
    response_tokens: float
    bytes: dict[str, float]
    anchors: float


def make_policy(folder: Path) -> Path:
    """A policy of two layers and random weights, with the tiny policy's tokenizer."""
    shutil.copytree(POLICY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    given = json.loads((POLICY / "config.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "head_dim": INNER // 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**given | sizes)).save_pretrained(folder)
    return folder


def train(config: Path, overrides: Sequence[str], run_dir: Path, *, rate: str | None) -> list[Row]:
    """The rows of a run with one stage on each of two hosts."""
    with network(2, rate=rate) as sites:
        hostfile = run_dir.with_suffix(".hosts")
        hostfile.write_text("".join(f"{site.name} slots=1\n" for site in sites), encoding="utf-8")
        where = ["--hostfile", str(hostfile), "--no-ssh", "--master-addr", sites[0].address, "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "megatron_grpo", "train", str(config), *overrides, *where]
        running = [
            site.popen([*command, "--node-rank", str(node)], stdout=sys.stderr, cwd=ROOT)
            for node, site in enumerate(sites)
        ]
        codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"the run in {run_dir} ended with {codes}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def means(rows: Sequence[Row], config: Config) -> Measured:
    """With one tick a step, a row is a step."""

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in rows)

    crossing = mean("boundary/bytes_dense_equivalent") / 2  # one way
    tokens = crossing / (2 * HIDDEN * config.sequences_per_step) + 1
    response = mean("rollout/response_length")
    return Measured(
        step_s=mean("time/step"),
        rollout_s=mean("time/rollout"),
        prompt_tokens=tokens - response,
        response_tokens=response,
        bytes={kind: mean(f"boundary/bytes_{kind}") for kind in KINDS},
        anchors=sum(row.get("anchor/fired", 0.0) for row in rows),
    )


def fitted(config: Config, fast: Measured, slow: Measured, bit_s: float) -> StepTime:
    """What the plan says of the slow link, with overheads that make it say the measured times of the fast one."""
    model = partial(
        predict, config, device_flop_s=flop_s(), latency_s=LATENCY_S,
        prompt_tokens=slow.prompt_tokens, response_tokens=slow.response_tokens,
    )  # fmt: skip
    perfect = partial(model, link_bit_s=1e12)
    decode = solve(lambda overhead: perfect(decode_overhead_s=overhead).rollout, fast.rollout_s)
    whole = partial(perfect, decode_overhead_s=decode)
    overhead = solve(lambda overhead: whole(overhead_s=overhead).total, fast.step_s)
    return model(link_bit_s=bit_s, overhead_s=overhead, decode_overhead_s=decode)


def solve(function: Callable[[float], float], target: float) -> float:
    """The argument, from 0 to 10 seconds, at which a growing function has that value; 0 where it is above it."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return low


def flop_s() -> float:
    """Operations a second of this core in a product of the run's size."""
    torch.set_num_threads(1)
    x_NH, w_HH = torch.randn(4096, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    start, times = time.perf_counter(), 20
    for _ in range(times):
        x_NH @ w_HH
    return 2 * x_NH.numel() * HIDDEN * times / (time.perf_counter() - start)


def measure(rate: str) -> dict[str, Any]:
    """The whole report."""
    arms: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "wire.yaml"
        policy = make_policy(folder / "policy")
        file.write_text(f"model: {{path: {policy}}}\ndeepspeed: {{config: {ROOT}/deepspeed_configs/zero1.json}}\n")
        for title, arm in ARMS.items():
            overrides = [*COMMON, *arm.overrides, f"train.steps={arm.steps}"]
            config = load_config(file, overrides)
            runs = {
                speed: means(train(file, overrides, folder / f"{title}-{speed}", rate=limit)[arm.dropped :], config)
                for speed, limit in (("slow", rate), ("fast", None))
            }
            planned = fitted(config, runs["fast"], runs["slow"], parse_rate(rate, "--rate"))
            arms[title] = describe(runs, planned)
    return arms


def describe(runs: Mapping[str, Measured], planned: StepTime) -> dict[str, Any]:
    slow, fast = runs["slow"], runs["fast"]
    return {
        "seconds_per_step": {"slow_link": slow.step_s, "fast_link": fast.step_s, "planned": planned.total},
        "planned_parts": planned.parts,
        "plan_error": planned.total / slow.step_s - 1,
        "wire_share": 1 - fast.step_s / slow.step_s,
        "measured": asdict(slow),
        "basis_share_of_bytes": slow.bytes["basis"] / sum(slow.bytes.values()),
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="10mbit", help="of the slow link, as tc writes it")
    arguments = parser.parse_args()
    refused = why_not()
    if refused is not None:
        parser.error(refused)
    load_before = os.getloadavg()[0]
    arms = measure(arguments.rate)
    seconds = {title: arm["seconds_per_step"]["slow_link"] for title, arm in arms.items()}
    found = {
        "wire_share": arms["dense"]["wire_share"],
        "speedup": seconds["dense"] / seconds["compressed"],
        "speedup_send_once": seconds["dense"] / seconds["send_once"],
        "plan_error": max(abs(arm["plan_error"]) for arm in arms.values()),
    }
    goals = {
        name: {
            "value": found[name],
            "goal": goal,
            "met": found[name] <= goal if name == "plan_error" else found[name] >= goal,
        }
        for name, goal in GOALS.items()
    }
    report = {"rate": arguments.rate, "load_before": load_before, "arms": arms, "goals": goals}
    print(json.dumps(report, indent=2))
    return 0 if all(goal["met"] for goal in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
