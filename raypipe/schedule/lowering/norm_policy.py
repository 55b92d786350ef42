"""Policies of a weight update towards the global gradient norm, which clipping (``train.clip``) needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

NormPolicy = Literal["none", "wait", "optimistic"]
"""What updates do.

``none``: they need no global norm, because nothing is clipped.
``wait``: they wait until every device's gradients are complete and the norm is known.
``optimistic``: they do not hold up the next step. A synchronous schedule updates at once, and undoes the update should
the norm turn out too large (zero bubble's post-validation, Qi et al. 2024, section 4). PipeDream-2BW, whose next step
does not use the new weights yet, defers the update until the norm is known; there is nothing to undo.
"""
RequestedNormPolicy = Literal["auto", "wait", "optimistic"]
"""What a job may ask for (``parallel.update``), where it clips. ``auto``: ``resolve`` decides for a schedule, and a run
is optimistic only while the last norm was within the limit."""
NORM_POLICIES: Final[tuple[NormPolicy, ...]] = ("none", "wait", "optimistic")
NORM_POLICY_ALIASES: Final[dict[str, NormPolicy]] = {"free": "none", "ahead": "optimistic"}
"""Earlier names, which commands still accept."""


def resolve(requested: RequestedNormPolicy | Literal["none"], gains: Callable[[], bool]) -> NormPolicy:
    """The policy for one schedule; ``gains`` says whether its steps follow one another faster with ``optimistic``.

    >>> resolve("auto", lambda: True), resolve("auto", lambda: False), resolve("none", lambda: True)
    ('optimistic', 'wait', 'none')
    """
    if requested == "auto":
        return "optimistic" if gains() else "wait"
    return requested


def parse_norm_policy(text: str) -> NormPolicy | None:
    """The policy that a user names; None if there is none of that name.

    >>> parse_norm_policy("wait"), parse_norm_policy("ahead"), parse_norm_policy("later")
    ('wait', 'optimistic', None)
    """
    return next((policy for policy in NORM_POLICIES if policy == text), NORM_POLICY_ALIASES.get(text))
