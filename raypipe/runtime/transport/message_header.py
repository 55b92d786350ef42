"""The header of a message: its label and its tensors' dtypes and shapes as bytes, the same on both ends.

The receiver knows what will come, so it packs the same bytes beforehand and compares: a message that differs in
label, order, dtype or shape is caught by one comparison, before any of its payload is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Direction, Expected, Label, TensorSpec

_LABEL = struct.Struct("<Bqqqqq")
_COUNT = struct.Struct("<I")
_TENSOR = struct.Struct("<BB")
_DIRECTIONS: tuple[Direction, ...] = ("act", "grad")

# A dtype travels as its place in this list, so new ones go to the end.
_DTYPE_NAMES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
_DTYPE_NAMES += ["complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32"]
_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


def pack(label: Label, specs: Iterable[tuple[Sequence[int], torch.dtype]]) -> bytes:
    """Return the header: the label, then dtype and shape of each tensor.

    Raises:
        TransportError: a dtype that cannot travel.
    """
    direction, src, dst, mb, step, attempt = label
    return _LABEL.pack(direction == "grad", src, dst, mb, step, attempt) + _pack_specs(tuple(specs))


def pack_tensors(label: Label, tensors: Iterable[Tensor]) -> bytes:
    """Return the header of a message with these tensors."""
    return pack(label, [(t.shape, t.dtype) for t in tensors])


@lru_cache(maxsize=1024)
def _pack_specs(specs: tuple[tuple[Sequence[int], torch.dtype], ...]) -> bytes:
    # A training step repeats the same few shapes for ever: packing each list once leaves one dictionary look-up.
    parts = [_COUNT.pack(len(specs))]
    for shape, dtype in specs:
        code = _CODES.get(dtype)
        if code is None:
            raise TransportError("message", f"tensors of {dtype} cannot be sent", "cast them to a dense dtype first")
        parts.append(_TENSOR.pack(code, len(shape)) + struct.pack(f"<{len(shape)}q", *shape))
    return b"".join(parts)


def unpack(head: bytes | bytearray | memoryview) -> Expected:
    """The message that ``pack`` named; for error texts and for envelopes, not for the fast path.

    Bytes after the header are ignored. Raises TransportError when these are no header.
    """
    try:
        grad, src, dst, mb, step, attempt = _LABEL.unpack_from(head, 0)
        (count,) = _COUNT.unpack_from(head, _LABEL.size)
        at = _LABEL.size + _COUNT.size
        specs = []
        for _ in range(count):
            code, ndim = _TENSOR.unpack_from(head, at)
            dtype = _DTYPES[code]
            if dtype is None:
                raise TransportError("message", f"this torch has no {_DTYPE_NAMES[code]}", "run one torch everywhere")
            shape = struct.unpack_from(f"<{ndim}q", head, at + _TENSOR.size)
            specs.append(TensorSpec(shape, dtype))
            at += _TENSOR.size + 8 * ndim
        return Expected(Label(_DIRECTIONS[grad], src, dst, mb, step, attempt), tuple(specs))
    except (struct.error, IndexError) as error:
        raise TransportError("message", f"unreadable header ({error})", "run one raypipe everywhere") from None


def describe(expected: Expected) -> str:
    """Return one line for error messages: the label and the tensors.

    >>> describe(Expected(Label("act", 0, 1, 3, 7), (TensorSpec((4, 8), torch.bfloat16),)))
    'activation of micro-batch 3, stage 0 -> 1, step 7 [bfloat16 4x8]'
    """
    tensors = ", ".join(
        f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"
        for shape, dtype in expected.tensors
    )
    return f"{expected.label} [{tensors}]"


def dense(tensor: Tensor) -> Tensor:
    """The tensor as one contiguous block that holds its real values; the same object where it already is one.

    Lazy conjugation and negation are flags on a view, not bytes in memory, so they are carried out here.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
