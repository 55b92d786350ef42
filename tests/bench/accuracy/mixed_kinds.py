"""Emulated steps of plans for several kinds of device, against their prediction.

    python -m tests.bench.accuracy.mixed_kinds [--rounds 3] [--json FILE]

The planner plans a made-up model for fast and slow devices: cut, micro-batches, order and which device holds what. Then
every device runs its program at the speed of its own kind (an emulated device that takes so many times as long as a
fast one), while the planner costs a stage by the slowest kind that holds it. Links are those between the kinds' hosts.
Exit status 1 if a median step differs from ``predicted_step_s`` by more than the limit. Starts Ray; wants a quiet
machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raypipe.cost.hosts import Placed
from raypipe.cost.kinds import of_kinds
from raypipe.cost.profile import Profile
from raypipe.cost.stages import costs_of
from raypipe.plan.choose import choose
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.emulation.emulated_run import Rehearsal
from raypipe.runtime.emulation.emulated_worker import DeviceFaults
from tests.bench.command import options, write_rows
from tests.bench.turns import MS, Turns, take_turns
from tests.plan.conftest import make_job, make_profile

LIMIT = 0.10
"""Largest share by which a measured step may differ from the predicted one."""
LAYERS, BATCH = 14, 16
STEPS = 6
"""Steps of a turn, of which the first is left out."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster and what its plan must hold to."""

    kinds: tuple[tuple[int, float], ...]
    """(devices, how many times as long everything takes there) of each kind, one host each."""
    parallel: dict[str, Any] = field(default_factory=dict)
    search_s: float = 0.0

    @property
    def cluster(self) -> str:
        """For the table."""
        return " + ".join(f"{devices} at {slow:g}x" if slow > 1 else f"{devices}" for devices, slow in self.kinds)

    def profile(self) -> Profile:
        """Of the model on the whole cluster."""
        profiles = []
        for n, (devices, slow) in enumerate(self.kinds):
            known = make_profile(LAYERS, devices, devices_per_host=devices).at_speed(slow)
            profiles.append(known.model_copy(update={"device": f"kind {n}", "accelerator_type": f"K{n}"}))
        return of_kinds(profiles)

    def plan(self) -> Plan:
        """What the planner makes of it."""
        job = make_job(LAYERS, BATCH, {"auto": True, "shard": "none", **self.parallel}, clip=None)
        return choose(job, self.profile(), search_s=self.search_s).plan


CASES = (
    Case(((2, 1.0), (2, 2.0)), {"schedule": "1f1b", "stages": 4}),
    Case(((1, 1.0), (3, 1.5)), {"schedule": "1f1b", "stages": 4}),
    Case(((2, 1.0), (1, 1.7), (1, 3.0)), {"schedule": "zb-h1", "stages": 4}),
    Case(((2, 1.0), (2, 1.5)), {"schedule": "zb-v", "stages": 4}),
    Case(((3, 1.0), (1, 2.0)), {"schedule": "interleaved-1f1b", "stages": 4, "chunks": 2}),
    Case(((2, 1.0), (2, 1.3)), {"schedule": "chimera", "stages": 4}),
    Case(((2, 1.0), (2, 2.0)), {"schedule": "1f1b", "stages": 2, "replicas": 2}),
    Case(((3, 1.0), (3, 1.6)), {"schedule": "1f1b", "stages": 3, "replicas": 2}),
    Case(((2, 1.0), (2, 2.0)), {"schedule": "auto", "stages": 4}, search_s=3.0),
)


def as_built(case: Case, plan: Plan) -> tuple[Rehearsal, str, dict[int, DeviceFaults]]:
    """The plan's step with the times of the fastest kind, and how much longer each device takes."""
    profile, parallel, one = case.profile(), plan.parallel, plan.order()
    assert (parallel.recompute, parallel.shard, parallel.tensor) == ("none", "none", 1), parallel
    shape = (plan.cut, parallel.microbatch, one, parallel.replicas)
    mixed, fastest = costs_of(profile, *shape), costs_of(profile.kinds[0].on_hosts(profile.hosts), *shape)
    what = Rehearsal(
        schedule=as_run(build_schedule(plan, BATCH)), copies=parallel.replicas,
        costs=replace(fastest, comm=mixed.comm, all_reduce=mixed.all_reduce),
    )  # fmt: skip
    placed = Placed.of(one.placement, parallel.replicas, profile.placed)
    slow = sorted(slow for _, slow in case.kinds)
    faults = {}
    for rank in range(what.schedule.devices):
        copy, position = divmod(rank, one.devices)
        factor = slow[profile.placed.kind_of(placed.device(copy, position))]
        faults[rank] = DeviceFaults(slow=((0, STEPS, factor),))
    return what, case.cluster, faults


def main() -> int:
    """Run all plans in turns and print a row for each."""
    asked = options(__doc__, rounds=3, json=Path)
    plans = [case.plan() for case in CASES]
    result = [Turns(*as_built(case, plan)) for case, plan in zip(CASES, plans, strict=True)]
    take_turns(result, asked.rounds, STEPS)
    print(f"{'devices':<24}{'schedule':<18}{'copies':>6}  {'layers':<18}{'predicted':>9}{'measured':>9}   ms a step")
    rows = []
    for case, plan, one in zip(CASES, plans, result, strict=True):
        assert plan.predicted_step_s is not None
        error = one.step_s / plan.predicted_step_s - 1
        layers = "-".join(str(len(stage)) for stage in plan.cut)
        print(f"{case.cluster:<24}{plan.parallel.schedule:<18}{plan.parallel.replicas:>6}  {layers:<18}"
              f"{plan.predicted_step_s / MS:>9.1f}{one.step_s / MS:>9.1f}{error:>+8.1%}")  # fmt: skip
        rows.append({"devices": case.cluster, "schedule": plan.parallel.schedule, "predicted_s": plan.predicted_step_s,
                     "measured_s": one.measured_s, "difference": error})  # fmt: skip
    worst = max(abs(row["difference"]) for row in rows)
    print(f"worst {worst:.1%}, at most {LIMIT:.0%}")
    write_rows(asked.json, rows)
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
