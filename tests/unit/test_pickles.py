"""Tensors as torch saves them, written and read without copying, and the thread that writes behind."""

import io
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.behind import Behind
from megatron_grpo.conversion.pickles import STORAGES, FileSlice, load_tensor, saved_tensor


def torch_file(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def part_of(content: bytes) -> FileSlice:
    """The content in the middle of a file."""
    file: BinaryIO = io.BytesIO(b"before" + content + b"behind")
    return FileSlice(file, len(b"before"), len(content))


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("shape", [(7,), (1, 3, 5), (2, 300)], ids=str)
def test_what_is_saved_is_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(*shape, 2).to(dtype)[..., 1]
    content = b"".join(saved_tensor(tensor))
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert torch.equal(loaded, tensor) and loaded.dtype == dtype and loaded.is_contiguous()
    with zipfile.ZipFile(io.BytesIO(content)) as ours, zipfile.ZipFile(io.BytesIO(torch_file(loaded))) as theirs:
        assert ours.testzip() is None
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name), name
    room = torch.empty(shape, dtype=dtype)
    assert load_tensor(part_of(content), "x", room) is room and torch.equal(room, tensor)


def test_a_plain_tensor_of_torch_is_read_in_place_and_others_beside() -> None:
    whole = torch.randn(4, 6)
    room = torch.empty(4, 6)
    assert load_tensor(part_of(torch_file(whole)), "x", room) is room and torch.equal(room, whole)
    room.zero_()
    for other in (whole.T, whole[:, 1:3], whole[2:], whole.double(), torch.nn.Parameter(whole)):
        found = load_tensor(part_of(torch_file(other)), "x", room)
        assert found is not room and torch.equal(found, other) and found.dtype == other.dtype
    assert not room.any()


@pytest.mark.parametrize("value", [[torch.ones(2)], {"a": 1}, None, torch.sparse_coo_tensor([[0]], [1.0], (2,))])
def test_what_is_no_tensor_is_named(value: object) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    with pytest.raises(ConfigError, match=r"the place is damaged or holds more than a tensor \(.*do not use it"):
        load_tensor(part_of(file.getvalue()), "the place", torch.empty(2))


@pytest.mark.parametrize("plain", [True, False])
def test_no_flipped_bit_passes_unseen(plain: bool) -> None:
    tensor = torch.randn(6, 10)
    content = torch_file(tensor if plain else tensor.T)
    wanted, found = tensor if plain else tensor.T, 0
    for place in range(0, len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            got = load_tensor(part_of(bytes(flipped)), "x", torch.empty(6, 10))
        except ConfigError:
            found += 1
        else:
            assert torch.equal(got, wanted), place
    assert found > tensor.nbytes


def test_a_file_that_is_cut_short_is_named() -> None:
    content = torch_file(torch.randn(6, 10))
    for length in range(0, len(content), 7):
        with pytest.raises(ConfigError, match="x is damaged"):
            load_tensor(part_of(content[:length]), "x", torch.empty(6, 10))


def test_work_is_done_in_order_and_its_failures_come_out(tmp_path: Path) -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with Behind() as behind:
        for number in range(5):
            behind.do(lambda number=number: done.append(number))
        behind.wait()
        assert done == [0, 1, 2, 3, 4]
        behind.do(fail)
        with pytest.raises(OSError, match="No space"):
            behind.do(lambda: done.append(5))
        behind.do(lambda: done.append(6))
    assert done == [0, 1, 2, 3, 4, 6], "what was to follow a failure is not begun"
    with pytest.raises(OSError, match="No space"), Behind() as behind:
        behind.do(fail)
    with pytest.raises(KeyboardInterrupt), Behind() as behind:
        behind.do(fail)
        raise KeyboardInterrupt
