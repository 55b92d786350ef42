"""Export to the compute-only CSV that ``torch.distributed.pipelining`` loads (``_PipelineScheduleRuntime._load_csv``).

The CSV has one row per device and one action per cell: ``2F0``, ``2I0`` (our B), ``2W0``, ``2B0`` (our BW). PyTorch
adds messages, gathers and gradient reductions itself. It supports chains of stages on one device each, and plain
micro-batches; everything else is refused rather than silently changed.

Source: ``torch/distributed/pipelining/schedules.py``, ``_Action.from_str`` and ``_validate_schedule`` (2.13).
"""

from __future__ import annotations

from typing import NoReturn

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.kinds import BOOKKEEPING, TRAITS


def to_torch_csv(schedule: Schedule) -> str:
    """Return the CSV text, without trailing all-reduces and updates, which PyTorch and the caller's optimizer do.

    Raises:
        ScheduleError: PyTorch's loader cannot express the schedule; it names the task or rule.
    """
    if schedule.replicas > 1:
        first, second = schedule.placement[0][0], schedule.placement[1][0]
        _refuse(
            schedule, f"{schedule.replicas} replicas put stage 0 on devices {first} and {second}; torch supports one"
        )
    if schedule.graph != StageGraph.chain(schedule.stages):
        _refuse(schedule, "its stage graph is not a chain")
    if schedule.versions != "flush":
        _refuse(schedule, f'it keeps weight versions ("{schedule.versions}"), torch updates once, after the step')
    if schedule.rules.slices > 1:
        _refuse(schedule, f"its micro-batches are cut into {schedule.rules.slices} slices, which torch would mix up")
    lines = []
    for device, order in enumerate(schedule.orders):
        end = len(order)
        while end and order[end - 1].kind in BOOKKEEPING:
            end -= 1
        had_b: set[tuple[int, int]] = set()
        cells = [_cell(schedule, device, task, had_b) for task in order[:end]]
        if not cells:
            _refuse(schedule, f"device {device} has no task")
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def _cell(schedule: Schedule, device: int, task: Task, had_b: set[tuple[int, int]]) -> str:
    if task.kind in BOOKKEEPING:
        _refuse(schedule, f"{task} on device {device} comes before the end of the step")
    traits = TRAITS[task.kind]
    if traits.torch_letter is None:
        _refuse(schedule, f"{task} on device {device} is a {traits.what} task; torch has none")
    if len(task.mbs) > 1:
        _refuse(schedule, f"{task} on device {device} carries {len(task.mbs)} micro-batches")
    key = (task.stage, task.mbs[0])
    if task.kind == "B":
        had_b.add(key)
    elif task.kind == "W" and key not in had_b:
        _refuse(schedule, f"{task} on device {device} runs with no B of its own before it; torch's W needs one")
    return f"{task.stage}{traits.torch_letter}{task.mbs[0]}"


def _refuse(schedule: Schedule, why: str) -> NoReturn:
    raise ScheduleError(
        f'schedule "{schedule.name}" as torch CSV',
        why,
        "choose another schedule for --csv, or use --json, which supports all",
    )
