"""Fit alpha and beta to timed messages and collectives by least squares of the relative error.

The error is relative because sizes span four orders of magnitude and small ones matter as much as large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raypipe.cost.collectives import MODELS, Kind, Model, Terms, terms
from raypipe.cost.profile import CollectiveFit, LinkFit
from raypipe.errors import SpecError


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
        for group, found in groups.items():
            where = f"{kind} over {group} devices"
            _check(where, [s.size_bytes for s in found], [s.seconds for s in found])
        together = [s for found in groups.values() for s in found]
        model = min(MODELS, key=lambda m: _squares(m, together))
        for group, found in sorted(groups.items()):
            alpha, beta = _solve(_rows(model, found))
            errors = [abs(_time(model, s, alpha, beta) / s.seconds - 1) for s in found]
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
