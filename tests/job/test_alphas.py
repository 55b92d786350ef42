"""Merak's shares (section 5.2), worked out by hand from its formula, and what they are for: even memory."""

from fractions import Fraction as Of

import pytest

from raypipe.errors import ScheduleError
from raypipe.job.requested_schedule import alphas
from raypipe.schedule import Shape, generate


def shares(text: str) -> list[float]:
    return [float(Of(word)) for word in text.split()]


@pytest.mark.parametrize(
    ("stages", "first", "expected"),
    [
        (4, 0.25, "1/4 3/8 3/8 1"),
        (4, 0.5, "1/2 3/4 3/4 1"),
        (4, 0.9, "9/10 1 1 1"),
        (8, 0.0, "0 0 0 0 0 0 0 1"),
        (8, 0.4, "2/5 7/15 14/25 7/10 14/15 1 1 1"),
        # Section 6.4.2, GPT-2.5B on 8 stages: the most that fits.
        (8, 0.7, "7/10 49/60 49/50 1 1 1 1 1"),
        (
            16,
            0.2,
            "1/5 3/14 3/13 1/4 3/11 3/10 1/3 3/8 3/7 1/2 3/5 3/4 1 1 1 1",
        ),
        (16, 0.1, "1/10 3/28 3/26 1/8 3/22 3/20 1/6 3/16 3/14 1/4 3/10 3/8 1/2 3/4 3/4 1"),
        (1, 0.3, "1"),
        (2, 0.3, "3/10 1"),
        (3, 0.3, "3/10 3/10 1"),
    ],
)
def test_published_formula(stages, first, expected) -> None:
    assert alphas(stages, first) == pytest.approx(shares(expected), abs=1e-12)


@pytest.mark.parametrize("stages", [4, 8, 16])
@pytest.mark.parametrize("first", [0.05, 0.3, 0.6])
def test_no_stage_needs_more_than_the_first(stages, first) -> None:
    """In flight beside the one that goes back, counted in the order itself; even where no share is cut off at 1."""
    order = generate("shifted-critical-path", Shape(devices=stages, microbatches=3 * stages))
    extra = []
    for stage, share in enumerate(alphas(stages, first)):
        flight, most = 0, 0
        for task in order.orders[stage]:
            flight += (task.kind == "F") - (task.kind == "BW")
            most = max(most, flight)
        extra.append((most - 1) * share)
    assert max(extra) == pytest.approx(extra[0])
    assert all(
        e == pytest.approx(extra[0])
        for e, share in zip(extra[: stages - 2], alphas(stages, first)[: stages - 2], strict=True)
        if share < 1
    )


def test_a_share_is_no_more_than_all() -> None:
    with pytest.raises(ScheduleError, match="use 0 to 1"):
        alphas(4, 1.5)
