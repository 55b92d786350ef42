"""Dropout whose mask follows from what is computed, never from who computes it.

A mask bit depends on (seed, step, sample, site, element) and on nothing else: not on the process, the micro-batch a
sample travels in, the length it is padded to, the device, or any generator's state. So one job drops the same values
under every plan, after every resume, and in a recomputed forward.

How: each (seed, step, sample, site) is hashed to two 32-bit keys on the host (splitmix64's finaliser). Each pair of
elements hashes its counter (murmur3's 32-bit finaliser, cached), then the keys (one more round each), in integer
arithmetic that wraps alike on CPU and CUDA; each half of the result decides one element.

Sources: Steele, Lea, Flood 2014 (splitmix64); Appleby, MurmurHash3 (fmix32); Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3", for the idea of keyed counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from raypipe.errors import RunError
from raypipe.tensor.group import current_group

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LEVELS = 1 << 16
"""A half hash is 16 bits: keep probabilities are multiples of 1 / 65536, and the scale makes up for the rounding."""


def mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def fold64(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = 0
    for part in parts:
        key = mix64((key + _GOLDEN & _MASK64) ^ mix64(part & _MASK64))
    return key


class RandomKeys:
    """The keys of one forward: one per sample, from (seed, step, sample), and one from (seed, step).

    ``step`` is the step they are of, ``first`` the number of the first sample within it; -1 where there is none.
    """

    __slots__ = ("first", "samples", "shared", "step", "training")

    def __init__(self, seed: int, step: int, samples: Sequence[int] | Tensor, training: bool) -> None:
        numbers = samples.tolist() if isinstance(samples, Tensor) else samples
        base = fold64(seed, step) if training else 0
        self.samples = [fold64(base, sample) for sample in numbers] if training else []
        self.shared = fold64(base, -1) if training else 0
        self.training = training
        self.step, self.first = step, int(numbers[0]) if len(numbers) else -1


# A plain global, not a thread's own: autograd may recompute a forward in one of its threads. A process runs one
# stage task at a time.
_current: RandomKeys | None = None


@contextmanager
def random_keys(seed: int, step: int, samples: Sequence[int] | Tensor, training: bool) -> Iterator[None]:
    """Set what the random layers inside depend on; nests, the innermost counts.

    ``samples`` are the samples' numbers within the step, one per row of the batch (a tensor is read on the host).
    ``training=False`` makes every random layer the identity.
    """
    global _current
    outer, _current = _current, RandomKeys(seed, step, samples, training)
    try:
        yield
    finally:
        _current = outer


def current_keys() -> RandomKeys | None:
    """What ``random_keys`` set; None outside of it."""
    return _current


def swap_keys(keys: RandomKeys | None) -> RandomKeys | None:
    """Make these the keys; returns what they were. For who interleaves two forwards, each within its own keys."""
    global _current
    before, _current = _current, keys
    return before


def in_training() -> bool:
    """Whether the forward that runs is one that drops values; so is one without keys, which will be told so."""
    return _current is None or _current.training


def _signed(value: int) -> int:
    """The 32-bit two's complement number with these low bits."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


_FIRST, _SECOND = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def _fold_(h: Tensor, bits: int) -> Tensor:
    """``h ^= h >> bits`` in place with a logical shift: torch's carries the sign in, so the mask takes it out."""
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))


@lru_cache(maxsize=64)
def _counters(count: int, device: torch.device) -> Tensor:
    """int32 ``[count]``: murmur3's finaliser of 0, 1, ...; the part of every hash that no key enters, done once."""
    h = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    return _fold_(_fold_(_fold_(h, 16).mul_(_FIRST), 13).mul_(_SECOND), 16)


def random_halves(keys: Sequence[int], elements: int, device: torch.device) -> Tensor:
    """int16 ``[len(keys), elements]``: uniform over all 65536 values, from the 64-bit keys and the position alone.

    Which half comes first follows the byte order; torch runs on little-endian machines only, so it never differs.
    """
    return _hashed(keys, _counters((elements + 1) // 2, device))[:, :elements]


def _hashed(keys: Sequence[int], counters: Tensor) -> Tensor:
    """int16 ``[len(keys), 2 * counters]``: the two halves of every pair of elements."""
    device = counters.device
    first: int | Tensor
    second: int | Tensor
    if len(keys) == 1:  # plain numbers need no tensor of keys: half the overhead of a small micro-batch
        first, second = _signed(keys[0]), _signed(keys[0] >> 32)
        counters = counters.unsqueeze(0)
    else:
        columns = [[_signed(key) for key in keys], [_signed(key >> 32) for key in keys]]
        first, second = torch.tensor(columns, dtype=torch.int32, device=device).unsqueeze(-1).unbind()
    h = _fold_(counters + first, 16).mul_(_FIRST).add_(second)
    h = _fold_(_fold_(h, 13).mul_(_SECOND), 16)
    return h.view(torch.int16)


def halves_of_part(keys: Sequence[int], part: Sequence[int], whole: Sequence[int], device: torch.device) -> Tensor:
    """int16 ``[len(keys), *part]``: what ``random_halves`` has at the first places along every size of ``whole``."""
    if list(part) == list(whole):
        return random_halves(keys, math.prod(part), device).reshape(len(keys), *part)
    begins = torch.arange(0, math.prod(whole), whole[-1], device=device).reshape(tuple(whole[:-1]))
    begins = begins[tuple(slice(size) for size in part[:-1])].flatten().unsqueeze(1)
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
    x: Tensor, p: float, site: int, batch_dim: int | None = 0, divided_dim: int | None = None,
    longest: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Zero a share ``p`` of the values and scale the rest by ``1 / (1 - p)``; the mask comes from ``random_keys``.

    ``site`` numbers the place in the model, so that two places never share a mask. ``batch_dim`` is the dimension of
    ``x`` that holds the samples of the context, each with the same number of rows; None where all samples share what is
    dropped. ``divided_dim`` is the dimension of which the members of a tensor group have equal shares: the mask is
    that of the whole. ``longest`` is the shape of ``x`` for one of the longest samples: a shorter one's mask is the
    first part of its, however far it is padded. ``x`` itself in evaluation, or with ``p = 0``; gradients pass through
    the same mask.
    Raises RunError when training without keys, or with keys for another number of samples.
    """
    keys = _current
    if not p or (keys is not None and not keys.training):
        return x
    if keys is None:
        raise RunError(f"dropout site {site}", "no random keys are set", "run it within random_keys(...)")
    keep = round((1 - p) * _LEVELS)
    if batch_dim is None:
        seeds = [fold64(keys.shared, site)]
    else:
        seeds = [fold64(key, site) for key in keys.samples]
        if x.shape[batch_dim] % len(seeds):
            rows = x.shape[batch_dim]
            raise RunError(f"dropout site {site}", f"{rows} rows for {len(seeds)} samples", "one key per sample")
    y = x.movedim(batch_dim, 0) if batch_dim else x
    shape = list(y.shape)
    part = shape if batch_dim is None else [shape[0] // len(seeds), *shape[1:]]
    whole = list(part if longest is None else longest)
    if longest is not None and batch_dim:
        whole.insert(0, whole.pop(batch_dim))
    if divided_dim is not None:
        group, length = current_group(), x.shape[divided_dim]
        moved = divided_dim + 1 if batch_dim is not None and divided_dim < batch_dim else divided_dim
        for sizes in (shape, part, whole):
            sizes[moved] = length * group.size
    halves = halves_of_part(seeds, part, whole, x.device).reshape(shape)
    if divided_dim is not None:
        halves = halves.narrow(moved, group.rank * length, length)
    # Dropped are the lowest int16 values; keep / 65536 is the exact probability, so the mean stays exact too. A mask of
    # numbers: autograd keeps more bytes than for a mask of booleans, and a step takes a third less time.
    mask = halves.ge(_LEVELS // 2 - keep).to(x.dtype).mul_(_LEVELS / keep)
    return y.mul(mask).movedim(0, batch_dim) if batch_dim else y * mask


class KeyedDropout(nn.Module):
    """``keyed_dropout`` as a layer: input and output ``[batch, ...]``, one row per sample of the context."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with its share of values dropped, in training."""
        return keyed_dropout(x, self.p, self.site) if self.training else x

    def extra_repr(self) -> str:
        """For printing a model."""
        return f"p={self.p}, site={self.site}"
