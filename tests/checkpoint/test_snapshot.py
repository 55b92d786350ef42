"""A snapshot is the file that safetensors itself would read, of the moment at which it was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from raypipe.checkpoint import Snapshot
from raypipe.checkpoint.write import NAMES
from raypipe.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def content(snapshot: Snapshot) -> bytes:
    return b"".join(bytes(block) for block in snapshot.blocks())


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(list(NAMES)), SHAPES), max_size=6))
def test_safetensors_reads_every_dtype_and_shape_bit_for_bit(wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
    wanted.pop("__metadata__", None)
    tensors = {}
    for name, (dtype, shape) in wanted.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).view(shape)
    snapshot = Snapshot()
    snapshot.take(tensors)
    result = load(content(snapshot))
    assert result.keys() == tensors.keys()
    assert snapshot.keys == tuple(sorted(tensors))
    for name, expected in tensors.items():
        assert result[name].dtype == expected.dtype
        assert result[name].shape == expected.shape
        flat, same = result[name].reshape(-1), expected.reshape(-1)
        assert torch.equal(flat.view(torch.uint8), same.view(torch.uint8))


def test_it_keeps_its_moment_and_its_memory() -> None:
    weight = torch.arange(12.0).view(3, 4)
    snapshot = Snapshot()
    snapshot.take({"a": weight.t(), "tied": weight, "again": weight})
    held = snapshot._memory.data_ptr()
    weight.zero_()
    result = load(content(snapshot))
    assert torch.equal(result["a"], torch.arange(12.0).view(3, 4).t())
    assert torch.equal(result["tied"], result["again"])
    snapshot.take({"a": weight.t(), "tied": weight, "again": weight})
    assert snapshot._memory.data_ptr() == held
    snapshot.take({"a": weight[:1]})  # fewer tensors take the same memory
    assert snapshot._memory.data_ptr() == held
    assert torch.equal(load(content(snapshot))["a"], torch.zeros(1, 4))


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        Snapshot().take({"a": torch.zeros(2, dtype=torch.complex128)})
