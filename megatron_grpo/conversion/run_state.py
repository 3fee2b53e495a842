"""What a run remembers beside weights and moments, without a topology: M, snapshots, fitted codecs, counters.

Shards of all ranks become one tensor for each parameter, in ``state/PARAMETER.pt`` (``{key: tensor}``); the rest is in
``state/run.pt``: counters, the codecs of both ends of each boundary and the replayed minibatches, by data rank.
Keys are ``m``, ``excess``, ``mean``, and for a remembered tick ``weights@TICK`` and ``fast@TICK``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.fragments import Fragment, Kind, fragments_of
from megatron_grpo.conversion.names import Weight, global_name, slice_shape, stored_name
from megatron_grpo.conversion.pickles import check_sums, load_mapped
from megatron_grpo.conversion.runs import RunFacts, Topology, stage_weights_of
from megatron_grpo.conversion.shards import slice_of, strip_vocab, unshard
from megatron_grpo.ops.signs import PackedSigns
from megatron_grpo.parallel.groups import Coordinates, Layout

FOLDER = "state"
RUN_STATE = "run.pt"
ENDS = ("left", "right")
"""Of a boundary: the stage before it and the one after it."""
Tree = dict[str, Any]


def rank_file(rank: int) -> str:
    """What a rank of ours remembers, in a run checkpoint."""
    return f"rank{rank:05d}.pt"


@dataclass(frozen=True, slots=True)
class Place:
    """A list of shards in the state of a step: ``holder[name]``."""

    key: str
    kind: Kind
    holder: Tree
    name: str


def places(steps: Tree) -> list[Place]:
    """Every list of shards in ``StepRunner.state_dict()``, snapshots as nested dicts. The one place that knows them."""
    ticks = steps["ticks"]
    found = [
        Place("m", "gradients", ticks["memory"], "m"),
        Place("excess", "gradients", ticks["merger"], "excess"),
        Place("mean", "gradients", ticks["gate"], "mean"),
    ]
    for tick, snapshot in ticks["snapshots"]["held"].items():
        found.append(Place(f"weights@{tick}", "weights", snapshot, "weights"))
        found.append(Place(f"fast@{tick}", "gradients", snapshot, "fast"))
    return found


def _filled(steps: Tree) -> list[Place]:
    return [place for place in places(steps) if place.holder.get(place.name) is not None]


def _shards_of(value: Any) -> Sequence[torch.Tensor]:
    """The shards of a place; a dict is :class:`PackedSigns`."""
    return PackedSigns.from_state(value) if isinstance(value, dict) else value


class RankStates:
    """The rank files of a run checkpoint; those that are asked for are mapped until they are released.

    Raises:
        ConfigError: a file is missing, damaged or hostile.
    """

    def __init__(self, checkpoint: Path, facts: RunFacts, shape: ModelShape) -> None:
        self._checkpoint, self._shape, self._layout = checkpoint, shape, facts.topology.layout
        self._states: dict[int, Tree] = {}
        for rank in range(facts.topology.layout.world_size):
            check_sums(checkpoint / rank_file(rank))
        self._place = {
            global_name(local): (stage, local)
            for stage in reversed(range(facts.topology.layout.pipeline))  # of a tied embedding the first stage's
            for local in stage_weights_of(shape, facts.topology.layout.pipeline, stage)
        }

    def of(self, stage: int, data: int, tensor: int) -> Tree:
        """What that rank remembers."""
        rank = self._layout.rank_of(Coordinates(stage, data, tensor))
        if rank not in self._states:
            file = self._checkpoint / rank_file(rank)
            state = load_mapped(file)
            if not isinstance(state, dict) or not {"steps", "boundaries", "fragments"} <= state.keys():
                raise ConfigError(f"{file} is not what a rank remembers; use another checkpoint")
            self._states[rank] = state
        return self._states[rank]

    def release(self) -> None:
        """Unmap the files."""
        self._states.clear()

    def tensors(self, weight: Weight) -> dict[str, torch.Tensor]:
        """Everything that is sharded like ``weight``, whole, in Megatron's shape, without padding of the vocabulary."""
        stage, local = self._place[weight.megatron]
        keys = [(place.key, place.kind) for place in _filled(self.of(stage, 0, 0)["steps"])]
        return {key: self._whole(stage, local, key, kind) for key, kind in keys}

    def _whole(self, stage: int, local: Weight, key: str, kind: Kind) -> torch.Tensor:
        slices = [self._slice(stage, tensor, local, key, kind) for tensor in range(self._layout.tensor)]
        whole = unshard(slices, local.how)
        return strip_vocab(whole, self._shape.vocab) if local.how == "vocab" else whole

    def _slice(self, stage: int, tensor: int, local: Weight, key: str, kind: Kind) -> torch.Tensor:
        """A tensor rank's slice out of the shards of its data ranks; replicas that repeat it are not read."""
        shape = slice_shape(self._shape, local, self._layout.tensor)
        flat: torch.Tensor | None = None
        covered = 0
        for data in range(self._layout.data):
            state = self.of(stage, data, tensor)
            place = next(place for place in _filled(state["steps"]) if place.key == key)
            shards = _shards_of(place.holder[place.name])
            for number, fragment in enumerate(fragments_of(state["fragments"], kind)):
                if fragment.name == local.megatron:
                    shard = shards[number]
                    flat = shard.new_zeros(torch.Size(shape).numel()) if flat is None else flat
                    fragment.put(shard, flat)
                    covered += fragment.numel
            if flat is not None and covered == flat.numel():
                return flat.view(shape)
        raise ConfigError(f"{self._checkpoint}: the ranks do not hold all of {key} of {global_name(local)}; restore it")


def run_state(states: RankStates, facts: RunFacts) -> Tree:
    """``state/run.pt``: everything that is not sharded, and for each key that is, whether it is packed signs."""
    last, layout = facts.topology.layout.pipeline - 1, facts.topology.layout
    steps = _copied(states.of(last, 0, 0)["steps"])
    packed = {}
    for place in _filled(steps):
        packed[place.key] = isinstance(place.holder[place.name], dict)
        place.holder[place.name] = None
    batches = {}
    for tick, snapshot in steps["ticks"]["snapshots"]["held"].items():
        del snapshot["batch"]
        ranks = [states.of(last, data, 0) for data in range(layout.data)]
        batches[tick] = [rank["steps"]["ticks"]["snapshots"]["held"][tick]["batch"] for rank in ranks]
    return {
        "steps": steps,
        "packed": packed,
        "batches": batches,
        "boundaries": _boundaries(states, facts.topology),
        "tensor_link": _tensor_link(states, layout),
        "data_link": [states.of(at.pipeline, at.data, at.tensor).get("data_link") for at in _places(layout)],
    }


def _boundaries(states: RankStates, topology: Topology) -> dict[str, dict[str, list[Tree]]]:
    """The codecs of each boundary: those of its two ends, by data rank. Tensor ranks have the same."""

    def codecs(index: int, end: int) -> list[Tree]:
        stage = index + end if topology.spread else 0
        return [states.of(stage, data, 0)["boundaries"][str(index)] for data in range(topology.layout.data)]

    return {
        str(index): {name: codecs(index, end) for end, name in enumerate(ENDS)} for index in range(topology.stages - 1)
    }


def _tensor_link(states: RankStates, layout: Layout) -> Tree:
    """The bases of the tensor link by layer and place, of all stages; empty where it is not compressed."""
    bases: Tree = {}
    for stage in range(layout.pipeline):
        bases |= states.of(stage, 0, 0)["boundaries"].get("tensor", {})
    return bases


def _places(layout: Layout) -> list[Coordinates]:
    return [layout.coordinates(rank) for rank in range(layout.world_size)]


def _copied(tree: Tree) -> Tree:
    """The same values in dicts of their own."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


class UniversalState:
    """What :func:`run_state` and :meth:`RankStates.tensors` gave, for ranks of another topology.

    Args:
        folder: of a universal checkpoint.
        written: the topology that its ranks had.

    Raises:
        ConfigError: a file is missing, damaged or hostile.
    """

    def __init__(self, folder: Path, written: Topology) -> None:
        self._folder, self._written = folder / FOLDER, written
        check_sums(self._folder / RUN_STATE)
        self._run: Tree = load_mapped(self._folder / RUN_STATE)

    def dropped(self, wanted: Topology) -> list[str]:
        """What a run of another topology starts without, each in a sentence.

        Raises:
            ConfigError: its data ranks cannot share what is to be replayed.
        """
        for minibatch in self._run["batches"].values():
            dealt(minibatch, wanted.layout.data, 0)
        sentences = []
        ends = {index: ends[ENDS[0]][0] for index, ends in self._run["boundaries"].items()}
        cuts = ", ".join(index for index, codecs in ends.items() if codecs["learners"] or any(codecs["codecs"]))
        if cuts and not self._same_boundaries(wanted):
            sentences.append(
                f"dropped: the fitted codecs (Q) of boundary {cuts}, which belong to {self._written.words}; this run "
                f"has {wanted.words}" + ("" if wanted.stages == 1 else " and fits its own anew")
            )
        if any(self._data_links) and self.data_link(Coordinates(0, 0, 0), wanted) is None:
            sentences.append(
                "dropped: the warm factors and remainders of compressed gradients, which belong to the ranks of "
                f"{self._written.words}; this run starts its own anew"
            )
        return sentences

    def _same_boundaries(self, wanted: Topology) -> bool:
        return (wanted.stages, wanted.spread) == (self._written.stages, self._written.spread)

    @property
    def _data_links(self) -> list[Tree | None]:
        """``DataLink.state_dict()`` by rank; ``None`` where it was not compressed."""
        links: list[Tree | None] = self._run.get("data_link", [])
        return links

    def data_link(self, at: Coordinates, wanted: Topology) -> Tree | None:
        """``DataLink.state_dict()`` of a rank; ``None`` where the ranks are others, or had none."""
        same = wanted.layout == self._written.layout and self._data_links
        return self._data_links[wanted.layout.rank_of(at)] if same else None

    def boundaries(self, at: Coordinates, wanted: Topology) -> Tree | None:
        """``Boundaries.state_dict()`` of a rank; ``None`` where the boundaries are others."""
        if not self._same_boundaries(wanted):
            return None
        state = {}
        for index, ends in self._run["boundaries"].items():
            end = at.pipeline - int(index) if wanted.spread else 0
            if end in (0, 1):
                ranks = ends[ENDS[end]]
                same = wanted.layout.data == len(ranks)
                state[index] = ranks[at.data] if same else _with_mean_remainders(ranks)
        return state | {"tensor": self.tensor_link} if self.tensor_link else state

    @property
    def tensor_link(self) -> Tree:
        """``TensorBases.state_dict()`` of every layer, the same at any topology; empty where there are none."""
        bases: Tree = self._run.get("tensor_link", {})
        return bases

    def steps(
        self,
        at: Coordinates,
        wanted: Topology,
        shape: ModelShape,
        fragments: Mapping[Kind, Sequence[Fragment]],
    ) -> Tree:
        """``StepRunner.state_dict()`` of a rank with shards at ``fragments``, snapshots as nested dicts."""
        steps = _copied(self._run["steps"])
        for tick, snapshot in steps["ticks"]["snapshots"]["held"].items():
            snapshot["batch"] = dealt(self._run["batches"][tick], wanted.layout.data, at.data)
        wanted_places = [place for place in places(steps) if place.key in self._run["packed"]]
        shards = self._cut(wanted_places, at, wanted.layout, shape, fragments)
        for place in wanted_places:
            mine = shards[place.key]
            place.holder[place.name] = PackedSigns(mine).state_dict() if self._run["packed"][place.key] else mine
        return steps

    def _cut(
        self,
        wanted: Sequence[Place],
        at: Coordinates,
        layout: Layout,
        shape: ModelShape,
        fragments: Mapping[Kind, Sequence[Fragment]],
    ) -> dict[str, list[torch.Tensor]]:
        """The rank's shards of every key; a parameter's file is read once."""
        shards = {place.key: [torch.zeros(x.shape) for x in fragments[place.kind]] for place in wanted}
        if not wanted:
            return shards
        for local in stage_weights_of(shape, layout.pipeline, at.pipeline):
            file = self._folder / f"{stored_name(shape, local)}.pt"
            check_sums(file)
            tensors = load_mapped(file)
            for place in wanted:
                mine = slice_of(tensors[place.key], local, shape, at.tensor, layout.tensor)
                for number, fragment in enumerate(fragments[place.kind]):
                    if fragment.name == local.megatron:
                        shards[place.key][number] = fragment.cut(mine)
        return shards


def dealt(minibatch: Sequence[Tree], ranks: int, rank: int) -> Tree:
    """What data rank ``rank`` of ``ranks`` replays of a minibatch: as many of its sequences as every other.

    Args:
        minibatch: ``training.loss.Replay`` of every data rank that there was, as nested dicts. Padding grows to the
            widest; denominators are the minibatch's already.

    Raises:
        ConfigError: ``ranks`` does not divide the sequences.
    """
    if ranks == len(minibatch):
        return minibatch[rank]
    prompt = max(replay["batch"]["prompt_columns"] for replay in minibatch)
    response = max(replay["batch"]["tokens_BS"].shape[1] - replay["batch"]["prompt_columns"] for replay in minibatch)
    widths = {
        "tokens_BS": (prompt, response),
        **dict.fromkeys(("sampler_logp_BR", "old_logp_BR", "reference_logp_BR"), (0, response)),
    }

    def mine(name: str, parts: Sequence[Any], left: Sequence[int]) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        if name in widths:
            before = [widths[name][0] and prompt - columns for columns in left]
            whole = sum(widths[name])
            parts = [pad(x, (n, whole - n - x.shape[1])) for x, n in zip(parts, before, strict=True)]
        share, left_over = divmod(sum(len(part) for part in parts), ranks)
        if left_over:
            raise ConfigError(
                f"parallel.data={ranks}: the anchor still has to replay a minibatch of {share * ranks + left_over} "
                f"sequences, which so many ranks cannot share evenly; use a divisor of it"
            )
        return torch.cat(list(parts))[rank * share : (rank + 1) * share].clone()

    left = [replay["batch"]["prompt_columns"] for replay in minibatch]
    batches = [replay["batch"] for replay in minibatch]
    batch = {name: mine(name, [x[name] for x in batches], left) for name in batches[0]}
    rest = {name: mine(name, [x[name] for x in minibatch], left) for name in minibatch[0] if name != "batch"}
    return {**rest, "batch": {**batch, "prompt_columns": prompt}}


def _with_mean_remainders(ranks: Sequence[Tree]) -> Tree:
    """The codecs of one end for other data ranks; what error feedback left over is the mean of theirs, place by place.

    A gradient is the mean over data ranks, so that every remainder still enters once.
    """
    codecs = [dict(codec) for codec in ranks[0]["codecs"]]
    for number, codec in enumerate(codecs):
        lost = [rank["codecs"][number]["lost"] for rank in ranks if codec.get("lost") is not None]
        if lost:
            columns, rows = (max(x.shape[axis] for x in lost) for axis in (0, 1))
            grown = [pad(x, (0, 0, 0, rows - x.shape[1], 0, columns - x.shape[0])) for x in lost]
            codec["lost"] = torch.stack(grown).mean(0)
    return {**ranks[0], "codecs": codecs}
