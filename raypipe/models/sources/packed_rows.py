"""Check that a captured model keeps the documents of a packed row apart, so that none sees another.

Packed rows hold several documents, and their ``position_ids`` restart where one begins. transformers makes a block mask
of them for models whose masks it makes by ``create_causal_mask``; other models use them as positions alone, and their
attention goes across. What a graph does is found by computing it for one packed row with all scores equal: a weight of
a key in another document must be hidden. Everything else that mixes the tokens of a row, such as a convolution, a scan
or linear attention, has no such mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from raypipe.capture.captured import Captured
from raypipe.capture.opaque import TARGET as OPAQUE
from raypipe.capture.stage_module import compute
from raypipe.errors import SpecError
from raypipe.graph.dims import Dim, evaluate, evaluate_all, symbols
from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import ATTENTION, Operation, OperationGraph, TensorType
from raypipe.graph.positions import LONGEST, is_size
from raypipe.graph.shared_heads import sharing_heads
from raypipe.models.task import MASK, POSITIONS, Field

TOKENS = 11
"""Length of the packed row, where the graph allows it; three documents and the beginning of another one."""
_DOCUMENT = 3
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
_PRODUCTS = {"matmul", "mm", "bmm", "baddbmm", "einsum"}
_LARGE = {*_PRODUCTS, "addmm", "linear", "embedding", "scaled_dot_product_attention", "module"}
"""Operations whose results count as 0: no mask is computed from them."""
_MIXES = {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "cumsum", "cumprod", "logcumsumexp", "lstm"}
_MIXES |= {"gru", "rnn_tanh", "rnn_relu", "roll", "flip", "constant_pad_nd", "pad", "fft_fft", "fft_fftn", "fft_rfft"}
"""Operations that combine different positions, or shift them."""


def apart(fields: Mapping[str, Field]) -> Mapping[str, Field]:
    """Return what a model of transformers gets of packed rows: with a mask it makes no block mask of the positions."""
    return {name: field for name, field in fields.items() if name != MASK}


def is_packed(fields: Mapping[str, Field]) -> bool:
    """Return whether rows hold several documents each."""
    return POSITIONS in fields and fields[POSITIONS].packed


def check_apart(captured: Captured) -> None:
    """Check that no document of a packed row sees another.

    Raises:
        SpecError: one does, or it cannot be shown that none does; the error names the module.
    """
    if POSITIONS not in captured.graph.inputs:
        raise _error("the model", "reads none")
    across = _PackedRow(captured, tokens=TOKENS).first_across()
    if across is not None:
        raise _error(across.module or across.name, "may let them see each other")


def _error(what: str, why: str) -> SpecError:
    return SpecError(
        f"data, {POSITIONS}",
        f"restart within rows, which packs several documents into one, and {what} {why}",
        "give each document a row of its own; rows may differ in length",
    )


def given_positions(captured: Captured) -> OperationGraph:
    """Return the same operations, of which attention that is causal within documents is given their positions.

    Its mask would relate all tokens of a row to one another. A mask that hides anything else stays. What a mask says is
    found by computing it, of nothing but positions, for rows of the captured length, the longest there are: of one
    document, so that a window would show, and of several. A document begins where a position is not the one before it
    plus 1.
    """
    graph, known = captured.graph, dict[int, bool]()
    operations = list(graph.operations)
    for number, operation in enumerate(operations):
        if (mask := operation.mask) is None:
            continue
        if mask not in known:
            known[mask] = all(_PackedRow(captured, how).is_causal(mask) for how in ("one", "odd"))
        if known[mask]:
            plain = operation.without_mask(causal=True)
            given = replace(plain, args=(*plain.args[:3], {"of": POSITIONS}, *plain.args[4:]))
            operations[number] = sharing_heads(graph, given)
    length = {s: graph.example[s] for s in symbols(graph.sources[POSITIONS].type.shape[-1])}
    return replace(graph, operations=tuple(operations), at_most={**graph.at_most, **length})


class _PackedRow:
    """The values of a graph for two packed rows, with scores of 0.

    Args:
        captured: the model.
        documents: ``short`` ones, or ``one``; ``odd``: some do not begin with 0, and at the end is padding.
        tokens: most tokens of a row; None: as many as were captured.
    """

    def __init__(
        self, captured: Captured, documents: Literal["short", "one", "odd"] = "short", tokens: int | None = None
    ) -> None:
        self.graph, self.values = captured.graph, captured.values
        shape = self.graph.sources[POSITIONS].type.shape
        inputs = [self.graph.sources[name].type.shape for name in self.graph.inputs]
        self.tokens = {dim for each in inputs if len(each) == len(shape) for dim in each[1:]}
        growing = {name for dim in self.tokens for name in symbols(dim)}
        self.sizes = {
            name: max(self.graph.at_least.get(name, 0), min(value, tokens or value) if name in growing else value)
            for name, value in self.graph.example.items()
        }
        self.length = evaluate(shape[-1], self.sizes)
        self.found: dict[int, Any] = {}
        positions = torch.arange(self.length)
        if documents != "one":
            positions = positions % _DOCUMENT
        if documents == "odd":
            positions[:_DOCUMENT] += 4
            positions[_DOCUMENT : 2 * _DOCUMENT] += 20
            positions[-(self.length // 4) :] = 0
        self.positions = positions.expand(evaluate_all(shape, self.sizes))
        number = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
        self.others = number.unsqueeze(1) != number

    def first_across(self) -> Operation | None:
        """Return the first operation by which a document may see another; None without any."""
        mixed = self._of_tokens()
        weights: set[int] = set()  # computed from a softmax whose mask keeps documents apart
        for number, operation in enumerate(self.graph.operations):
            name, kind = short_name(operation.target), operation.type
            inner = [i for i in operation.inputs if mixed[i]]
            is_softmax = name in _SOFTMAX and kind is not None and self._is_square(kind)
            if operation.target == ATTENTION:
                apart = operation.mask is not None and self._hides(self._value(operation.mask))
            elif is_softmax:
                apart = self._hides(self._value(inner[0]))
            elif operation.target == OPAQUE:
                apart = False  # what a module that runs as it is does inside is not known
            elif name in _PRODUCTS:
                apart = len(inner) < 2 or bool(weights & set(inner)) or not self._sums_tokens(operation)
            else:
                apart = name not in _MIXES or not inner or not self._floats(inner[0])
            if not apart:
                return operation
            if is_softmax or (weights & set(inner) and name not in _LARGE):
                weights.add(number)
        return None

    def is_causal(self, mask: int) -> bool:
        """Return whether a mask shows each token exactly those before it in its document, and itself."""
        if self.length > LONGEST or self._of_tokens()[mask]:
            return False
        value = self._value(mask)
        if not isinstance(value, Tensor) or value.shape[-2:] != self.others.shape:
            return False
        hidden = self.others.logical_or(self.others.new_ones(self.others.shape).triu(1))
        if value.dtype == torch.bool:
            return torch.equal(value.logical_not(), hidden.expand(value.shape))
        if not value.is_floating_point():
            return False
        lowest = value <= torch.finfo(value.dtype).min
        return torch.equal(lowest, hidden.expand(value.shape)) and not bool(value.masked_fill(lowest, 0).any())

    def _of_tokens(self) -> list[bool]:
        """Return, per operation, whether its result depends on more than parameters and positions."""
        found: list[bool] = []
        for operation in self.graph.operations:
            sources = (self.graph.sources[name].kind == "input" and name != POSITIONS for name in operation.sources)
            found.append(not is_size(operation) and (any(sources) or any(found[i] for i in operation.inputs)))
        return found

    def _floats(self, number: int) -> bool:
        kind = self.graph.operations[number].type
        return kind is not None and kind.floating and any(self._is_length(dim) for dim in kind.shape)

    def _is_length(self, dim: Dim) -> bool:
        """Return whether a dimension is that of a row's tokens, or grows with it."""
        growing = {name for dim in self.tokens for name in symbols(dim)}
        return dim in self.tokens or bool(symbols(dim) & growing and evaluate(dim, self.sizes) >= self.length)

    def _is_square(self, kind: TensorType) -> bool:
        return len(kind.shape) > 1 and self._is_length(kind.shape[-2]) and self._is_length(kind.shape[-1])

    def _sums_tokens(self, operation: Operation) -> bool:
        """Return whether a product sums over the tokens of a row; one of scores is followed by a softmax."""
        types = [self.graph.operations[i].type for i in operation.inputs]
        if operation.equation:
            given, _, result = operation.equation.replace(" ", "").partition("->")
            letters = {
                letter: dim
                for term, kind in zip(given.split(","), types, strict=False)
                if kind is not None
                for letter, dim in zip(reversed(term), reversed(kind.shape), strict=False)
            }
            return any(self._is_length(dim) for letter, dim in letters.items() if letter not in result)
        last = types[-1]
        return last is not None and len(last.shape) > 1 and self._is_length(last.shape[-2])

    def _hides(self, scores: Any) -> bool:
        """Return whether scores, or a mask, hide every key of another document from every query."""
        if not isinstance(scores, Tensor) or scores.dim() < 2:
            return False
        if scores.shape[-2] != self.length or scores.shape[-1] < self.length:
            return False
        across = scores[..., : self.length].expand(*scores.shape[:-2], self.length, self.length)[..., self.others]
        if scores.dtype == torch.bool:
            return not bool(across.any())
        return scores.is_floating_point() and bool((across <= torch.finfo(scores.dtype).min / 2).all())

    def _value(self, wanted: int) -> Any:
        """Compute a result, with everything that is learned equal to 0; None if it cannot be computed."""
        if wanted not in self.found:
            try:
                self.found[wanted] = compute(self.graph, wanted, self._given)
            except Exception:  # whatever torch raises for shapes and dtypes; then nothing is shown of it
                self.found[wanted] = None
        return self.found[wanted]

    def _given(self, operand: int | str) -> Tensor | None:
        if operand == POSITIONS:
            return self.positions
        if isinstance(operand, str) and operand in self.values:
            return self.values[operand]
        kind = self.graph.type_of(operand)
        large = isinstance(operand, int) and short_name(self.graph.operations[operand].target) in _LARGE
        if kind is None or not (large or isinstance(operand, str)):
            return None
        return torch.zeros((), dtype=getattr(torch, kind.dtype)).expand(evaluate_all(kind.shape, self.sizes))
