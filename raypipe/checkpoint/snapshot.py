"""A copy of tensors in host memory, laid out as the safetensors file that it will be written to.

Training goes on while the copy is written, so its memory is filled at one moment and used again at the next. On a GPU
the copies are queued behind what the device computes, into pinned memory, and nobody waits for them but the writer.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, the header as JSON, and
the tensors without gaps. Those with the largest elements come first, so that each begins at a multiple of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import CheckpointError

BLOCK_BYTES = 8 << 20
"""Bytes that are written at once."""
ALIGNMENT = 8
"""The header is padded to a multiple of it."""
NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The format's names of dtypes."""

Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


class Snapshot:
    """The tensors of one moment; ``take`` fills it anew."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._header = b""
        self._views: dict[str, Tensor] = {}
        self._size = 0
        self._copied: list[Any] = []
        """Events of the GPUs that are copied from."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the tensors, sorted."""
        return tuple(sorted(self._views))

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any dtype, shape, stride and device, bit for bit.

        Nothing may read the copy (``blocks``) meanwhile.

        Raises:
            CheckpointError: the format has no name for a dtype.
        """
        ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
        layout = tuple((key, x.dtype, x.shape) for key, x in ordered)
        gpus = {x.device for x in tensors.values() if x.device.type == "cuda"}
        if layout != self._layout:
            self._lay_out(layout, pinned=bool(gpus))
        for key, x in ordered:
            self._views[key].copy_(x, non_blocking=True)
        self._copied = []
        for device in gpus:
            passed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            passed.record(torch.cuda.current_stream(device))
            self._copied.append(passed)

    def _lay_out(self, layout: Layout, pinned: bool) -> None:
        header: dict[str, Any] = {}
        end = 0
        for key, dtype, shape in layout:
            if dtype not in NAMES:
                raise CheckpointError(key, f"has dtype {dtype}, which safetensors files cannot hold", "convert it")
            begin, end = end, end + shape.numel() * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._views.clear()
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before there is another
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        for key, dtype, shape in layout:
            begin, until = header[key]["data_offsets"]
            self._views[key] = self._memory[begin:until].view(dtype).view(shape)
        self._header, self._layout, self._size = struct.pack("<Q", len(text)) + text, layout, end

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file, once all copies are complete."""
        for passed in self._copied:
            passed.synchronize()
        yield self._header
        data = self._memory.numpy().data
        for begin in range(0, self._size, BLOCK_BYTES):
            yield data[begin : min(self._size, begin + BLOCK_BYTES)]
