"""Does ``raypipe explain`` find what is wrong, and what mending it gains? Faults injected into emulated devices.

    python -m tests.bench.runtime.explain_faults [--kinds link data ...] [--cases 5] [--rounds 2] [--json FILE]

Each case runs once with a fault and once without it, on real processes and messages with timed waits for kernels. The
fault's cause has to be the largest that the explanation of the first run names, at the right place; and the gain that
it predicts from mending it is compared with what the second run gained. Every fault costs more than filling and
draining the pipeline does: else that is the largest cause, and rightly so.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from raypipe.explain.causes import Explanation, explain
from raypipe.explain.measured import Measured, TaskTimes, task_times
from raypipe.explain.replay import Cause, Replay
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.emulation.emulated_run import Rehearsal, rehearsal, run_rehearsal, start_emulated_devices
from raypipe.runtime.emulation.emulated_worker import DeviceFaults
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.passes import add_recompute, shard
from tests.bench.command import options, write_rows
from tests.bench.turns import first

F_S = 0.012
"""Seconds of a forward; its backward takes twice as long."""
STEPS = 8
DEVICES = 4
WITHIN = 0.03
"""Largest difference of a predicted and a realised gain, as a share of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault."""

    kind: str
    cause: Cause
    where: object
    """Where the explanation has to see it; None for anywhere."""
    bad: Rehearsal
    good: Rehearsal
    faults: Mapping[int, DeviceFaults] = field(default_factory=dict)
    planned: TaskTimes = field(default_factory=dict)
    sizes: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a case."""

    case: Case
    found: Explanation
    mended_s: float

    @property
    def right(self) -> bool:
        """Whether the right cause is first, at the right place."""
        largest = self.found.causes[0]
        return largest.cause == self.case.cause and self.case.where in (None, largest.device)

    @property
    def predicted(self) -> float:
        """Share of the step that mending is predicted to gain; of the fault's cause, wherever it ranks."""
        lost = self.found.of(self.case.cause)
        return 0.0 if lost is None else 1 - lost.what_if_step_s / self.found.step_s

    @property
    def gained(self) -> float:
        """Share of the step that mending gained."""
        return 1 - self.mended_s / self.found.step_s

    def row(self) -> dict[str, object]:
        """One line of the table."""
        return {
            "kind": self.case.kind, "case": self.case.sizes, "step_ms": round(1e3 * self.found.step_s, 1),
            "first": self.found.causes[0].cause, "at": self.found.causes[0].device, "right": self.right,
            "predicted_gain": round(self.predicted, 4), "gained": round(self.gained, 4),
            "sum_error": abs(sum(c.seconds for c in self.found.causes) - (self.found.step_s - self.found.ideal_s)),
        }  # fmt: skip


def even(stages: int, **more: float) -> CostTable:
    """Costs with a backward twice as long as its forward."""
    return CostTable.even(stages, F_S, F_S, F_S, **more)


def made(
    name: str, costs: CostTable | None = None, microbatches: int = 16, norm: NormPolicy = "wait", **options: int
) -> Rehearsal:
    """A step on four devices."""
    shape = Shape(devices=DEVICES, microbatches=microbatches, **options)
    costs = costs or even(stages_of(name, shape))
    return rehearsal(generate(name, shape, costs), costs, Links(), 1, norm)


def scaled(costs: CostTable, factors: Mapping[int, float]) -> CostTable:
    """Stages that take some factor as long, in all their tasks."""

    def of(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(v * factors.get(s, 1.0) for s, v in enumerate(values))

    return replace(
        costs, forward=of(costs.forward), input_grad=of(costs.input_grad), weight_grad=of(costs.weight_grad)
    )  # fmt: skip


def _uneven(kind: str, factors: Sequence[Mapping[int, float]]) -> Iterator[Case]:
    names = ("1f1b", "gpipe", "zb-h1", "1f1b", "zb-h1")
    for name, one in zip(names, factors, strict=False):
        mean = sum(one.get(s, 1.0) for s in range(DEVICES)) / DEVICES
        costs = scaled(even(DEVICES), one)
        good = made(name, scaled(even(DEVICES), dict.fromkeys(range(DEVICES), mean)))
        bad = replace(good, costs=costs)  # the same order: it is the cut that is at fault
        worst = max(one, key=lambda s: one[s])
        planned = task_times(bad.schedule, costs)
        yield Case(
            kind=kind, cause="imbalance", where=worst, bad=bad, good=good, planned=planned, sizes=f"{name} {one}"
        )


def uneven_cut() -> Iterator[Case]:
    return _uneven("uneven cut", [{0: 1.7}, {1: 1.8}, {2: 1.6}, {1: 0.5, 2: 1.5}, {0: 0.6, 1: 2.0}])


def heavy_head() -> Iterator[Case]:
    return _uneven("heavy head", [{3: 1.6}, {3: 1.8}, {3: 2.0}, {0: 1.2, 3: 2.2}, {0: 0.7, 3: 1.7}])


def _on_devices(kind: str) -> Iterator[Case]:
    cause, names, device, fault, profiled = ON_DEVICES[kind]
    for k, name in enumerate(names):
        where, good = device(k), made(name)
        yield Case(
            kind=kind.replace("_", " "), cause=cause, where=where, bad=good, good=good, sizes=f"{name} {where}",
            faults={d: fault(k) for d in (range(DEVICES) if where is None else [where])},
            planned=task_times(good.schedule, good.costs) if profiled else {},
        )  # fmt: skip


Device = Callable[[int], int | None]
"""Which device has the fault in case k; None for all of them."""
ALL: Device = lambda k: None  # noqa: E731
FIRST: Device = lambda k: 0  # noqa: E731
IN_TURN: Device = lambda k: k % 4  # noqa: E731
MIXED, GPIPE_LATE = ("1f1b", "gpipe", "zb-h1", "1f1b", "zb-h1"), ("1f1b", "zb-h1", "gpipe", "1f1b", "zb-h1")
ON_DEVICES: dict[str, tuple[Cause, tuple[str, ...], Device, Callable[[int], DeviceFaults], bool]] = {
    # slow from the start, next to its profile
    "slow_device": ("straggler", GPIPE_LATE, IN_TURN, lambda k: DeviceFaults(slow=((0, STEPS, 1.4 + 0.15 * k),)), True),
    # slow in two or three steps, with no profile to tell
    "noisy_neighbour": (
        "straggler", GPIPE_LATE, IN_TURN,
        lambda k: DeviceFaults(slow=((3 + k % 3, 6 + k % 3, 2.6 + 0.2 * k),)), False,
    ),
    "late_data": ("data", GPIPE_LATE, FIRST, lambda k: DeviceFaults(data_s=(12 + 3 * k) * F_S), False),
    # a host that starts each task of one device late
    "host_delay": (
        "host", ("1f1b", "gpipe", "1f1b", "zb-h1", "1f1b"), IN_TURN,
        lambda k: DeviceFaults(host_s=(0.55 + 0.1 * k) * F_S), False,
    ),
    "late_driver": ("host", MIXED, ALL, lambda k: DeviceFaults(between_steps_s=(14 + 3 * k) * F_S), False),
    "norm": ("norm", MIXED, ALL, lambda k: DeviceFaults(norm_s=(14 + 3 * k) * F_S), False),
}  # fmt: skip


def slow_link() -> Iterator[Case]:
    """A link with latency, in the same order; without a norm, which would cross the link too."""
    for k, name in enumerate(("1f1b", "zb-h1", "gpipe", "1f1b", "1f1b")):
        link = k % (DEVICES - 1)
        lag = {"gpipe": 8.0, "zb-h1": 2.0}.get(name, 1.0 + 0.2 * k) * F_S
        costs = replace(even(DEVICES), comm=tuple(lag if s == link else 0.0 for s in range(DEVICES)))
        good = made(name, norm="none")
        yield Case(kind="slow link", cause="link", where=None, bad=replace(good, costs=costs), good=good,
                   sizes=f"{name} {link}")  # fmt: skip


def narrow_link() -> Iterator[Case]:
    """Links that carry one message at a time, each longer than a task."""
    for k, name in enumerate(("1f1b", "gpipe", "zb-h1", "1f1b", "gpipe")):
        shape = Shape(devices=DEVICES, microbatches=16)
        costs = even(stages_of(name, shape))
        links = Links(bytes_per_s=1e9, message_bytes=(1.2 + 0.3 * k if name != "gpipe" else 3.0 + 0.3 * k) * F_S * 1e9)
        bad = rehearsal(generate(name, shape, costs), costs, links, 1, "wait")
        yield Case(kind="narrow link", cause="link", where=None, bad=bad, good=made(name), sizes=name)


def exposed_sync() -> Iterator[Case]:
    for k in range(5):
        shape = Shape(devices=2, microbatches=8)
        base = generate("1f1b" if k % 2 else "zb-h1", shape, even(2))
        links = Links(bytes_per_s=1e9, gradient_bytes=(8 + 2 * k) * F_S * 1e9)
        yield Case(
            kind="exposed sync", cause="sync", where=None, bad=rehearsal(base, even(2), links, 2, "wait"),
            good=rehearsal(base, even(2), Links(), 2, "wait"), sizes=f"{8 + 2 * k} F",
        )  # fmt: skip


def gathers() -> Iterator[Case]:
    for k in range(5):
        shape = Shape(devices=2, microbatches=8)
        base = shard(generate("1f1b", shape), 3, gather="step" if k < 2 else "microbatch", copies=1)
        slow = even(2)
        seconds = (10 + 3 * k) * F_S if k < 2 else (2.0 + 0.5 * k) * F_S
        slow = replace(slow, gather=(seconds, seconds))
        yield Case(
            kind="gathers", cause="gather", where=None, bad=rehearsal(base, slow, Links(), 2, "wait"),
            good=rehearsal(base, even(2), Links(), 2, "wait"), sizes=f"{seconds / F_S:.1f} F",
        )  # fmt: skip


def recompute() -> Iterator[Case]:
    for k, name in enumerate(("1f1b", "gpipe", "1f1b", "1f1b", "gpipe")):
        microbatches = 16 + 2 * k
        base = add_recompute(generate(name, Shape(devices=DEVICES, microbatches=microbatches)), "early")
        costs = even(DEVICES)
        again = replace(costs, recompute=tuple((1.0 + 0.1 * k) * F_S for _ in range(DEVICES)))
        yield Case(
            kind="recompute", cause="recompute", where=None, bad=rehearsal(base, again, Links(), 1, "wait"),
            good=rehearsal(base, costs, Links(), 1, "wait"), sizes=name,
        )  # fmt: skip


OTHERS = (uneven_cut, heavy_head, slow_link, narrow_link, exposed_sync, gathers, recompute)
KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f.__name__: f for f in OTHERS}, **{kind: partial(_on_devices, kind) for kind in ON_DEVICES},
}  # fmt: skip


def judge(case: Case, workers: WorkerGroup, steps: int = STEPS, rounds: int = 1) -> Judged:
    """Run a case with its fault and without, in turns; of several rounds the fastest of each counts.

    The devices share the machine's cores with whatever else runs there, which makes steps longer and never shorter.
    """
    best: Explanation | None = None
    mended = math.inf
    for _ in range(rounds):
        bad = run_rehearsal(case.bad, first(workers, DEVICES), steps, case.faults)
        good = run_rehearsal(case.good, first(workers, DEVICES), steps)
        assert bad.recorded is not None
        of = Measured(
            schedule=bad.recorded.schedule, steps=tuple(bad.recorded.steps), norm=case.bad.norm, planned=case.planned
        )
        result = explain(Replay(of))
        best = result if best is None or result.step_s < best.step_s else best
        mended = min(mended, median(good.measured_s[2:]))
    assert best is not None
    return Judged(case, best, mended)


def start() -> WorkerGroup:
    """Four emulated devices."""
    return start_emulated_devices([f"device {d}" for d in range(DEVICES)], connect(DEVICES, emulated=True))


def main() -> None:
    """Judge all cases and print a line for each, then the totals."""
    asked = options(__doc__, kinds=KINDS, cases=5, rounds=2, json=Path)
    workers, rows = start(), []
    try:
        for kind in asked.kinds:
            for case in list(KINDS[kind]())[: asked.cases]:
                judged = judge(case, workers, rounds=asked.rounds)
                rows.append(judged.row())
                print(json.dumps(rows[-1]), flush=True)
    finally:
        workers.stop()
    right = sum(bool(row["right"]) for row in rows)
    off = [abs(float(str(row["predicted_gain"])) - float(str(row["gained"]))) for row in rows]
    print(f"right cause first: {right} of {len(rows)} ({right / len(rows):.1%})")
    print(f"predicted gain off by at most {WITHIN:.0%} of the step: {sum(o <= WITHIN for o in off)} of {len(off)}; "
          f"median {median(off):.2%}, most {max(off):.2%}")  # fmt: skip
    write_rows(asked.json, rows)
    sys.exit(right < 0.95 * len(rows))


if __name__ == "__main__":
    main()
