"""What a checkpoint holds, as lines of text; weights are not read."""

from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.engine_files import STATES, EngineFiles
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.formats import ENGINE, ZERO, Found, recognise
from megatron_grpo.conversion.legacy import rank_tensors
from megatron_grpo.conversion.pickles import load_mapped
from megatron_grpo.conversion.reader import HFReader, read_hf_config
from megatron_grpo.conversion.run_state import FOLDER
from megatron_grpo.conversion.runs import read_run
from megatron_grpo.conversion.torch_dist_reader import read_entries


def describe(path: Path) -> Iterator[str]:
    """The format, the model, and name, shape and dtype of every tensor.

    Raises:
        ConfigError: it is no checkpoint that is known here, or a damaged one.
    """
    found = recognise(path)
    yield f"{path}: {found.words}"
    try:
        if found.carried is not None:
            yield str(model_shape(read_hf_config(found.carried)))
    except ConfigError as error:
        yield f"not converted here: {error}"
    if found.kind in ("run", "universal"):
        yield from _of_a_run(found)
        return
    if found.kind == "legacy":
        for name, tensor in rank_tensors(found.weights):
            yield f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        return
    if found.kind == "megatron":
        entries, _ = read_entries(found.weights)
        for name, entry in sorted(entries.items()):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            yield f"{name} {list(entry.size)} {dtype}, {len(entry.chunks)} chunks"
        return
    with HFReader(found.weights) as reader:
        for name in sorted(reader.names):
            yield f"{name} {list(reader.shape_of(name))} {reader.dtype_of(name)}"


def _of_a_run(found: Found) -> Iterator[str]:
    """Where the run stood, and what of each parameter is there."""
    facts = read_run(found.weights)
    layout = facts.topology.layout
    yield (
        f"after step {facts.content['steps']}: {facts.topology.words}, tensor {layout.tensor}, data {layout.data}, "
        f"ZeRO {facts.zero_stage}, {str(facts.dtype).removeprefix('torch.')}"
    )
    if found.kind == "universal":
        for folder in sorted((found.weights / ZERO).iterdir()):
            if folder.is_dir():
                held = load_mapped(found.weights / FOLDER / f"{folder.name}.pt")
                shape = list(load_mapped(folder / "fp32.pt")["param"].shape)
                yield f"{folder.name} {shape} {', '.join([*STATES, *held])}"
        return
    files = EngineFiles(found.weights / ENGINE, layout, facts.zero_stage, check=False)
    for stage in range(layout.pipeline):
        for tensor in range(layout.tensor):
            for name, slice_ in files.shapes(stage, tensor).items():
                yield f"stage {stage}, tensor rank {tensor}: {name} {list(slice_)} {', '.join(STATES)}"
        files.release()
