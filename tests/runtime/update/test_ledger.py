"""Two-phase commit of a step, against every way in which devices can be caught in the middle of one."""

from __future__ import annotations

from itertools import product

import pytest

from raypipe.errors import RunError
from raypipe.runtime.update.ledger import Standing, agreed_steps

RUNNING, READY, AGREED, UPDATED = range(4)
STEP = 7
STANDINGS = {
    RUNNING: Standing(STEP, ready=False, agreed=False),
    READY: Standing(STEP, ready=True, agreed=False),
    AGREED: Standing(STEP, ready=True, agreed=True),
    UPDATED: Standing(STEP + 1, ready=False, agreed=False),
}


def possible(states: tuple[int, ...]) -> bool:
    """Nobody knows that all are ready, or has made a final update, before all are ready."""
    return max(states) < AGREED or min(states) >= READY


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_all_go_on_from_one_step_that_each_can_come_to(devices: int) -> None:
    for states in product(STANDINGS, repeat=devices):
        standings = [STANDINGS[state] for state in states]
        if not possible(states):
            with pytest.raises(RunError, match="restart from the last checkpoint"):
                agreed_steps(standings)
            continue
        target = agreed_steps(standings)
        # An update that is final stays, and a step that has one is finished by all; any other is forgotten by all.
        assert target == STEP + (max(states) >= AGREED)
        assert all(state >= READY for state in states) or target == STEP


def test_one_that_has_begun_the_next_step_is_not_ahead() -> None:
    """A device may be ready for step 8 only where all others have done step 7."""
    next_step = Standing(STEP + 1, ready=True, agreed=False)
    assert agreed_steps([next_step, STANDINGS[UPDATED]]) == STEP + 1
    assert agreed_steps([next_step, STANDINGS[READY]]) == STEP + 1
    with pytest.raises(RunError):
        agreed_steps([next_step, STANDINGS[RUNNING]])
