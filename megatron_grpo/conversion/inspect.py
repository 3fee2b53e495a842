"""What a checkpoint holds, as lines of text; weights are not read."""

from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.formats import recognise
from megatron_grpo.conversion.legacy import rank_tensors
from megatron_grpo.conversion.reader import HFReader, read_hf_config
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
