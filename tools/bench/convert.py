"""What converting costs: ``python tools/bench/convert.py [--layers N] [--repeats N] [--folder DIR]``.

Writes a random bfloat16 model in the shape of a Llama (about 1 GB, its largest tensor 131 MB), converts it in every
direction, each time in a fresh process, and prints one JSON object on stdout. Exits 1 when a goal is missed: at least
half the speed of ``cp -r`` over the same bytes, and a peak below 1.3 times the largest tensor plus 300 MB, the
interpreter and torch included.

Every conversion takes turns with a copy of its source on the same disk; medians count. Sources are in the page cache,
for both; results are not flushed to the disk, by neither, and are deleted after each run. A conversion's time is that
of ``convert``, without the start of the interpreter.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.names import hf_shapes
from megatron_grpo.conversion.writer import HFWriter

ROOT = Path(__file__).parents[2]
MB = 1e6
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LEAST_SHARE_OF_CP = 0.5
MOST_LARGEST, MOST_BASE_MB = 1.3, 300.0
CHILD = r"""
import json, re, sys, time
from pathlib import Path
from megatron_grpo.conversion.convert import Wish, convert

source, target, wish = Path(sys.argv[1]), Path(sys.argv[2]), Wish(**json.loads(sys.argv[3]))
start, cpu_start = time.perf_counter(), time.process_time()
convert(source, target, wish, note=lambda text: None, progress=lambda done, total: None)
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
peak_kib = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": int(peak_kib) * 1024 / 1e6}))
"""


@dataclass(frozen=True, slots=True)
class Way:
    """One direction: ``source`` is the name of an earlier way's result, or ``hf`` for the model itself."""

    name: str
    source: str
    wish: Mapping[str, Any]


WAYS = (
    Way("hf to megatron 1x1", "hf", {"to": "megatron"}),
    Way("hf to megatron 2x2", "hf", {"to": "megatron", "tensor": 2, "pipeline": 2}),
    Way("megatron 1x1 to hf", "hf to megatron 1x1", {"to": "hf"}),
    Way("megatron 2x2 to hf", "hf to megatron 2x2", {"to": "hf"}),
    Way("megatron 2x2 to 4x1", "hf to megatron 2x2", {"to": "megatron", "tensor": 4, "pipeline": 1}),
)


def write_model(folder: Path, layers: int) -> dict[str, int]:
    """A random model in Hugging Face layout; the bytes of every tensor."""
    folder.mkdir()
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = {name: (shape, torch.bfloat16) for name, shape in hf_shapes(model_shape(config)).items()}
    generator = torch.Generator().manual_seed(0)
    sizes = {}
    with HFWriter(folder, plan) as writer:
        for name, (shape, dtype) in plan.items():
            tensor = torch.empty(shape, dtype=dtype).normal_(std=0.02, generator=generator)
            writer.write(name, tensor)
            sizes[name] = tensor.nbytes
    return sizes


def convert_once(source: Path, target: Path, wish: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of one conversion, by the clock and of processors, and the most memory that its process took."""
    command = [sys.executable, "-c", CHILD, str(source), str(target), json.dumps(wish)]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def copy_once(source: Path, target: Path) -> dict[str, float]:
    """Seconds of one ``cp -r``, by the clock and of processors."""
    start, before = time.perf_counter(), os.times()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    after = os.times()
    cpu_seconds = sum(after[2:4]) - sum(before[2:4])
    return {"cp_seconds": time.perf_counter() - start, "cp_cpu_seconds": cpu_seconds}


def measure_way(source: Path, target: Path, wish: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """Conversions and copies in turn; the last conversion stays at ``target``."""
    runs = []
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        copied = copy_once(source, target)
        shutil.rmtree(target)
        runs.append(copied | convert_once(source, target, wish))
    return {key: [run[key] for run in runs] for key in runs[0]}


def judged(size: int, runs: Mapping[str, Sequence[float]], most_mb: float) -> dict[str, Any]:
    """Medians of a way's runs, its largest peak, and whether both goals are met."""
    middle = {key: statistics.median(values) for key, values in runs.items()}
    share, peak = middle["cp_seconds"] / middle["seconds"], max(runs["peak_mb"])
    return {
        "mb_per_s": size / MB / middle["seconds"],
        "cp_mb_per_s": size / MB / middle["cp_seconds"],
        "cpu_seconds_per_gb": middle["cpu_seconds"] / size * 1e9,
        "cp_cpu_seconds_per_gb": middle["cp_cpu_seconds"] / size * 1e9,
        "share_of_cp": share,
        "fast_enough": share >= LEAST_SHARE_OF_CP,
        "peak_mb": peak,
        "small_enough": peak <= most_mb,
        "runs": runs,
    }


def measure(folder: Path, layers: int, repeats: int) -> dict[str, Any]:
    """The whole report."""
    sizes = write_model(folder / "hf", layers)
    size, largest = sum(sizes.values()), max(sizes.values())
    most_mb = MOST_LARGEST * largest / MB + MOST_BASE_MB
    ways = {}
    for way in WAYS:
        runs = measure_way(folder / way.source, folder / way.name, way.wish, repeats)
        ways[way.name] = judged(size, runs, most_mb)
        print(f"{way.name}: {ways[way.name]['mb_per_s']:.0f} MB/s", file=sys.stderr)
    return {
        "model_mb": size / MB,
        "largest_tensor_mb": largest / MB,
        "goals": {"share_of_cp": LEAST_SHARE_OF_CP, "peak_mb": most_mb},
        "met": all(way["fast_enough"] and way["small_enough"] for way in ways.values()),
        "ways": ways,
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=9, help="of the model; 88 MB each, beside 262 MB")
    parser.add_argument("--repeats", type=int, default=5, help="runs of every way, and copies")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder is made in it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = measure(Path(folder), arguments.layers, arguments.repeats)
    print(json.dumps(report, indent=2))
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
