"""What a stage of the model is: parameters a tensor rank holds, and the operations that it takes.

Legend: a column is one position of every sequence of a micro-batch, a token one column of one sequence.
"""

from dataclasses import dataclass
from math import prod

from megatron_grpo.config import Config, layer_split
from megatron_grpo.config.checks import read_model
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.names import Weight, hf_shapes, slice_shape, stage_table

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StageSize:
    """One stage, as each of its tensor ranks holds it.

    Attributes:
        layers: numbers of its layers in the whole model.
        parameters: elements, vocabulary padding and copies of a tied embedding included.
        multiplied: those that every column is multiplied with (the head too, a looked-up embedding not).
        largest: elements of the largest layer.
        matrices: rows and columns of each weight matrix.
        queries, keys, ffn, vocab: widths on this rank; ``vocab`` is 0 but on the last stage.
    """

    layers: range
    parameters: int
    multiplied: int
    largest: int
    matrices: tuple[tuple[int, ...], ...]
    queries: int
    keys: int
    ffn: int
    vocab: int

    def factored(self, rank: int) -> int:
        """Elements of its gradients where every matrix that this halves is a product of two factors of ``rank``."""
        saved = [rows * columns - (rows + columns) * rank for rows, columns in self.worth_factoring(rank)]
        return self.parameters - sum(saved)

    def worth_factoring(self, rank: int) -> list[tuple[int, ...]]:
        """Matrices of which two factors are less than half, as ``ops.lowrank.worth_compressing`` has it."""
        return [(rows, columns) for rows, columns in self.matrices if 2 * (rows + columns) * rank < rows * columns]

    def flops(self, tokens: float, columns: float) -> float:
        """Operations of one forward pass: two a weight and token, and attention to ``columns`` columns.

        Attention is counted in full: the columns that a causal mask hides are multiplied, too.
        """
        return 2.0 * self.multiplied * tokens + 4.0 * len(self.layers) * self.queries * columns * tokens


def read_shape(config: Config) -> ModelShape:
    """The model's sizes, of config.json alone. Errors: ConfigError."""
    return model_shape(read_model(config))


def parameter_count(shape: ModelShape) -> int:
    """Of the whole model as its directory holds it: a tied head counts once."""
    return sum(prod(part) for part in hf_shapes(shape).values())


def stage_sizes(shape: ModelShape, *, pipeline: int, tensor: int) -> list[StageSize]:
    """Every stage, first to last; ``tensor`` must divide the model."""
    split = layer_split(shape.layers, pipeline)
    starts = [sum(split[:stage]) for stage in range(pipeline)]
    return [
        _stage(shape, range(start, start + count), first=number == 0, last=number == pipeline - 1, tensor=tensor)
        for number, (start, count) in enumerate(zip(starts, split, strict=True))
    ]


def _stage(shape: ModelShape, layers: range, *, first: bool, last: bool, tensor: int) -> StageSize:
    def elements(weight: Weight) -> int:
        return prod(slice_shape(shape, weight, tensor))

    weights = list(stage_table(shape, layers, first=first, last=last))
    by_layer = [sum(elements(w) for w in weights if w.layer == layer) for layer in layers]
    tables = [elements(w) for w in weights if w.how == "vocab"]  # the embedding first, the head last
    looked_up = tables[0] if first and not (last and shape.tied) else 0
    matrices = tuple(size for w in weights if len(size := slice_shape(shape, w, tensor)) == 2)
    return StageSize(
        layers=layers,
        parameters=sum(map(elements, weights)),
        multiplied=sum(map(prod, matrices)) - looked_up,
        largest=max(by_layer),
        matrices=matrices,
        queries=shape.heads * shape.head_dim // tensor,
        keys=shape.kv_groups * shape.head_dim // tensor,
        ffn=shape.ffn // tensor,
        vocab=tables[-1] // shape.hidden if last else 0,
    )
