"""A call of several steps ends where anything is due; nothing is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.job.train_spec import TrainSpec
from raypipe.observe.run_dir import EVALUATE, SAVE, ask
from raypipe.runtime.calls import CALL_S, Due, Dues, StepsPerCall
from raypipe.runtime.executor.step import MOST_STEPS

MANY = 1000


def dues(folder: Path, copies_every: int = MANY, overdue: bool = False, **train: Any) -> Dues:
    saves: Any = SimpleNamespace(overdue=overdue)
    copies: Any = SimpleNamespace(due=lambda done: done % copies_every == 0)
    return Dues(TrainSpec(**{"steps": 100, "batch": 8, **train}), folder, saves, copies)


@pytest.mark.parametrize(
    ("train", "steps", "due"),
    [
        ({"eval_every": 7}, 7, Due(True, False, False)),
        ({"checkpoint_every": 5, "eval_every": 7}, 5, Due(False, True, False)),
        ({"copies_every": 3}, 3, Due(False, False, True)),
        ({"overdue": True}, 1, Due(False, True, False)),
        ({}, 100, Due(True, True, False)),
    ],
    ids=str,
)
def test_a_call_ends_before_what_is_due(train: dict[str, Any], steps: int, due: Due, tmp_path: Path) -> None:
    found = dues(tmp_path, **{"eval_every": 0, "checkpoint_every": 0, **train}).next_call(0, MANY, True, True, None)
    assert (len(found.parts), found.due) == (steps, due)


def test_what_users_ask_for_is_due_after_the_next_step(tmp_path: Path) -> None:
    asked = dues(tmp_path, eval_every=0, checkpoint_every=0)
    ask(tmp_path, SAVE)
    assert asked.next_call(10, 4, True, True, None).due == Due(False, True, False)
    assert len(asked.next_call(11, 4, True, True, None).parts) == 4  # once
    ask(tmp_path, EVALUATE)
    assert asked.next_call(11, 4, True, True, None).due == Due(True, False, False)
    assert len(asked.next_call(12, 4, True, True, None).parts) == 4
    stop: Any = SimpleNamespace(pauses=True, why="asked")
    found = asked.next_call(15, 4, True, True, stop)
    assert (len(found.parts), found.due) == (1, Due(False, True, False))


def test_an_asynchronous_pipeline_fills_once_and_drains_once(tmp_path: Path) -> None:
    """Its steps overlap within a call and from call to call."""
    every = dues(tmp_path, eval_every=5, checkpoint_every=0)
    first = every.next_call(0, 3, True, False, None)
    second = every.next_call(3, 3, first.due.anything, False, None)
    assert [*first.parts, *second.parts] == [
        (True, False),
        (False, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert second.due.anything


@pytest.mark.parametrize(("step_s", "most"), [(CALL_S / 4.5, 4), (CALL_S, 1), (10.0, 1), (1e-5, MOST_STEPS)])
def test_calls_stay_short(step_s: float, most: int) -> None:
    calls = StepsPerCall()
    for _ in range(3):
        assert calls.most == 1  # until that many have been measured
        calls.took(step_s)
    assert calls.most == most
    calls.took(2 * CALL_S)
    assert calls.most == 1  # the longest counts
    calls.forget()
    assert calls.most == 1
