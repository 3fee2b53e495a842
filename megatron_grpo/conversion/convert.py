"""From one checkpoint format to another, weight by weight: memory holds a layer, never the model."""

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_grpo.config import ConfigError, layer_split
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.folders import fresh_directory
from megatron_grpo.conversion.formats import CARRIED, RELEASE, RUN_FILE, TRACKER_FILE, ZERO, Found, Kind, recognise
from megatron_grpo.conversion.legacy import LegacyReader
from megatron_grpo.conversion.names import Weight, check_tensor_size, model_table, part_shapes
from megatron_grpo.conversion.reader import hf_source, read_hf_config
from megatron_grpo.conversion.run_state import FOLDER, UniversalState
from megatron_grpo.conversion.runs import RunReader, Topology, read_run
from megatron_grpo.conversion.sources import Checkpoint, Source, all_parts, examine
from megatron_grpo.conversion.torch_dist import DistWriter
from megatron_grpo.conversion.torch_dist_reader import DistReader
from megatron_grpo.conversion.universal import OPTIMIZER_STATE, UniversalReader, universal_bytes, write_universal
from megatron_grpo.conversion.writer import HF_FILES, HFWriter, carry_files
from megatron_grpo.parallel.groups import Layout

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MARKERS: dict[Kind, str] = {
    "hf": "config.json",
    "megatron": TRACKER_FILE,
    "deepspeed-universal": f"{ZERO}/{OPTIMIZER_STATE}",
}
MANIFEST = "checkpoint.json"
KNOWN: dict[Kind, tuple[str, ...]] = {
    "hf": HF_FILES,
    "megatron": (TRACKER_FILE, RELEASE, CARRIED),
    "deepspeed-universal": (ZERO, FOLDER, CARRIED, RUN_FILE, MANIFEST),
}
"""What a directory of ours holds; one with anything else in it, as a training run's, is never replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a conversion shall make.

    Attributes:
        tensor: ranks that tensor parallelism cuts for, and the vocabulary is padded for; not for Hugging Face. A
            universal checkpoint is the same for every topology; one that is given is compared with the model and with
            what the source remembers.
        pipeline: stages; not for Hugging Face. Uneven ones are as the trainer makes them.
        data: data-parallel ranks of the run to come; universal only.
        dtype: of all weights; ``None`` keeps each as it is. Not for universal, whose masters are float32.
        config_dir: config.json and tokenizer come from here, if not from the source.
    """

    to: Kind
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    dtype: DtypeName | None = None
    config_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion whose every precondition is checked.

    Attributes:
        dtypes: what every weight is written in.
    """

    source: Source
    shape: ModelShape
    carried: Path
    wish: Wish
    dtypes: dict[str, torch.dtype]

    def table(self) -> Iterator[Weight]:
        return model_table(self.shape)

    def bytes_of(self, weight: Weight) -> int:
        numbers = sum(math.prod(part) for part in part_shapes(self.shape, weight))
        return numbers * self.dtypes[weight.megatron].itemsize

    def weights(self, done: Callable[[int], None]) -> Iterator[tuple[Weight, list[torch.Tensor]]]:
        """Every weight with its Hugging Face tensors; ``done`` hears of each one's bytes once it is used."""
        for weight, parts in all_parts(self.source, self.shape):
            yield weight, [self._ready(part, weight) for part in parts]
            done(self.bytes_of(weight))

    def _ready(self, part: torch.Tensor, weight: Weight) -> torch.Tensor:
        ready = part.to(self.dtypes[weight.megatron])
        if not all(bool(end.isfinite()) for end in torch.aminmax(ready)):
            was = "" if all(bool(end.isfinite()) for end in torch.aminmax(part)) else " already in the source"
            raise ConfigError(
                f"{' '.join(weight.hf)}: not every number is finite{was} ({part.dtype} to {ready.dtype}); "
                + ("fetch the source again" if was else "use a dtype with the range of the source")
            )
        return ready


def convert(
    source: Path, target: Path, wish: Wish, *, note: Callable[[str], None], progress: Callable[[int, int], None]
) -> None:
    """Write the model of ``source`` to ``target``, whole or not at all.

    Args:
        note: hears what the source is.
        progress: hears bytes written so far, and in all.

    Raises:
        ConfigError: the source is damaged, hostile, of another kind or family; the wish does not fit the model; or the
            target cannot be written. ``target`` stays as it was.
    """
    found = recognise(source)
    checkpoint = examine(source, found, found.carried or wish.config_dir)
    if found.carried and wish.config_dir and model_shape(read_hf_config(wish.config_dir)) != checkpoint.shape:
        raise ConfigError(
            f"--config-from={wish.config_dir} describes another model than {found.carried}, which {source} itself "
            "carries; leave it out"
        )
    carried, shape = checkpoint.config_dir, checkpoint.shape
    note(f"{source}: {checkpoint.words}")
    check_wish(wish, shape)
    if wish.to == "deepspeed-universal":
        _convert_run(checkpoint, target, wish, note, progress)
        return
    with opened(found, shape) as reader:
        table = list(model_table(shape))
        forced = DTYPES[wish.dtype] if wish.dtype else None
        dtypes = {weight.megatron: forced or reader.weight_dtype(weight) for weight in table}
        job = Job(reader, shape, carried, wish, dtypes)
        total = sum(job.bytes_of(weight) for weight in table)
        with _written(target, (source, carried), wish.to, total) as folder:
            _write(job, folder, _counter(total, progress))


@contextmanager
def _written(target: Path, sources: Sequence[Path], to: Kind, total: int) -> Iterator[Path]:
    """A folder to write ``total`` bytes into, which becomes ``target``."""
    try:
        with fresh_directory(target, sources, marker=MARKERS[to], known=KNOWN[to]) as folder:
            _check_room(folder, total)
            yield folder
    except OSError as error:
        raise ConfigError(f"{target} was not written ({error.strerror or error}); it is as it was") from error


def _convert_run(
    checkpoint: Checkpoint, target: Path, wish: Wish, note: Callable[[str], None], progress: Callable[[int, int], None]
) -> None:
    """A run's checkpoint without its topology; what a topology that was asked for cannot hold is told."""
    source, shape = checkpoint.found.weights, checkpoint.shape
    if checkpoint.found.kind == "universal":
        raise ConfigError(f"{source} is a universal checkpoint already; resume from it with train --resume {source}")
    if checkpoint.found.kind != "run":
        raise ConfigError(
            f"{source} holds weights alone, without the state of an optimizer; a run starts from them with model.path "
            "(for Megatron's, after --to hf)"
        )
    facts = read_run(source)
    if not (source / MANIFEST).is_file():
        raise ConfigError(f"{source / MANIFEST} is missing, so the checkpoint is not complete; use another one")
    total = sum(universal_bytes(shape).values())
    remembered = sum(file.stat().st_size for file in source.glob("rank*.pt"))
    with _written(target, (source, checkpoint.config_dir), wish.to, total + remembered) as folder:
        write_universal(source, facts, shape, folder, _counter(total, progress))
        (folder / CARRIED).mkdir()
        carry_files(checkpoint.config_dir, folder / CARRIED, dtype=facts.dtype)
        for name in (RUN_FILE, MANIFEST):
            shutil.copyfile(source / name, folder / name)
        for sentence in _dropped(folder, facts.topology, wish):
            note(sentence)


def _dropped(folder: Path, written: Topology, wish: Wish) -> list[str]:
    """What a run in the topology of ``wish`` will start without; nothing where it names none."""
    if (wish.tensor, wish.pipeline, wish.data) == (None, None, None):
        return []
    stages = wish.pipeline or written.stages
    layout = Layout(
        stages if written.spread else 1, wish.data or written.layout.data, wish.tensor or written.layout.tensor
    )
    return UniversalState(folder, written).dropped(Topology(layout, stages))


def check_wish(wish: Wish, shape: ModelShape) -> None:
    """Compare the layout with the model.

    Raises:
        ConfigError: it does not divide the model, or has no meaning for the format.
    """
    useless: dict[Kind, tuple[tuple[str, object, str], ...]] = {
        "hf": (
            ("--tensor", wish.tensor, "whose tensors are whole"),
            ("--pipeline", wish.pipeline, "whose tensors are whole"),
            ("--data", wish.data, "whose tensors are whole"),
        ),
        "megatron": (("--data", wish.data, "which every data rank reads alike"),),
        "deepspeed-universal": (("--dtype", wish.dtype, "whose master weights stay float32"),),
    }
    for option, value, why in useless[wish.to]:
        if value is not None:
            raise ConfigError(f"{option}={value} has no meaning with --to {wish.to}, {why}; leave it out")
    check_tensor_size(shape, wish.tensor or 1, "--tensor")
    if (wish.pipeline or 1) > shape.layers:
        raise ConfigError(f"--pipeline={wish.pipeline} exceeds the model's {shape.layers} layers; use at most that")


@contextmanager
def opened(found: Found, shape: ModelShape) -> Iterator[Source]:
    """The weights of a checkpoint for the length of the block.

    Raises:
        ConfigError: it is damaged or hostile, or does not hold exactly the model of ``shape``.
    """
    if found.kind == "hf":
        with hf_source(found.weights, shape) as reader:
            yield reader
    elif found.kind == "megatron":
        yield DistReader(found.weights, shape)
    elif found.kind == "legacy":
        yield LegacyReader(found.weights, shape)
    else:
        reader_of = RunReader if found.kind == "run" else UniversalReader
        yield reader_of(found.weights, read_run(found.weights), shape)


def _check_room(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ConfigError(
            f"{folder.parent} has {decimal(free)} free and the checkpoint takes {decimal(total)}; make room"
        )


def _counter(total: int, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return count


def _write(job: Job, folder: Path, done: Callable[[int], None]) -> None:
    dtype = next(iter(job.dtypes.values()))
    if job.wish.to == "hf":
        plan = {
            name: (part, job.dtypes[weight.megatron])
            for weight in job.table()
            for name, part in zip(weight.hf, part_shapes(job.shape, weight), strict=True)
        }
        with HFWriter(folder, plan) as writer:
            for weight, parts in job.weights(done):
                for name, part in zip(weight.hf, parts, strict=True):
                    writer.write(name, part)
        carry_files(job.carried, folder, dtype=dtype)
        return
    (folder / RELEASE).mkdir()
    split = layer_split(job.shape.layers, job.wish.pipeline or 1)
    with DistWriter(folder / RELEASE, job.shape, tensor=job.wish.tensor or 1, split=split) as dist_writer:
        for weight, parts in job.weights(done):
            dist_writer.write(weight, parts)
    (folder / CARRIED).mkdir()
    carry_files(job.carried, folder / CARRIED, dtype=dtype)
    (folder / TRACKER_FILE).write_text(RELEASE, encoding="utf-8")


def convert_on_screen(source: Path, target: Path, wish: Wish) -> None:
    """``convert`` with what it reads, and a bar of bytes and their rate, on stderr."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task(f"to {wish.to}", total=None)

    def progress(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        convert(source, target, wish, note=lambda text: print(text, file=sys.stderr), progress=progress)
    finally:
        bar.stop()
