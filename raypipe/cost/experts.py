"""Costs of experts divided over devices: what tokens' way to them and back takes, and how uneven loads are.

A device of a group of E sends, for each of its tokens, a vector to each expert that the router chose; a share (E-1)/E
of these leaves the device. The busiest device of a layer gets ``imbalance`` times the mean, and all others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.cost.collectives import Layout
from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.schedule.costs import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a layer sends its tokens to experts."""

    experts: int
    """Experts of a layer, over all devices of a group."""
    per_token: int
    """Experts that the router chooses for a token, k."""
    dispatch_bytes: float
    """Size of a token's vector on its way to an expert."""
    combine_bytes: float
    """Size of an expert's result on its way back."""
    imbalance: float = 1.0
    """Rows of the busiest device, as a multiple of the mean (max / mean), 1 if all have the same."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.experts:
            raise SpecError(
                "experts", f"{self.per_token} of {self.experts} for a token", "choose from 1 to all of them"
            )
        if not 1 <= self.imbalance <= self.experts / self.per_token:
            most = self.experts / self.per_token
            raise SpecError(
                "imbalance", f"{self.imbalance:g}, max / mean", f"use 1 to {most:g}, all tokens on one expert"
            )

    def check(self, group: int) -> None:
        """Check that the experts divide over ``group`` devices.

        Raises:
            SpecError: they do not; it names the nearest number that works.
        """
        if group < 1 or self.experts % group:
            good = min((n for n in range(1, self.experts + 1) if self.experts % n == 0), key=lambda n: abs(n - group))
            raise SpecError("parallel.experts", f"{self.experts} experts over {group} devices", f"use {good}")

    def rows(self, tokens: float, group: int) -> float:
        """Return the rows that the busiest device's experts compute, ``tokens`` being those of each device.

        >>> Routing(experts=8, per_token=2, dispatch_bytes=1, combine_bytes=1, imbalance=1.5).rows(100, 4)
        300.0
        """
        return tokens * self.per_token * (self.imbalance if group > 1 else 1.0)

    def seconds(self, profile: Profile, tokens: float, layout: Layout) -> tuple[float, float]:
        """Return the seconds of one layer's dispatch and of its combine, with ``tokens`` on each device of the group.

        Raises:
            SpecError: the experts do not divide over the group.
        """
        self.check(layout.group)
        rows = self.rows(tokens, layout.group)
        there = all_to_all_seconds(profile, rows * self.dispatch_bytes, layout)
        return there, all_to_all_seconds(profile, rows * self.combine_bytes, layout)


def all_to_all_seconds(profile: Profile, size_bytes: float, layout: Layout) -> float:
    """Return the seconds of an all-to-all in which each device sends ``size_bytes``, what it keeps included.

    Messages inside a host and those over its cards travel side by side; each way, a device sends to one peer after
    another (pairwise exchange: Thakur, Rabenseifner, Gropp 2005, section 3). The k devices of a host share its cards.

    >>> from raypipe.cost.collectives import Layout
    >>> from raypipe.cost.profile import LinkFit, Profile
    >>> profile = Profile.model_construct(inside=LinkFit(alpha_s=0, beta_s_per_byte=1), other_kinds=(), host_links=1,
    ...     between=LinkFit(alpha_s=0, beta_s_per_byte=8))
    >>> all_to_all_seconds(profile, 8.0, Layout(1, 4)), all_to_all_seconds(profile, 8.0, Layout(2, 4))
    (6.0, 128.0)
    """
    if profile.other_kinds:
        return max(all_to_all_seconds(one, size_bytes, layout) for one in profile.kinds)
    group, k = layout.group, layout.per_host
    if group <= 1 or size_bytes <= 0:
        return 0.0
    each = size_bytes / group
    inside = (k - 1) * profile.inside.seconds(each)
    between = profile.between.shared(k / profile.host_links)
    return max(inside, (group - k) * between.seconds(each))


def with_exchange(costs: CostTable, layers: Sequence[int], seconds: tuple[float, float], overlap: float) -> CostTable:
    """Return a table whose F and B also wait for tokens, as runs have it: all-to-all inside the tasks.

    Args:
        costs: times without all-to-all.
        layers: per stage, its layers with experts.
        seconds: of one layer's dispatch and of its combine (``Routing.seconds``).
        overlap: share of it that pairs hide; 0 for runs of this version, which run a pair's halves one after another.
    """
    dispatch, combine = (tuple(n * each for n in layers) for each in seconds)
    travel = tuple(map(sum, zip(dispatch, combine, strict=True)))
    return replace(
        costs,
        forward=tuple(map(sum, zip(costs.forward, travel, strict=True))),
        input_grad=tuple(map(sum, zip(costs.input_grad, travel, strict=True))),
        dispatch=dispatch,
        combine=combine,
        overlap=overlap,
    )
