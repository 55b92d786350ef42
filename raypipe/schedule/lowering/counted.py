"""Check that lowered programs work on every micro-batch exactly once.

``verify`` checks this for a schedule. Devices run programs, which are lowered from it and, for an asynchronous
schedule, cut out of several steps; so the programs are checked as well, before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import Kind
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program

Work = Mapping[tuple[str, int], Counter[int]]
"""(task, stage) -> how often it runs for each micro-batch; ids of the next step continue from N."""


def check_counted(train: Mapping[Part, Sequence[Program]], evaluate: Sequence[Program], schedule: Schedule) -> None:
    """Check that every stage runs each micro-batch's forward and, in training, its last task exactly once.

    That is the weight gradient; in a frozen stage the input gradient, or the forward itself (``ir.backwards``).

    Args:
        train: the programs of a step, one per device, for each way that a step begins and ends.
        evaluate: the programs of a validation batch, one per device.
        schedule: what they were lowered from.

    Raises:
        ScheduleError: a task is left out or runs twice; it names the task.
    """
    ends, microbatches = [backward.last for backward in schedule.backwards], schedule.microbatches
    _check("validation", _work(evaluate, ends), None, schedule, FORWARD)
    done = {part: _work(rows, ends) for part, rows in train.items()}
    for part, work in done.items():
        fills, drains = part
        # A step that does not fill the pipeline follows a step that did not drain it.
        before = [None] if fills else [done[other] for other in done if not other[1]]
        for earlier in before:
            _check("a training step", work, earlier, schedule, FORWARD, LAST)
        if drains and any(mb >= microbatches for counts in work.values() for mb in counts):
            raise ScheduleError("programs", "a step that must drain the pipeline begins the next step", _REPORT)


_REPORT = "this is a bug of raypipe: report it with the plan.json"


FORWARD, LAST = "forward", "last task"


def _work(programs: Sequence[Program], ends: Sequence[frozenset[Kind]]) -> Work:
    found: dict[tuple[str, int], Counter[int]] = {}
    for program in programs:
        for action in program.actions:
            kind, stage, mbs, _ = action.task
            for what, kinds in ((FORWARD, "F"), (LAST, ends[stage])):
                if kind in kinds:
                    found.setdefault((what, stage), Counter()).update(mbs)
    return found


def _check(which: str, work: Work, before: Work | None, schedule: Schedule, *whats: str) -> None:
    """Check one kind of step that follows another, ``before``, which may have run some of its forwards."""
    microbatches = schedule.microbatches
    for what in whats:
        for stage in range(schedule.stages):
            own = work.get((what, stage), Counter())
            count = Counter({mb: n for mb, n in own.items() if mb < microbatches})
            if before is not None:
                early = before.get((what, stage), Counter())
                count.update({mb - microbatches: n for mb, n in early.items() if mb >= microbatches})
            for mb in range(microbatches):
                if count[mb] != 1:
                    raise ScheduleError(
                        "programs",
                        f"in {which}, the {what} of micro-batch {mb} on stage {stage} runs {count[mb]} "
                        "times instead of once",
                        _REPORT,
                    )
            if len(count) > microbatches:
                raise ScheduleError("programs", f"in {which}, stage {stage} has unknown micro-batches", _REPORT)
