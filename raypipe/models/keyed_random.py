"""Dropout whose mask does not depend on the plan.

A mask bit depends only on (seed, step, sample, site, element): not on the process, the sample's micro-batch, the
length it is padded to, the device, or any generator's state. So a job drops the same values under every plan, after
every resume, and in a recomputed forward.

The host hashes each (seed, step, sample, site) to two 32-bit keys (splitmix64's finaliser), for all sites of a
micro-batch at once, and copies them to the device without waiting for it. The device hashes the
counter of each pair of elements (murmur3's 32-bit finaliser, cached) and then the keys (one more round each), in
integer arithmetic that wraps in the same way on CPU and CUDA. Each half of the result decides one element.

Sources: Steele, Lea, Flood 2014 (splitmix64); Appleby, MurmurHash3 (fmix32); Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3", for the idea of keyed counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raypipe.errors import RunError
from raypipe.models.current_slice import current_chunks, current_slice, slice_run
from raypipe.models.host_copies import to_device
from raypipe.tensor.group import current_group

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LEVELS = 1 << 16
"""Values of a half hash (16 bits). Keep probabilities are rounded to multiples of 1 / 65536; the scale uses these."""


def mix64(value: int) -> int:
    """Apply splitmix64's finaliser, a bijection of 64-bit integers in which every input bit affects all output bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def fold64(*parts: int) -> int:
    """Hash several integers, in this order, to one 64-bit key."""
    key = 0
    for part in parts:
        key = mix64((key + _GOLDEN & _MASK64) ^ mix64(part & _MASK64))
    return key


def _mix64s(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply ``mix64`` to each element; numpy's unsigned arithmetic wraps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _fold64s(keys: Sequence[int], sites: Sequence[int]) -> NDArray[np.uint64]:
    """Return ``fold64(key, site)`` of every pair, ``[sites, keys]``."""
    golden = np.uint64(_GOLDEN)
    folded = _mix64s(golden ^ _mix64s(np.array(keys, dtype=np.uint64)))
    mixed = _mix64s(np.array(sites, dtype=np.int64).astype(np.uint64))
    return _mix64s((folded + golden) ^ mixed[:, None])


class Site(NamedTuple):
    """The place of a random operation, and the layout of the tensor that it draws."""

    number: int
    batch_dim: int | None
    """Dimension that holds the samples; None if there is none, then all samples of a step share the draw."""
    divided_dim: int | None = None
    """Dimension that is divided over tensor ranks; None if every rank has the whole tensor."""
    longest: tuple[int, ...] | None = None
    """Shape for one of the longest samples."""


Keys = Sequence[int] | Tensor
"""64-bit numbers, or int32 ``[keys, 2]`` with their low and high halves."""
_rows: dict[int, int] = {}
"""Row of every site that this process has met, in ``RandomKeys``' table."""


class RandomKeys:
    """The random keys of one forward: one per sample, from (seed, step, sample), and one from (seed, step).

    ``step`` is the number of the step, ``first`` that of the first sample within it, or -1 without samples. Keys are
    made when something is drawn, for a forward without dropout has no use for them.
    """

    def __init__(self, seed: int, step: int, samples: Sequence[int] | Tensor, training: bool) -> None:
        numbers = samples.tolist() if isinstance(samples, Tensor) else samples
        self._seed, self._numbers, self.training = seed, numbers, training
        self.step, self.first = step, int(numbers[0]) if len(numbers) else -1
        self._table: Tensor | None = None

    @cached_property
    def samples(self) -> list[int]:
        """Return a key per sample; none outside training."""
        base = fold64(self._seed, self.step)
        return [fold64(base, sample) for sample in self._numbers] if self.training else []

    @cached_property
    def shared(self) -> int:
        """Return the key that all samples of the step share; 0 outside training."""
        return fold64(fold64(self._seed, self.step), -1) if self.training else 0

    def of_site(self, site: int, device: torch.device) -> Tensor:
        """Return the samples' keys for a site: int32 ``[samples, 2]`` on ``device``, the low and the high half.

        All sites met so far share one copy to the device; so the first forward makes several, the later ones make one.
        """
        row = _rows.setdefault(site, len(_rows))
        if self._table is None or row >= len(self._table) or self._table.device != device:
            self._table = self.table(list(_rows), True, device)
        return self._table[row]

    def table(self, sites: Sequence[int], per_sample: bool, device: torch.device) -> Tensor:
        """Return the keys of some sites: int32 ``[sites, keys, 2]``; a key per sample, or one for all of them."""
        keys = self.samples if per_sample else [self.shared]
        folded = torch.from_numpy(_fold64s(keys, sites).view(np.int32))
        return to_device(folded.view(-1, len(keys), 2), device)

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """Return the keys of a place: one per sample, or the one that all samples of the step share."""
        if not per_sample:
            return [fold64(self.shared, site)]
        return [fold64(self.samples[0], site)] if len(self.samples) == 1 else self.of_site(site, device)

    def halves(
        self,
        seeds: Keys,
        part: Sequence[int],
        whole: Sequence[int],
        device: torch.device,
        begin: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the random numbers of a place; see ``halves_of_part``."""
        return halves_of_part(seeds, part, whole, device, begin)

    def share(self, halves: Tensor, dim: int, length: int) -> Tensor:
        """Return this tensor rank's ``length`` entries of a dimension."""
        return halves.narrow(dim, current_group().rank * length, length)


# A global and not thread-local, because autograd may recompute a forward in one of its threads. A process runs only
# one stage task at a time.
_current: RandomKeys | None = None


@contextmanager
def with_keys(keys: RandomKeys) -> Iterator[None]:
    """Set these random keys inside the block; blocks nest."""
    outer = swap_keys(keys)
    try:
        yield
    finally:
        swap_keys(outer)


@contextmanager
def random_keys(seed: int, step: int, samples: Sequence[int] | Tensor, training: bool) -> Iterator[None]:
    """Set the random keys of the layers that run inside the block; blocks nest.

    ``samples`` are the samples' numbers within the step, one per row of the batch (a tensor is read on the host).
    ``training=False`` makes every random layer the identity.
    """
    with with_keys(RandomKeys(seed, step, samples, training)):
        yield


def current_keys() -> RandomKeys | None:
    """Return the keys that ``random_keys`` has set; None outside of it."""
    return _current


def swap_keys(keys: RandomKeys | None) -> RandomKeys | None:
    """Replace the current keys and return the old ones, to interleave two forwards that each have keys."""
    global _current
    before, _current = _current, keys
    return before


def in_training() -> bool:
    """Return whether the running forward drops values. It is True without keys too, which dropout then reports."""
    return _current is None or _current.training


def _signed(value: int) -> int:
    """Interpret the low 32 bits as a two's complement number."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


_FIRST, _SECOND = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def _fold_(h: Tensor, bits: int) -> Tensor:
    """Compute ``h ^= h >> bits`` in place with a logical shift; torch's is arithmetic, so sign bits are masked."""
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))


_holding: list[Tensor] | None = None


@contextmanager
def holding_counters(into: list[Tensor]) -> Iterator[None]:
    """Append to ``into`` the counters that are read inside the block, which a captured graph reads again and again.

    Those that a failed capture has made have no values; they are forgotten.
    """
    global _holding
    before, _holding = _holding, into
    try:
        yield
    except Exception:
        _finalised.cache_clear()
        raise
    finally:
        _holding = before


def _counters(count: int, device: torch.device) -> Tensor:
    """Return murmur3's finaliser of the counters, int32 ``[count]``: the part of every hash that needs no key."""
    result = _finalised(count, device)
    if _holding is not None:
        _holding.append(result)
    return result


@lru_cache(maxsize=64)
def _finalised(count: int, device: torch.device) -> Tensor:
    h = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    return _fold_(_fold_(_fold_(h, 16).mul_(_FIRST), 13).mul_(_SECOND), 16)


def random_halves(keys: Keys, elements: int, device: torch.device) -> Tensor:
    """Return int16 ``[len(keys), elements]``, uniform over all 65536 values, from the 64-bit keys and positions only.

    Which half of a hash comes first depends on the byte order, which is little-endian wherever torch runs.
    """
    return _hashed(keys, _counters((elements + 1) // 2, device))[:, :elements]


def _hashed(keys: Keys, counters: Tensor) -> Tensor:
    """Return int16 ``[len(keys), 2 * counters]``: the two halves of every pair's hash."""
    first: int | Tensor
    second: int | Tensor
    if not isinstance(keys, Tensor) and len(keys) > 1:
        halves = [(_signed(key), _signed(key >> 32)) for key in keys]
        keys = to_device(torch.tensor(halves, dtype=torch.int32), counters.device)
    if isinstance(keys, Tensor):
        first, second = keys.unsqueeze(-1).unbind(1)
    else:  # plain numbers avoid a tensor of keys, half of the overhead for a small micro-batch
        first, second = _signed(keys[0]), _signed(keys[0] >> 32)
        counters = counters.unsqueeze(0)
    h = _fold_(counters + first, 16).mul_(_FIRST).add_(second)
    h = _fold_(_fold_(h, 13).mul_(_SECOND), 16)
    return h.view(torch.int16)


def halves_of_part(
    keys: Keys, part: Sequence[int], whole: Sequence[int], device: torch.device, begin: tuple[int, int] | None = None
) -> Tensor:
    """Return int16 ``[len(keys), *part]``: a part of ``random_halves`` of ``whole``, by default the leading one.

    Args:
        keys: the keys.
        part: size of the part.
        whole: size of the whole.
        device: where to.
        begin: (dimension, place) where the part does not begin at 0: a slice of a sequence.
    """
    if list(part) == list(whole):
        return random_halves(keys, math.prod(part), device).reshape(len(keys), *part)
    dim, place = begin or (0, 0)
    before = place * math.prod(whole[dim + 1 :])
    if begin and math.prod(whole[:dim]) == 1 and list(part[dim + 1 :]) == list(whole[dim + 1 :]) and not before % 2:
        count = math.prod(part)  # its counters follow one another
        counters = _counters((math.prod(whole) + 1) // 2, device)[before // 2 : (before + count + 1) // 2]
        return _hashed(keys, counters)[:, :count].reshape(len(keys), *part)
    if dim == len(part) - 1:  # rows of one element, so that the part takes whole rows
        return halves_of_part(keys, [*part, 1], [*whole, 1], device, begin).squeeze(-1)
    first = [place if d == dim else 0 for d in range(len(part))]
    begins = torch.arange(0, math.prod(whole), whole[-1], device=device).reshape(tuple(whole[:-1]))
    taken = tuple(slice(at, at + size) for at, size in zip(first[:-1], part[:-1], strict=True))
    begins = begins[taken].flatten().unsqueeze(1)
    # A row of an odd size may begin with the second element of a pair.
    length = part[-1]
    pairs = begins // 2 + torch.arange(length // 2 + 1, device=device)
    halves = _hashed(keys, _counters(math.prod(whole) // 2 + 1, device)[pairs].flatten())
    rows = halves.reshape(len(keys), len(begins), -1)
    if whole[-1] % 2:
        own = begins % 2 + torch.arange(length, device=device)
        rows = rows.gather(2, own.expand(len(keys), -1, -1))
    return rows[:, :, :length].reshape(len(keys), *part)


def keyed_dropout(
    x: Tensor,
    p: float,
    site: int,
    batch_dim: int | None = 0,
    divided_dim: int | None = None,
    longest: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Zero a share ``p`` of the values and scale the others by ``1 / (1 - p)``; the mask comes from ``random_keys``.

    Returns ``x`` itself in evaluation, or with ``p = 0``. Gradients pass through the same mask.

    Args:
        x: the values.
        p: probability of zeroing a value.
        site: number of the place in the model, so that two places never share a mask.
        batch_dim: the dimension of ``x`` that holds the samples of the context, each with the same number of rows;
            None where all samples share one mask.
        divided_dim: the dimension that is divided evenly over tensor ranks; the mask is that of the undivided tensor.
        longest: the shape of ``x`` for one of the longest samples. The mask of a shorter sample is the leading part of
            that shape's, so it does not depend on the padding.
        sequence_dim: the dimension that is cut where a slice of a sequence runs; the mask is the slice's part of the
            whole sequence's.

    Raises:
        RunError: there are no keys in training, keys for another number of samples, or a slice without a dimension.
    """
    if not p or (_current is not None and not _current.training):
        return x
    halves = halves_at(x.shape, site, batch_dim, divided_dim, longest, x.device, sequence_dim=sequence_dim)
    y = x.movedim(batch_dim, 0) if batch_dim else x
    mask = dropout_mask(halves, p, x.dtype)
    return y.mul(mask).movedim(0, batch_dim) if batch_dim else y * mask


def dropout_mask(halves: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return what dropout multiplies values by, from their random numbers (``halves_at``): 0, or 1 / (1 - p).

    The lowest int16 values are dropped; keep / 65536 is the exact probability, so the mean is exact too. The mask is
    numeric: autograd saves more bytes than for a boolean mask, but a step takes a third less time.
    """
    keep = round((1 - p) * _LEVELS)
    return halves.ge(_LEVELS // 2 - keep).to(dtype).mul_(_LEVELS / keep)


def halves_at(
    size: Sequence[int],
    site: int,
    batch_dim: int | None,
    divided_dim: int | None,
    longest: Sequence[int] | None,
    device: torch.device,
    each: int = 1,
    sequence_dim: int | None = None,
) -> Tensor:
    """Return the random numbers of a place in the model: int16, of this size with the samples' dimension moved first.

    With ``each`` above 1, a last dimension of so many numbers for every element. The other arguments are those of
    ``keyed_dropout``; so are the errors.
    """
    keys = _current
    if keys is None:
        raise RunError(f"random site {site}", "no random keys are set", "run it within random_keys(...)")
    chunks = () if current_slice() is not None else current_chunks()
    if chunks and sequence_dim is not None:
        one = list(size)
        one[sequence_dim] //= len(chunks)
        found = []
        for chunk in chunks:
            with slice_run(chunk):
                found.append(halves_at(one, site, batch_dim, divided_dim, longest, device, each, sequence_dim))
        return torch.cat(found, sequence_dim + (batch_dim is not None and sequence_dim < batch_dim))
    samples = len(keys.samples)
    if batch_dim is not None and (not samples or size[batch_dim] % samples):
        rows = size[batch_dim]
        raise RunError(f"random site {site}", f"{rows} rows for {samples} samples", "give one key per sample")
    seeds = keys.seeds(site, batch_dim is not None, device)
    shape = list(size)
    if batch_dim:
        shape.insert(0, shape.pop(batch_dim))
    part = shape if batch_dim is None else [shape[0] // samples, *shape[1:]]
    whole = list(part if longest is None else longest)
    if longest is not None and batch_dim:
        whole.insert(0, whole.pop(batch_dim))
    if divided_dim is not None:
        length = size[divided_dim]
        moved = divided_dim + 1 if batch_dim is not None and divided_dim < batch_dim else divided_dim
        for sizes in (shape, part):
            sizes[moved] = length * current_group().size
        whole[moved] *= current_group().size
    begin = None
    if (run := current_slice()) is not None or chunks:
        if run is None or sequence_dim is None:
            why = "it is not known along which dimension the sequence lies"
            raise RunError(f"random site {site}", why, "use parallel.slices: 1 and context: 1")
        along = sequence_dim + 1 if batch_dim is not None and sequence_dim < batch_dim else sequence_dim
        begin = along, run.first_position(part[along])
        if longest is None:
            whole[along] = part[along] * run.count
    last = [each] if each > 1 else []
    halves = keys.halves(seeds, [*part, *last], [*whole, *last], device, begin).reshape([*shape, *last])
    if divided_dim is not None:
        halves = keys.share(halves, moved, length)
    return halves


class KeyedDropout(nn.Module):
    """Applies ``keyed_dropout`` as a layer to ``[batch, sequence, ...]``, one row per sample of the context."""

    divided_dim: int | None = None
    """As ``keyed_dropout``'s."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of ``x`` in training."""
        if not self.training:
            return x
        return keyed_dropout(x, self.p, self.site, divided_dim=self.divided_dim, sequence_dim=1)

    def extra_repr(self) -> str:
        """Return the layer's arguments, for printing a model."""
        return f"p={self.p}, site={self.site}"
