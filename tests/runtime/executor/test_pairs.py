"""The halves of a pair take turns where they exchange tokens, and their spans say what each of them took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.stage.alternate import Alternation
from raypipe.schedule import generate
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.shape import Shape
from raypipe.tensor import group_of_thread
from raypipe.tensor.group import start_exchange

TRAVEL_S, COMPUTE_S = 0.04, 0.02


class Slow:
    """A group of one whose rows arrive only after a while."""

    rank, size = 0, 1

    def start_all_to_all(
        self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        there = time.perf_counter() + TRAVEL_S
        return x, lambda: time.sleep(max(0.0, there - time.perf_counter()))


def run_step(in_turns: bool) -> tuple[list[str], np.ndarray[Any, Any], list[str]]:
    """What tasks did, their times, and the second halves of pairs; a task computes, exchanges and computes."""
    lines: list[str] = []

    def task(runner: ProgramRunner, action: Any) -> None:
        lines.append(f"{action.task} begins")
        if action.task.kind in ("F", "BW", "B"):
            for _ in range(2):
                time.sleep(COMPUTE_S)
                start_exchange([1], [1], torch.zeros(1))[1]()
        lines.append(f"{action.task} ends")

    (program,) = programs(generate("dualpipev", Shape(devices=1, microbatches=4, chunks=2)))
    runner = ProgramRunner(4, 5.0, {}, {}, {})
    runner.handlers = dict.fromkeys(("F", "B", "W", "BW", "U", "AR"), task)
    if in_turns:
        runner.turns = Alternation()
    with group_of_thread(Slow(), "experts"):
        times = runner.walk(program, 0)
    return lines, times, [str(a.task) for a in program.actions if a.joined]


def test_the_halves_of_a_pair_take_turns() -> None:
    lines, times, joined = run_step(in_turns=True)
    assert joined
    for second in joined:
        at = lines.index(f"{second} begins")
        assert lines[at - 1].endswith("begins")  # the first half's, which has not ended
    assert (times[1:, 0] >= times[:-1, 1] - 1e-9).all()  # spans follow one another
    assert (times[:, 1] >= times[:, 0]).all()
    one_by_one = run_step(in_turns=False)[1]
    saved = np.ptp(one_by_one) - np.ptp(times)
    hidden = 2 * COMPUTE_S  # of either half's two exchanges, what the other computes meanwhile
    assert saved > len(joined) * hidden  # half of it: sleeps take longer on a busy machine


def test_one_after_the_other_otherwise() -> None:
    lines, _, _ = run_step(in_turns=False)
    assert [line.split()[1] for line in lines] == ["begins", "ends"] * (len(lines) // 2)
