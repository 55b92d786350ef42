"""The data of a call: sequences of any lengths, checked and put together as micro-batches.

A micro-batch has as many sequences as the plan says, and is padded to its longest one. Sequences of like length go
together, so that little is computed for nothing; what a call's last micro-batches lack is padding as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import SpecError, nearest
from raypipe.files import short
from raypipe.runtime.session.token_losses import LOSSES, OWN, ROW, TARGETS, TOKENS, Options

MULTIPLE = 8
"""Micro-batches are padded to a multiple of so many positions, so that kernels and messages have few different shapes.
"""
PADDING = -1
"""Number of a sequence that is padding."""


class Datum(NamedTuple):
    """One sequence of a call."""

    tokens: NDArray[np.int64]
    """``[length]``."""
    inputs: Mapping[str, NDArray[Any]]
    """By name, ``[length]``: ``target_tokens``, and what the loss needs."""


class CallData(NamedTuple):
    """A call's micro-batches."""

    rows: Mapping[str, NDArray[Any]]
    """By raw input, one row per sequence: ``[rows, longest]``, or ``[rows]`` for ``ROW``."""
    lengths: tuple[int, ...]
    """Of every micro-batch."""
    order: tuple[int, ...]
    """The number of each row's sequence in the call, ``PADDING`` for none."""


class Limits(NamedTuple):
    """The sequences and tokens that a model takes."""

    vocabulary: int
    longest: int
    """Positions of the longest sequence."""
    shortest: int = 1
    """Positions that a micro-batch has at least."""


def check(data: Sequence[Datum], loss: str, options: Options, limits: Limits) -> None:
    """Refuse a call that cannot run; a stage that failed in the middle of one would stop all others.

    Raises:
        SpecError: there is no such loss or option, or a sequence does not fit it or the model.
    """
    if loss not in LOSSES:
        raise SpecError("loss_fn", f'there is no loss "{short(loss)}"', nearest(loss, LOSSES))
    known = LOSSES[loss]
    for name, value in options.items():
        if name not in known.options:
            raise SpecError("loss_fn_config", f"{loss} has no option {short(name)}", nearest(name, known.options))
        if not np.isfinite(value):
            raise SpecError(f"loss_fn_config.{name}", f"{value} is no finite number", "use one")
    if not data:
        raise SpecError("data", "holds no sequence", "send at least one")
    for number, one in enumerate(data):
        where = f"data[{number}]"
        length = len(one.tokens)
        if not 1 <= length <= limits.longest:
            why = f"has {length} tokens; the model takes 1 to {limits.longest}"
            raise SpecError(where, why, "shorten it, or serve a job with a larger model.sequence")
        _check_tokens(f"{where}.model_input", one.tokens, limits.vocabulary)
        for name in sorted({TARGETS, *known.needs} - set(one.inputs)):
            raise SpecError(f"{where}.loss_fn_inputs", f"lacks {name}, which {loss} needs", f"add {name}")
        for name, values in one.inputs.items():
            if name != TARGETS and name not in known.takes:
                why = f"{loss} reads no {short(name)}"
                raise SpecError(f"{where}.loss_fn_inputs", why, nearest(name, {TARGETS, *known.takes}))
            if values.shape != (length,):
                why = f"has shape {list(values.shape)}, and the sequence {length} tokens"
                raise SpecError(f"{where}.loss_fn_inputs.{name}", why, "give one number for each token")
            if name != TARGETS and not np.isfinite(values).all():
                raise SpecError(
                    f"{where}.loss_fn_inputs.{name}", "holds a number that is not finite", "use finite ones"
                )
        _check_tokens(f"{where}.loss_fn_inputs.{TARGETS}", one.inputs[TARGETS], limits.vocabulary)
    given = [name for name in known.takes - known.needs if name in data[0].inputs]
    for name in sorted(known.takes - known.needs):
        if any((name in one.inputs) != (name in given) for one in data):
            raise SpecError("data", f"some sequences have {name}, and others not", "give it for all or for none")
    if len(given) == 1:
        raise SpecError("data", f"has {given[0]} alone", "give both thresholds for each token, or neither")


def _check_tokens(where: str, tokens: NDArray[Any], vocabulary: int) -> None:
    if tokens.dtype.kind not in "iu":
        raise SpecError(where, f"holds {tokens.dtype} values", "use whole numbers")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise SpecError(where, f"holds token {wrong}; the vocabulary has 0 to {vocabulary - 1}", "use its tokens")


def pack(data: Sequence[Datum], each: int, microbatches: int, limits: Limits, dtype: str) -> CallData:
    """Put sequences together as ``microbatches`` micro-batches of ``each``; ``dtype``: of what is no token."""
    longest_first = sorted(range(len(data)), key=lambda i: -len(data[i].tokens))
    order = [*longest_first, *[PADDING] * (each * microbatches - len(data))]
    lengths = []
    for begin in range(0, len(order), each):
        own = [len(data[i].tokens) for i in order[begin : begin + each] if i != PADDING]
        padded = -(-max(own, default=1) // MULTIPLE) * MULTIPLE
        lengths.append(max(limits.shortest, min(padded, limits.longest)))
    shape = (len(order), max(lengths))
    names = sorted(data[0].inputs)
    rows: dict[str, NDArray[Any]] = {
        name: np.zeros(shape, np.int64 if name in (TOKENS, TARGETS) else dtype) for name in (TOKENS, OWN, *names)
    }
    for row, number in enumerate(order):
        if number == PADDING:
            continue
        one = data[number]
        end = len(one.tokens)
        rows[TOKENS][row, :end], rows[OWN][row, :end] = one.tokens, 1
        for name in names:
            rows[name][row, :end] = one.inputs[name]
    rows[ROW] = np.array(order)
    return CallData(rows, tuple(lengths), tuple(order))
