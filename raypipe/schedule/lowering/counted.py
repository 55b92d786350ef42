"""Lowered programs held against the one thing that a step must do: work on every micro-batch once.

``verify`` says it of a schedule. What devices run are programs, lowered from it and, for a schedule that never flushes,
cut out of several steps of it; so it is said again of these, before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raypipe.errors import ScheduleError
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program

Work = Mapping[tuple[str, int], Counter[int]]
"""By (what, stage), how often each micro-batch is worked on; ids of the next step go on from N."""


def check_counted(
    train: Mapping[Part, Sequence[Program]], evaluate: Sequence[Program], stages: int, microbatches: int
) -> None:
    """Check that every stage runs the forward of each micro-batch, and in training its weight gradient, exactly once.

    Args:
        train: programs of a step per device, by how a step begins and ends.
        evaluate: programs of a validation batch per device.
        stages: stages of one replica.
        microbatches: micro-batch ids of a step, over all replicas, N.

    Raises:
        ScheduleError: one is left out or counted twice; says which.
    """
    _check("validation", _work(evaluate), None, stages, microbatches, gradients=False)
    done = {part: _work(rows) for part, rows in train.items()}
    for part, work in done.items():
        fills, drains = part
        # What the step before has left running: that began afresh, or went on as this one does.
        before = [None] if fills else [done[other] for other in done if not other[1]]
        for earlier in before:
            _check("a training step", work, earlier, stages, microbatches, gradients=True)
        if drains and any(mb >= microbatches for counts in work.values() for mb in counts):
            raise ScheduleError("programs", "a step that should drain begins the next one", _REPORT)


_REPORT = "this is a fault of raypipe: report it with the plan.json"


def _work(programs: Sequence[Program]) -> Work:
    found: dict[tuple[str, int], Counter[int]] = {}
    for program in programs:
        for action in program.actions:
            kind = action.task.kind
            what = "forward" if kind == "F" else "weight gradient" if kind in WEIGHT_GRADIENTS else None
            if what is not None:
                found.setdefault((what, action.task.stage), Counter()).update(action.task.mbs)
    return found


def _check(which: str, work: Work, before: Work | None, stages: int, microbatches: int, gradients: bool) -> None:
    """One kind of step, after another that may have run some of its forwards."""
    for what in ("forward", "weight gradient")[: 1 + gradients]:
        for stage in range(stages):
            own = work.get((what, stage), Counter())
            count = Counter({mb: n for mb, n in own.items() if mb < microbatches})
            if before is not None:
                early = before.get((what, stage), Counter())
                count.update({mb - microbatches: n for mb, n in early.items() if mb >= microbatches})
            for mb in range(microbatches):
                if count[mb] != 1:
                    raise ScheduleError(
                        "programs", f"in {which}, the {what} of micro-batch {mb} on stage {stage} runs {count[mb]} "
                        "times instead of once", _REPORT,
                    )  # fmt: skip
            if len(count) > microbatches:
                raise ScheduleError("programs", f"in {which}, stage {stage} works on what no step has", _REPORT)
