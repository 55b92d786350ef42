"""Costs of collectives: the alpha-beta formulas of the usual algorithms, on one host and over several, and their fit.

A message of n bytes takes ``alpha + n * beta``. A device sends and receives at the same time, one message each way.
Sizes are those of the full vector, which every device holds before or after the collective.

Sources: Thakur, Rabenseifner, Gropp 2005 (all formulas); Rabenseifner 2004; Li and Hoefler 2021 (Chimera), section
3.4, uses Rabenseifner's all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from raypipe.cost.hosts import Layout
from raypipe.cost.profile import CollectiveFit, CollectivePath, LinkFit, Profile
from raypipe.errors import SpecError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Model = Literal["ring", "rabenseifner", "tree"]
MODELS: tuple[Model, ...] = get_args(Model)


class Terms(NamedTuple):
    """A formula's coefficients: ``alphas * alpha + vectors * beta * size``."""

    alphas: float
    """Number of sequential messages."""
    vectors: float
    """Bytes sent sequentially, as a multiple of the vector's size."""

    def seconds(self, link: LinkFit, size_bytes: float) -> float:
        """Return the seconds for a vector of ``size_bytes``."""
        return self.alphas * link.alpha_s + self.vectors * link.beta_s_per_byte * size_bytes


def terms(kind: Kind, model: Model, group: int) -> Terms:
    """Return the coefficients of one collective over ``group`` = r devices.

    ``ring`` takes r - 1 steps of 1/r of the vector each way. ``rabenseifner`` is recursive halving and doubling with
    log2(r) steps; if r is not a power of two, the surplus devices first send their vector to a neighbour and get the
    result back. ``tree`` uses binomial trees that carry full vectors (all-reduce: to the root and back; all-gather:
    gather, then broadcast; reduce-scatter: reduce, then scatter).

    >>> terms("all_reduce", "rabenseifner", 8)
    Terms(alphas=6.0, vectors=1.75)
    >>> terms("all_gather", "ring", 4)
    Terms(alphas=3.0, vectors=0.75)
    """
    if group <= 1:
        return Terms(0.0, 0.0)
    halves = 2 if kind == "all_reduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
    if model == "ring":
        return Terms(float(halves * (group - 1)), halves * (group - 1) / group)
    depth = math.ceil(math.log2(group))
    if model == "tree":
        whole, parts = (2 * depth, 0.0) if kind == "all_reduce" else (depth, (group - 1) / group)
        return Terms(float(2 * depth), whole + parts)
    even = 2 ** math.floor(math.log2(group))
    folds = halves if even < group else 0
    return Terms(float(halves * math.log2(even) + folds), halves * (even - 1) / even + folds)


def best(kind: Kind, link: LinkFit, group: int, size_bytes: float) -> float:
    """Return the seconds of the fastest algorithm, which a library that knows its links would choose."""
    return min(terms(kind, model, group).seconds(link, size_bytes) for model in MODELS)


def along(kind: Kind, path: LinkFit, group: int, size_bytes: float) -> float:
    """Return the seconds of a collective between hosts with the library that ``path`` describes.

    For a plain link, which describes no library, this is ``best``. A library may cut the vector into n pieces and run
    k of them at a time. Each piece pays the algorithm's latency: the collective takes ``ceil(n / k) * alphas * alpha +
    vectors * beta * size``. With small pieces and a ring, latency therefore grows with the group and with the vector.
    PyTorch always uses Gloo's ring (``gloo/allreduce.cc``) and runs two of its collectives at a time.
    """
    if not isinstance(path, CollectivePath):
        return best(kind, path, group, size_bytes)
    pieces = math.ceil(size_bytes / path.piece_bytes) if path.piece_bytes else 1
    latency = path.model_copy(update={"alpha_s": path.alpha_s * math.ceil(pieces / path.at_once)})
    if path.algorithm is None:
        return best(kind, latency, group, size_bytes)
    return terms(kind, path.algorithm, group).seconds(latency, size_bytes)


def collective_seconds(profile: Profile, kind: Kind, size_bytes: float, layout: Layout, sharing: int = 1) -> float:
    """Return the seconds of one collective: from measurements of its kind if the profile has any, else by the formulas.

    With several kinds of device it is as slow as with the slowest kind's links.

    Args:
        profile: links, hosts and measurements.
        kind: the collective.
        size_bytes: size of the full vector.
        layout: where the group's devices are.
        sharing: number of groups that use a host's links at the same time.
    """
    if layout.group <= 1 or size_bytes <= 0:
        return 0.0
    if profile.other_kinds:
        return max(collective_seconds(one, kind, size_bytes, layout, sharing) for one in profile.kinds)
    measured = [fit for fit in profile.collectives if fit.kind == kind]
    if measured:
        return from_measured(measured, layout.group, size_bytes)
    if layout.hosts == 1:
        return best(kind, profile.inside, layout.group, size_bytes)
    between: LinkFit = profile.collective or profile.between
    if layout.per_host == 1:
        return along(kind, between.shared(sharing / profile.host_links), layout.hosts, size_bytes)
    # A ring through all devices enters each host once, over one link; the library makes as many rings as there are
    # links for the host's k devices, each of which enters over another one and has its share of the vector: between
    # hosts they go side by side, inside them as fast as a device's own link. A hierarchical collective runs inside
    # hosts, then between hosts with 1/k of the vector for each of a host's k devices, then inside hosts again.
    k = layout.per_host
    rails = between.model_copy(
        update={
            "beta_s_per_byte": max(
                profile.inside.beta_s_per_byte, between.beta_s_per_byte * max(sharing / profile.host_links, 1 / k)
            )
        }
    )
    flat = along(kind, rails, layout.group, size_bytes)
    part = size_bytes / k
    levels = along(kind, between.shared(sharing * k / profile.host_links), layout.hosts, part)
    if kind in ("all_reduce", "reduce_scatter"):
        levels += best("reduce_scatter", profile.inside, k, size_bytes)
    if kind in ("all_reduce", "all_gather"):
        levels += best("all_gather", profile.inside, k, size_bytes)
    return min(flat, levels)


def from_measured(measured: Sequence[CollectiveFit], group: int, size_bytes: float) -> float:
    """Return the seconds for ``group`` devices from the fit at the nearest group size and its model's formula."""
    fit = min(measured, key=lambda f: (abs(math.log(f.group / group)), f.group))
    link = LinkFit(alpha_s=fit.alpha_s, beta_s_per_byte=fit.beta_s_per_byte)
    return terms(fit.kind, fit.model, group).seconds(link, size_bytes)


# Alpha and beta fitted to timed messages and collectives, by least squares of the relative error: sizes span four
# orders of magnitude, and small ones matter as much as large ones.


class Timed(NamedTuple):
    """One timed message."""

    size_bytes: float
    seconds: float


class TimedCollective(NamedTuple):
    """One timed collective."""

    kind: Kind
    group: int
    """Devices that take part."""
    size_bytes: float
    seconds: float


def fit_link(samples: Sequence[Timed]) -> LinkFit:
    """Fit latency and bandwidth of a link to messages of at least two sizes.

    Raises:
        SpecError: all messages have one size, or a time is not positive.
    """
    _check("link", [s.size_bytes for s in samples], [s.seconds for s in samples])
    alpha, beta = _solve([(1.0, s.size_bytes, s.seconds) for s in samples])
    error = max(abs((alpha + beta * s.size_bytes) / s.seconds - 1) for s in samples)
    return LinkFit(alpha_s=alpha, beta_s_per_byte=beta, error=error)


def fit(samples: Iterable[TimedCollective]) -> tuple[CollectiveFit, ...]:
    """Fit alpha and beta per kind and group size, with the same formula for all groups of a kind.

    At one group size, the formulas differ only in the scale of alpha and beta. The formula chosen for a kind is
    therefore the one that fits all its group sizes best with a common alpha and beta; then each group size is fitted
    separately with it.

    Raises:
        SpecError: a group was measured at one size only, or a time is not positive.
    """
    by_kind: dict[Kind, dict[int, list[TimedCollective]]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, {}).setdefault(sample.group, []).append(sample)
    fits = []
    for kind, groups in sorted(by_kind.items()):
        for group, result in groups.items():
            where = f"{kind} over {group} devices"
            _check(where, [s.size_bytes for s in result], [s.seconds for s in result])
        together = [s for result in groups.values() for s in result]
        model = min(MODELS, key=lambda m: _squares(m, together))
        for group, result in sorted(groups.items()):
            alpha, beta = _solve(_rows(model, result))
            errors = [abs(_time(model, s, alpha, beta) / s.seconds - 1) for s in result]
            fits.append(
                CollectiveFit(
                    kind=kind, group=group, model=model, alpha_s=alpha, beta_s_per_byte=beta, error=max(errors)
                )
            )
    return tuple(fits)


def _rows(model: Model, samples: Sequence[TimedCollective]) -> list[tuple[float, float, float]]:
    rows = []
    for s in samples:
        t: Terms = terms(s.kind, model, s.group)
        rows.append((t.alphas, t.vectors * s.size_bytes, s.seconds))
    return rows


def _time(model: Model, sample: TimedCollective, alpha: float, beta: float) -> float:
    t = terms(sample.kind, model, sample.group)
    return t.alphas * alpha + t.vectors * beta * sample.size_bytes


def _squares(model: Model, samples: Sequence[TimedCollective]) -> float:
    alpha, beta = _solve(_rows(model, samples))
    return sum((_time(model, s, alpha, beta) / s.seconds - 1) ** 2 for s in samples)


def _solve(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """alpha, beta >= 0 with the least sum of ``((a * alpha + b * beta) / t - 1)**2`` over rows ``(a, b, t)``."""
    aa = ab = bb = a1 = b1 = 0.0
    for a, b, t in rows:
        x, y = a / t, b / t
        aa, ab, bb, a1, b1 = aa + x * x, ab + x * y, bb + y * y, a1 + x, b1 + y
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    only_alpha, only_beta = a1 / aa if aa else 0.0, b1 / bb if bb else 0.0
    # On the edge of the allowed quadrant the better of the two axes is the best point.
    gain_alpha, gain_beta = only_alpha * a1, only_beta * b1
    return (only_alpha, 0.0) if gain_alpha > gain_beta else (0.0, only_beta)


def _check(where: str, sizes: Sequence[float], times: Sequence[float]) -> None:
    if len(set(sizes)) < 2:
        raise SpecError(where, f"measured at {len(set(sizes))} message size(s)", "measure at two or more")
    if min(times) <= 0:
        raise SpecError(where, f"a time of {min(times)} s", "measure again: times must be above 0")
