"""DeepSpeed's files of many ranks, written by hand in its layout and put together again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.engine_files import STATES, EngineFiles
from megatron_grpo.parallel.groups import Layout

SHAPES = {"a.weight": torch.Size([7, 5]), "b.weight": torch.Size([3]), "c.weight": torch.Size([11, 4])}
Tensors = dict[tuple[str, str], torch.Tensor]


def wanted(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {(name, state): torch.randn(SHAPES[name], generator=generator) for name in SHAPES for state in STATES}


def model_file(folder: Path, name: str, groups: list[list[str]]) -> None:
    shapes = [{parameter: SHAPES[parameter] for parameter in group} for group in groups]
    torch.save({"param_shapes": shapes, "ds_version": "0.19.8"}, folder / name)


def write_zero_1(folder: Path, tensors: Tensors, ranks: int) -> None:
    """All parameters flattened one after another, padded, and cut into equal ranges."""
    flat = {state: torch.cat([tensors[name, state].flatten() for name in SHAPES]) for state in STATES}
    count = len(flat["fp32"])
    share = -(-count // ranks)
    flat = {state: torch.nn.functional.pad(x, (0, share * ranks - count)) for state, x in flat.items()}
    ends, at = {}, 0
    for name, shape in SHAPES.items():
        ends[name] = (at, at + shape.numel())
        at += shape.numel()
    for rank in range(ranks):
        low, high = rank * share, (rank + 1) * share
        held = {
            name: fragment_address(min(high, end) - max(low, start), max(low, start) - low)
            for name, (start, end) in ends.items()
            if start < high and end > low
        }
        adam = {"step": torch.tensor(7.0), **{state: flat[state][low:high].clone() for state in STATES[1:]}}
        optimizer = {
            "base_optimizer_state": {"state": {0: adam}, "param_groups": [{"lr": 1.0}]},
            "single_partition_of_fp32_groups": [flat["fp32"][low:high].clone()],
            "param_slice_mappings": [held],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model_file(folder, "mp_rank_00_model_states.pt", [list(SHAPES)])


def write_zero_3(folder: Path, tensors: Tensors, ranks: int, groups: list[list[str]]) -> None:
    """Every parameter padded and cut into equal shares; the shares of a sub-group lie one after another."""
    for rank in range(ranks):

        def share(name: str, state: str, rank: int = rank) -> torch.Tensor:
            flat = tensors[name, state].flatten()
            size = -(-len(flat) // ranks)
            return torch.nn.functional.pad(flat, (0, size * ranks - len(flat)))[rank * size : (rank + 1) * size]

        def flat(group: list[str], state: str) -> torch.Tensor:
            return torch.cat([share(name, state) for name in group])

        optimizer = {
            "optimizer_state_dict": {
                "state": {
                    number: {"step": torch.tensor(7.0), **{state: flat(group, state) for state in STATES[1:]}}
                    for number, group in enumerate(groups)
                },
                "param_groups": [{"lr": 1.0}],
            },
            "fp32_flat_groups": [flat(group, "fp32") for group in groups],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model_file(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", groups)


def assert_read(folder: Path, ranks: int, zero: int, tensors: Tensors) -> None:
    files = EngineFiles(folder, Layout(data=ranks), zero)
    assert files.step(0) == 7.0 and files.shapes(0, 0) == SHAPES
    for (name, state), tensor in tensors.items():
        assert torch.equal(files.slice(0, 0, name, state), tensor), (name, state)


@pytest.mark.parametrize("ranks", [1, 2, 3, 128])
def test_ranges_of_many_ranks_are_read_in_the_order_of_numbers(ranks: int, tmp_path: Path) -> None:
    """Rank 100 comes after rank 99, not after rank 10; with 128 ranks on 82 numbers the last hold padding alone."""
    write_zero_1(tmp_path, wanted(), ranks)
    assert_read(tmp_path, ranks, 1, wanted())


@pytest.mark.parametrize(
    "groups", [[list(SHAPES)], [[name] for name in SHAPES], [["a.weight"], ["b.weight", "c.weight"]]]
)
@pytest.mark.parametrize("ranks", [1, 2, 4, 128])
def test_sub_groups_of_zero_3_are_put_together_exactly(ranks: int, groups: list[list[str]], tmp_path: Path) -> None:
    """E12: several sub-groups, and shares that end in padding."""
    write_zero_3(tmp_path, wanted(), ranks, groups)
    assert_read(tmp_path, ranks, 3, wanted())


class Hostile:
    def __reduce__(self) -> Any:
        return (eval, ("1/0",))


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-400])


def flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"),
        (cut_short, "is damaged"),
        (flipped, "is damaged"),
        (lambda file: rewritten(file, lambda x: x.update(more=Hostile())), "asks to run builtins.eval"),
        (lambda file: rewritten(file, lambda x: x.pop("optimizer_state_dict")), "are not those of ZeRO 1"),
        (
            lambda file: rewritten(
                file, lambda x: x["optimizer_state_dict"]["param_slice_mappings"][0].pop("c.weight")
            ),
            "hold 3 numbers of c.weight .* has 44",
        ),
    ],
)
def test_damaged_files_are_named(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write_zero_1(tmp_path, wanted(), 2)
    damage(tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(ConfigError, match=message):
        EngineFiles(tmp_path, Layout(data=2), 1).slice(0, 0, "c.weight", "fp32")
