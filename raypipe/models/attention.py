"""Attention of less than a whole sequence (slices, what a copy has of one, documents of a row), and of shared heads.

A part of a sequence, a slice or what a copy has where copies divide it, attends to the keys and values up to it. The
queries of slice i meet one piece of keys and values after another: those of slices 0 to i-1 in full, its own causally.
Each piece is one call of a fused kernel that also returns the log of the sum of exponentials of its scores; with these,
partial results add up to exactly the attention over all pieces. No mask is made, nothing is concatenated, and a slice
keeps no more for its backward than it would alone.

Dropped weights are those that the whole sequence drops: a mask is a function of the sample and of the positions of
query and key (``keyed_random``). No kernel takes such a mask, so a piece's scores are made; the backward makes them and
the mask again. Dropping follows the softmax, so that what is dropped does not change the sums of exponentials.

Backwards run from the last slice to the first (``schedule.deps``). Each gives gradients to the pieces before, where
they add up, and takes those that later slices have left for its own.

A copy that has two chunks of a sequence (``current_slice``) gathers all keys and values first, and what they get of
gradients goes back to where they came from. It keeps its own for the backward, which gathers the others again: so a
layer keeps 1/C of what it would.

Sources: Dao et al. 2022 (FlashAttention), arXiv:2205.14135, for blocks and their log-sum-exp; Liu et al. 2023 (ring
attention), arXiv:2310.01889, for the backward of a block from the result over all; Li et al. 2021 (TeraPipe),
arXiv:2102.07988, for slices; Llama Team 2024, arXiv:2407.21783, section 3.3.2, for gathered keys and values.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from raypipe.compat.attention import piece_attention, piece_gradients
from raypipe.errors import RunError
from raypipe.models.current_slice import SliceCache, SliceRun, current_chunks, current_slice, own_chunks, slice_run
from raypipe.models.keyed_random import (
    RandomKeys,
    Site,
    current_keys,
    dropout_mask,
    halves_at,
    in_training,
    with_keys,
)
from raypipe.tensor.group import current_group


@dataclass(frozen=True, slots=True)
class Dropped:
    """The dropout of attention's weights."""

    p: float
    """Probability of dropping one."""
    site: Site
    """The place in the model; its shape is that of the weights, ``[samples, heads, queries, keys]``."""


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of a slice's weights, which forward and backward draw alike."""

    dropped: Dropped
    keys: RandomKeys
    run: SliceRun
    """The slice, without its pieces."""

    @staticmethod
    def of(dropped: Dropped | None, run: SliceRun) -> _Masks | None:
        """Return the masks of the slice that runs; None in evaluation, and where nothing is dropped."""
        keys = current_keys()
        if dropped is None or not dropped.p or not in_training():
            return None
        if keys is None:
            raise RunError(
                f"random site {dropped.site.number}", "no random keys are set", "run it within random_keys(...)"
            )
        return _Masks(dropped, keys, SliceRun(run.number, run.count, []))

    def __call__(self, query: Tensor, number: int) -> Tensor:
        """Return the mask for the weights of these queries and the keys of slice ``number``."""
        (batch, heads, length, _), site = query.shape, self.dropped.site
        size = (batch, heads, length, (number + 1) * length)  # a part of random numbers begins with the first key
        with with_keys(self.keys), slice_run(self.run):
            halves = halves_at(
                size, site.number, site.batch_dim, site.divided_dim, site.longest, query.device, sequence_dim=2
            )
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        return dropout_mask(halves[..., number * length :], self.dropped.p, dtype)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropped: Dropped | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention(..., is_causal=True)`` for what runs of sequences, or for whole ones.

    Args:
        query: ``[batch, heads, positions, width]``.
        key, value: ``[batch, heads, positions, width]``; with ``enable_gqa``, of fewer heads.
        scale: of the scores; by default 1 / sqrt(width).
        enable_gqa: whether several heads of queries share one of keys.
        dropped: what a part drops of its weights in training; None: nothing.
        positions: ``[batch, positions]``, numbered within documents that do not see each other, where copies divide
            rows of them; None: a row is one sequence.
    """
    run, chunks = current_slice(), current_chunks()
    if run is None and not chunks:
        assert dropped is None, "whole sequences have keyed_operations.keyed_attention"
        assert positions is None, "whole rows have document_attention"
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(query.device.type):  # as it would for the kernel of the whole
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if run is None:
        masks = [_Masks.of(dropped, one) for one in chunks]
        length = query.shape[2] // len(chunks)
        spans = [_whole(one, length) for one in chunks] if positions is None else _spans_by(positions, chunks)
        whole: Tensor = _DividedAttention.apply(query, key, value, scale, chunks, masks, spans)  # type: ignore[no-untyped-call]
        return whole
    if positions is not None:
        raise RunError("attention", "slices do not know where documents begin", "use parallel.slices: 1")
    if not torch.is_grad_enabled():  # they outlive this forward, and the tensor that they may be views of should not
        key, value = key.clone(), value.clone()
    made: Tensor = _SliceAttention.apply(query, key, value, scale, run, _Masks.of(dropped, run))  # type: ignore[no-untyped-call]
    return made


class _SliceAttention(torch.autograd.Function):
    """The attention of one slice."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, run: SliceRun, masks: _Masks | None
    ) -> Tensor:
        pieces = run.next_attention()
        if run.again:
            own = pieces[run.number]  # to which later slices have given gradients, or will
            own.keys, own.values = key.detach(), value.detach()
        else:
            own = SliceCache(key.detach(), value.detach())
            pieces.append(own)
        earlier = tuple(pieces[: run.number])
        total, weights = _over_pieces(query, own, earlier, scale, masks)
        ctx.save_for_backward(query, key, value, total, weights)
        ctx.earlier, ctx.own, ctx.scale, ctx.masks = earlier, own, scale, masks
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, total, weights = ctx.saved_tensors
        (given,) = gradients
        masks: _Masks | None = ctx.masks
        to_query, to_key, to_value = piece_gradients(
            given, query, key, value, total, weights, True, ctx.scale, _mask(masks, query, len(ctx.earlier))
        )
        for number, piece in enumerate(ctx.earlier):
            more, keys, values = piece_gradients(
                given, query, piece.keys, piece.values, total, weights, False, ctx.scale, _mask(masks, query, number)
            )
            to_query.add_(more)
            piece.add(keys, values)
            del more, keys, values
        if ctx.own.gradients is not None:
            for own, late in zip((to_key, to_value), ctx.own.gradients, strict=True):
                own.add_(late)
        ctx.own.release()
        ctx.earlier = ctx.own = None
        return to_query, to_key, to_value, None, None, None


class _DividedAttention(torch.autograd.Function):
    """The attention of a copy's two chunks; the group of copies has the keys and values of all."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        chunks: Sequence[SliceRun],
        masks: Sequence[_Masks | None],
        spans: Sequence[Sequence[_OfRows]],
    ) -> Tensor:
        keys, values = _gathered(key, value)
        length = query.shape[2] // len(chunks)
        found = []
        for part, one, mask, own_spans in zip(query.chunk(2, 2), chunks, masks, spans, strict=True):
            rows = []
            for at, of_rows in own_spans:
                made = []
                for span in of_rows:
                    own, earlier = span.pieces(keys[at], values[at], None if mask is None else length)
                    total, lse = _over_pieces(span.of(part[at], one.first_position(length)), own, earlier, scale, mask)
                    made.append((span.joined(total), span.joined(lse)))
                rows.append([_cat(of, 2) for of in zip(*made, strict=True)])
            found.append([_cat(of, 0) for of in zip(*rows, strict=True)])
        total, lse = (torch.cat(halves, 2) for halves in zip(*found, strict=True))
        ctx.save_for_backward(query, key, value, total, lse)
        ctx.scale, ctx.chunks, ctx.masks, ctx.spans = scale, chunks, masks, spans
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, total, lse = ctx.saved_tensors
        keys, values = _gathered(key, value)
        length = query.shape[2] // len(ctx.chunks)
        to_keys, to_values, to_query = torch.zeros_like(keys), torch.zeros_like(values), torch.zeros_like(query)
        halves = zip(*(x.chunk(2, 2) for x in (gradients[0], query, total, lse, to_query)), strict=True)
        for (*parts, to_part), one, mask, own_spans in zip(halves, ctx.chunks, ctx.masks, ctx.spans, strict=True):
            first = one.first_position(length)
            for at, of_rows in own_spans:
                for span in of_rows:
                    given, part, of_part, weights = (span.of(x[at], first) for x in parts)
                    own, earlier = span.pieces(keys[at], values[at], None if mask is None else length)
                    for number, piece in [(one.number, own), *enumerate(earlier)]:
                        more, *to_piece = piece_gradients(
                            given,
                            part,
                            piece.keys,
                            piece.values,
                            of_part.contiguous(),
                            weights.contiguous(),
                            piece is own,
                            ctx.scale,
                            _mask(mask, part, number),
                        )
                        to_part[at].narrow(2, span.begin - first, span.size).add_(span.joined(more))
                        begin = span.begin if piece is own else span.first + number * piece.keys.shape[2]
                        for whole, found in zip((to_keys, to_values), map(span.joined, to_piece), strict=True):
                            whole[at].narrow(2, begin, found.shape[2]).add_(found)
        del keys, values, own, earlier, piece
        return to_query, *_own_sums(to_keys, to_values), None, None, None, None


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat(parts, dim)``, which one alone is already."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class _Span(NamedTuple):
    """Consecutive positions of a chunk in one document, or in whole ones of one length.

    Several documents are one call of the kernel, each as a row: so are those of padding, each a token long.
    """

    begin: int
    """First of its positions in the sequence."""
    length: int
    """Positions of each document."""
    before: int = 0
    """Positions of the document that are before these, in earlier chunks."""
    documents: int = 1

    @property
    def first(self) -> int:
        """Where the document begins."""
        return self.begin - self.before

    @property
    def size(self) -> int:
        """Positions of all documents."""
        return self.length * self.documents

    def of(self, x: Tensor, first: int) -> Tensor:
        """Return its part of ``[rows, heads, positions, ...]``, which begins at position ``first``."""
        own = x.narrow(2, self.begin - first, self.size)
        return own if self.documents == 1 else torch.stack(torch.split(own[0], self.length, 1))

    def joined(self, x: Tensor) -> Tensor:
        """Return documents as the part of their row that they are; see ``of``."""
        return x if self.documents == 1 else x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def pieces(self, keys: Tensor, values: Tensor, each: int | None) -> tuple[SliceCache, list[SliceCache]]:
        """Return its own keys and values, and those before it: in pieces of ``each`` positions, or in one."""
        step = each or self.before or 1
        earlier = [
            SliceCache(keys.narrow(2, at, step), values.narrow(2, at, step))
            for at in range(self.first, self.begin, step)
        ]
        return SliceCache(self.of(keys, 0), self.of(values, 0)), earlier


_OfRows = tuple[slice, Sequence[_Span]]
"""Some rows of a micro-batch, and the spans of one chunk that all of them have."""


def _whole(one: SliceRun, length: int) -> list[_OfRows]:
    """Return the span of a chunk of ``length`` positions in rows of one sequence each."""
    first = one.first_position(length)
    return [(slice(None), [_Span(first, length, first)])]


def _of_documents(documents: Documents, one: SliceRun, length: int) -> list[_OfRows]:
    """Return the spans of a chunk of ``length`` positions in rows of several documents."""
    result: list[_OfRows] = []
    first = one.first_position(length)
    for row, begins in enumerate(documents):
        spans: list[_Span] = []
        for begin, end in pairwise(begins):
            own = max(begin, first)
            size = min(end, first + length) - own
            if size > 0:
                last = spans[-1] if spans else _Span(0, 0)
                if last.length == size and last.before == 0:
                    spans[-1] = last._replace(documents=last.documents + 1)
                else:
                    spans.append(_Span(own, size, own - begin))
        result.append((slice(row, row + 1), spans))
    return result


_spans_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Per positions of a micro-batch, which all layers of a stage are given, the spans of this copy's chunks."""


def _spans_by(positions: Tensor, chunks: Sequence[SliceRun]) -> list[list[_OfRows]]:
    """Return the spans of each chunk, where ``positions``, ``[rows, positions]``, are numbered within documents.

    A document begins where a position is not the one before it plus 1. Which those are is read on the host: on a GPU,
    one small copy for each micro-batch.
    """
    if positions not in _spans_known:
        whole = _gathered(positions[:, None, :, None])[0][:, 0, :, 0]
        begins = F.pad(whole.diff(dim=1) != 1, (1, 0), value=True).cpu()
        documents = tuple((*row.nonzero().flatten().tolist(), row.numel()) for row in begins)
        length = positions.shape[1] // len(chunks)
        _spans_known[positions] = [_of_documents(documents, one, length) for one in chunks]
    found: list[list[_OfRows]] = _spans_known[positions]
    return found


def _gathered(*own: Tensor) -> list[Tensor]:
    """Return each of ``[batch, heads, positions, width]`` for all positions of the sequences, in one all-gather."""
    shares = current_group("context").all_gather(torch.cat([x.flatten() for x in own]))
    by_copy = [torch.split(share, [x.numel() for x in own]) for share in shares]
    result = []
    for n, x in enumerate(own):
        firsts, lasts = zip(*(parts[n].view(x.shape).chunk(2, 2) for parts in by_copy), strict=True)
        result.append(torch.cat([*firsts, *reversed(lasts)], 2))
    return result


def _own_sums(*whole: Tensor) -> list[Tensor]:
    """Sum each of ``[batch, heads, all positions, width]`` over the copies; return this copy's positions of it.

    Every copy sends the others what is theirs, in one all-to-all, and adds up what it gets: a reduce-scatter in the
    same order of addition on all of them.
    """
    group = current_group("context")
    chunks = [x.chunk(2 * group.size, 2) for x in whole]
    order = [number for rank in range(group.size) for number in own_chunks(rank, group.size)]
    pairs = zip(order[::2], order[1::2], strict=True)
    rows = torch.cat([of[number].flatten() for pair in pairs for of in chunks for number in pair])
    ones = [1] * group.size
    arrived, wait = group.start_all_to_all(rows.view(group.size, -1), ones, ones)
    wait()
    del rows
    sizes = [of[0] for of in chunks for _ in range(2)]
    parts = torch.split(arrived.sum(0), [one.numel() for one in sizes])
    halves = [part.view(one.shape) for part, one in zip(parts, sizes, strict=True)]
    return [torch.cat(halves[n : n + 2], 2) for n in range(0, len(halves), 2)]


def _over_pieces(
    query: Tensor, own: SliceCache, earlier: Sequence[SliceCache], scale: float | None, masks: _Masks | None
) -> tuple[Tensor, Tensor]:
    """Return the queries' attention over their own piece, causally, and over those before; and the log-sum-exp."""
    total, weights = piece_attention(
        query, own.keys, own.values, True, scale, None if masks is None else masks(query, masks.run.number)
    )
    for number, piece in enumerate(earlier):
        part, part_lse = piece_attention(query, piece.keys, piece.values, False, scale, _mask(masks, query, number))
        both = torch.logaddexp(weights, part_lse)
        total = total * _share(weights, both, total) + part * _share(part_lse, both, part)
        weights = both
    return total, weights


def _mask(masks: _Masks | None, query: Tensor, number: int) -> Tensor | None:
    return None if masks is None else masks(query, number)


def _share(part: Tensor, whole: Tensor, like: Tensor) -> Tensor:
    """Return the share of a partial result in the whole: ``[batch, heads, queries, 1]``."""
    return (part - whole).exp().unsqueeze(-1).to(like.dtype)


# Attention of packed rows, one document at a time, where the mask says that none sees another.
#
# A kernel that is given a mask computes the scores of a whole row, also those that are hidden: for rows of many short
# documents nearly all. Each document alone is causal attention, for which kernels need no mask. GPUs and compiled
# stages keep the mask: where documents begin would have to come to the host first.

Documents = tuple[tuple[int, ...], ...]
"""Per row, where each document begins, and the length of the row."""


def attend_by_document(module: fx.GraphModule) -> None:
    """Let attention that is given a mask, and draws nothing, go document by document, in place."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target = document_attention
    module.recompile()


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention``; ``[rows, heads, tokens, width]``."""
    documents = None if attn_mask is None else _known(attn_mask)
    if documents is None or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    rows = []
    for row in range(query.shape[0]):
        begins = documents[row if len(documents) > 1 else 0]
        sizes = [b - a for a, b in pairwise(begins)]
        parts = zip(*(t[row : row + 1].split_with_sizes(sizes, -2) for t in (query, key, value)), strict=True)
        made = [
            F.scaled_dot_product_attention(q, k, v, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa)
            for q, k, v in parts
        ]
        rows.append(torch.cat(made, -2))
    return torch.cat(rows)


def share_heads(module: fx.GraphModule) -> None:
    """Let attention whose queries share heads of keys and values take a kernel on any device, in place."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default and node.kwargs.get("enable_gqa"):
            node.target = _shared_heads
    module.recompile()


def _shared_heads(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` of ``[..., heads, positions, width]``, fewer heads of keys.

    GPUs have a fused kernel of shared heads in half precision alone: in others, each is copied here for its queries.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if kind == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        kwargs = {**kwargs, "enable_gqa": False}
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


class _Newest(threading.local):
    """The mask that was read last: all layers of a stage are given the same."""

    mask: weakref.ref[Tensor] | None = None
    documents: Documents | None = None


_newest = _Newest()


def _known(mask: Tensor) -> Documents | None:
    if _newest.mask is None or _newest.mask() is not mask:
        _newest.mask, _newest.documents = weakref.ref(mask), documents_of(mask)
    return _newest.documents


def documents_of(mask: Tensor) -> Documents | None:
    """Return where the documents of each row begin, if each token sees exactly those before it in its document.

    Args:
        mask: whether a query (the dimension before the last) sees a key; ``[rows, 1, tokens, tokens]``.

    >>> documents_of(torch.tensor([[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]).bool())
    ((0, 2, 3),)
    """
    if type(mask) is not Tensor or mask.device.type != "cpu" or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    seen, tokens = mask[:, 0], torch.arange(mask.shape[3])
    first = seen.to(torch.uint8).argmax(-1)
    if not torch.equal(seen, (tokens >= first.unsqueeze(-1)) & (tokens <= tokens.unsqueeze(-1))):
        return None
    if not torch.equal(first.gather(-1, first), first) or bool((first.diff() < 0).any()):  # a window, say
        return None
    return tuple((*torch.unique(row).tolist(), len(tokens)) for row in first)
