"""Follow the cluster's devices: a run goes on with another plan when some are lost or will be, or when another pays
because there are more of them, or because some have turned slow.

The plan is made from the profile that the run began with, so that no device has to be measured again. Losses stay those
of the undisturbed run up to rounding: the order of the data and dropout depend on no plan, and checkpoints on none.

The workers leave their plan and the driver logs ``devices_lost`` or ``paused``; then this gives back what is lost,
reserves what is missing and logs ``resized``, and the driver goes on (``runtime/cluster/attempts.py``). Workers whose
devices stay serve on, and processes for more devices start before the run pauses for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.compat.ray_private import drain_node, draining_nodes
from raypipe.errors import RequestError, RunError, SpecError, nearest
from raypipe.files import read_regular
from raypipe.launch.prepared import Prepared
from raypipe.observe.run_dir import LEAVING, MOST_REASON, PAUSE, PROFILE, SAVE, ask, asked_to_stop, go_on
from raypipe.observe.run_log import EVENTS, Follower, log_event
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.watch import BUDGET_S, Watch
from raypipe.search.budget import Budget

if TYPE_CHECKING:
    from raypipe.runtime.hosts.reserve import Reservation
    from raypipe.runtime.worker.worker_group import Warm


SETTLE_S = 2.0
"""A number of free devices counts once it has stayed for so long: nodes come one by one, and other jobs come and go."""
RELEASED_S, MOST_S = 1.0, 10.0
"""How long the number of free devices must stay after some were released, and the longest wait for that."""
WORTH = 0.05
"""Least share of the step that a plan for more devices, or for slow ones, must save; a pause costs more than a few
steps."""
NOTICE_S = 30.0
"""Time until a node goes that is named without one: the shortest notice of the large clouds (Azure, GCP spot)."""
NODE_NAMES = ("NodeID", "NodeManagerHostname", "NodeManagerAddress")
"""What a node may be called, as Ray lists it."""
SEARCH_S = 0.5
"""Seconds for searching orders; the run searches again on the times that it measures."""


class Elastic:
    """Looks after the devices of one run."""

    def __init__(
        self, prepared: Prepared, reservation: Reservation, reserve: Callable[[Prepared, str], Reservation]
    ) -> None:
        """Begin with a plan and its devices; ``reserve`` waits for those of another plan, under the run's id."""
        from raypipe.runtime.hosts.reserve import requested

        spec = prepared.job.train.elastic
        assert spec is not None
        self.spec, self.prepared = spec, prepared
        self._reservation, self._reserve = reservation, reserve
        self._events = Follower(prepared.directory / EVENTS)
        self._asked: AbstractContextManager[None] = requested(reservation.request, spec.max_devices)
        self._next: Plan | None = None
        """The plan for more devices, until the run has paused for it."""
        self._why = ""
        """Why it will be asked to."""
        self._more: Warm | None = None
        """The processes that are started for it."""
        self._taken: list[Warm] = []
        """Those of before: the driver knows them by name, and Ray ends an actor when its creator forgets it."""
        self._released = False
        """Whether devices on living nodes were given back just now."""
        self._could, self._since = 0, time.monotonic()
        """Number of devices that the run could use, and since when it is that."""
        self._judged = _devices(prepared)
        """The newest number for which the planner was asked."""
        self._broken_since: float | None = None
        self._slow: dict[int, float] = {}
        """Number of each device that is slow now, and how many times as long as they should its tasks take."""
        self._slow_judged: dict[int, float] = {}
        """The newest such devices for which the planner was asked."""
        self._loads: list[list[int]] | None = None
        """The newest loads of the experts that copies divide, where others would have more even ones."""
        for _ in self._events.new_rows():
            pass  # those of earlier runs

    def __enter__(self) -> Elastic:
        self._asked.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._asked.__exit__(*error)
        self._take_more()
        self._reservation.give_back()

    def look(self) -> None:
        """Change the devices where the run has ended for it, and else see whether to; call it now and then.

        Raises:
            RunError: no plan fits the devices that are left.
            DevicesError: there are fewer than ``min_devices``, and no others came in time.
        """
        rows = list(self._events.new_rows())
        for row in rows:
            if row["event"] == "straggler":
                self._slow[self._numbers()[row["device"]]] = row["slowdown"]
            elif row["event"] == "uneven_experts":
                self._loads = row["loads"]
        self._slow = {number: factor for number, factor in self._slow.items() if factor > 1.0}
        if ended := [row for row in rows if row["event"] in ("devices_lost", "paused")]:
            self._change(ended[-1])
            return
        from ray.exceptions import RayError

        with suppress(RayError):  # Ray does not answer now: the run need not end for that
            self._see_lost()
            more = self._see_more if self._next is None else self._see_started
            for see in (self._see_drained, self._see_slow, self._see_uneven, more):
                if asked_to_stop(self.prepared.directory) is None:
                    see()

    def _change(self, ended: dict[str, Any]) -> None:
        """Plan for the devices that there are, reserve them and let the driver go on."""
        was, plan, directory = _devices(self.prepared), self._next, self.prepared.directory
        held = self._reservation.nodes()
        self._take_more()
        self._give_up(draining_nodes())
        lost = ended["event"] == "devices_lost"
        if lost and self._come_back(was):
            plan = self.prepared.plan  # plan.json has it, or a better order that the run has found since
        else:
            if lost or plan is None or plan.parallel.devices > self._could_use():
                plan = self._plan(self.spec.within(self._could_use()))
            plan.save(directory / "plan.json")
            schedule = build_schedule(plan, self.prepared.job.train.batch)
            self.prepared = replace(self.prepared, plan=plan, schedule=schedule, resume=True)
        if lost or _devices(self.prepared) != was or self._reservation.nodes() != held:
            self._slow = {}  # devices have other numbers then: who is slow is found again
        self._hold()
        self._slow_judged = dict(self._slow)
        self._next, self._judged, self._broken_since = None, _devices(self.prepared), None
        go_on(directory)
        keys = ("schedule", "stages", "replicas", "microbatch")
        log_event(
            directory,
            "resized",
            devices=_devices(self.prepared),
            was=was,
            reservation=[part.name for part in self._reservation.parts],
            plan={key: getattr(plan.parallel, key) for key in keys},
            slow={str(device): self._slow[n] for device, n in enumerate(self._numbers()) if n in self._slow},
            message=ended["message"],
        )

    def _take_more(self) -> None:
        """Count the devices that are held for more workers as the run's."""
        if self._more is not None:
            self._taken.append(self._more)
            self._reservation, self._more = self._more.reservation, None

    def _give_up(self, going: set[str]) -> None:
        """Give back what is lost or on nodes that go; whole reservations take a moment to be free again."""
        before = self._reservation.devices
        self._reservation = self._reservation.without(going)
        self._released = self._released or (before > 0 and self._reservation.devices == 0)

    def _come_back(self, devices: int) -> bool:
        """Wait ``wait_s`` for as many devices as there were; return whether they came."""
        deadline = time.monotonic() + self.spec.wait_s
        while self._reservation.devices + self._free() < devices:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _could_use(self) -> int:
        """Return how many devices the run has or could have now."""
        return self._settled() if self._released else self._reservation.devices + self._free()

    def _hold(self) -> None:
        """Hold the devices of the plan: those that the run has, and others beside them or in their place."""
        devices, tensor = _devices(self.prepared), self.prepared.plan.parallel.tensor
        if self._reservation.together == tensor and not self._reservation.kinds:
            self._reservation = self._reservation.at_most(devices)
            result = self._reservation.with_more(devices)
            if result is not None:
                self._reservation, self._released = result, False
                return
        self._reservation.give_back()
        self._reservation, self._released = self._reserve(self.prepared, self._reservation.run_id), False

    def _see_lost(self) -> None:
        """Give the devices back if some have been lost for long and the driver does not see it.

        Ray schedules nothing else while it looks for devices in place of those of a lost node, a new driver neither.
        """
        now = time.monotonic()
        if not self._reservation.is_broken():
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since > self.spec.wait_s + MOST_S:
            self._give_up(set())
            self._broken_since = None

    def _see_drained(self) -> None:
        """Ask the run to pause if nodes that it uses will go soon, so that no step is lost."""
        going = draining_nodes() & self._reservation.nodes()
        if going:
            ask(self.prepared.directory, PAUSE, f"{len(going)} of its nodes will go: {', '.join(sorted(going))}")

    def _numbers(self) -> list[int]:
        """Return the number of each device of the plan."""
        return self.prepared.plan.numbering().by_rank()

    def _see_slow(self) -> None:
        """Ask the run to pause if devices have turned slow, or fast again, and a plan for them as they are pays."""
        if self._slow == self._slow_judged or self._next is not None:
            return
        self._slow_judged = dict(self._slow)
        from raypipe.cost.profile import load_profile
        from raypipe.plan.online.stragglers import choose_at, step_at

        plan, asked, devices = self.prepared.plan, self.prepared.asked, _devices(self.prepared)
        try:
            profile = load_profile(self.prepared.directory / PROFILE)
            if max(plan.parallel.tensor, plan.parallel.experts, plan.parallel.context) > 1 or profile.other_kinds:
                return
            was_s = step_at(self.prepared.job, profile, plan, self._slow)
            better = choose_at(asked, profile, devices, self._slow, SEARCH_S, Watch(Budget(BUDGET_S)))
        except RequestError:  # there is no other plan
            return
        new_s = better.predicted_step_s
        if new_s is None or new_s > (1 - WORTH) * was_s:
            return
        slow = ", ".join(f"device {n} takes {factor:.2f} times as long" for n, factor in sorted(self._slow.items()))
        self._next = better
        self._why = f"{slow or 'no device is slow'}: a step of {new_s:.4f} s expected instead of {was_s:.4f}"

    def _see_uneven(self) -> None:
        """Ask the run to pause if copies that divide experts would have more even loads with them in another order."""
        if self._loads is None or self._next is not None:
            return
        loads, self._loads = self._loads, None
        from raypipe.cost.profile import load_profile
        from raypipe.plan.online.uneven_experts import evened

        try:
            profile = load_profile(self.prepared.directory / PROFILE)
            result = evened(self.prepared.job, profile, self.prepared.plan, loads)
        except RequestError:  # the profile is of whole layers alone
            return
        if result is None or (new_s := result[1].predicted_step_s) is None or new_s > (1 - WORTH) * result[0]:
            return
        self._next = result[1]
        self._why = f"experts in another order: a step of {new_s:.4f} s expected instead of {result[0]:.4f}"

    def _see_more(self) -> None:
        """Ask the run to pause if the cluster has had more devices for a while, and a plan for them pays."""
        if self._next is not None:
            return
        used, now = _devices(self.prepared), time.monotonic()
        could = self.spec.within(used + self._free())
        if could != self._could:
            self._could, self._since = could, now
        if could <= used or could == self._judged or now - self._since < SETTLE_S:
            return
        self._judged = could
        plan = self._plan(could)
        was, new = self.prepared.plan.predicted_step_s, plan.predicted_step_s
        if was is None or new is None or new > (1 - WORTH) * was:
            return
        self._next = plan
        self._why = f"{could - used} more devices: a step of {new:.4f} s expected instead of {was:.4f}"
        self._more = self._warm_up(plan)

    def _see_started(self) -> None:
        """Ask the run to pause for more devices once their processes have started."""
        if self._more is None or self._more.ready():
            ask(self.prepared.directory, PAUSE, self._why)

    def _warm_up(self, plan: Plan) -> Warm | None:
        """Start the processes that a plan needs beside those there are; None where they start when the run pauses."""
        from raypipe.runtime.worker.worker_group import Warm

        reservation = self._reservation
        if reservation.together != plan.parallel.tensor or reservation.kinds:
            return None
        more = reservation.with_more(plan.parallel.devices)
        return None if more is None else Warm(more, reservation)

    def _plan(self, devices: int) -> Plan:
        from raypipe.cost.profile import load_profile
        from raypipe.plan.choose import choose

        try:
            profile = load_profile(self.prepared.directory / PROFILE)
            return choose(self.prepared.asked, profile, devices, search_s=SEARCH_S, watch=Watch(Budget(BUDGET_S))).plan
        except SpecError as error:
            why = f"there is no plan for {devices} devices: {error.where} {error.why}"
            raise RunError("train.elastic", why, error.fix) from error

    def _settled(self) -> int:
        """Return the number of free devices once it no longer changes: Ray counts what is released after a moment."""
        begun = since = time.monotonic()
        result = self._free()
        while (now := time.monotonic()) - begun < MOST_S and now - since < RELEASED_S:
            time.sleep(0.1)
            if (free := self._free()) != result:
                result, since = free, now
        return result

    def _free(self) -> int:
        """Return how many more workers the cluster has room for now."""
        from raypipe.runtime.hosts.reserve import free_workers

        return free_workers(self._reservation.request)


def _devices(prepared: Prepared) -> int:
    return prepared.schedule.devices * prepared.plan.parallel.tensor


class NamedNodes:
    """Drains the nodes that a run's file ``leaving`` names, for notices that reach a node and not Ray."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def look(self) -> None:
        """See whether the file is there, and take it; call it now and then."""
        path = self._directory / LEAVING
        try:
            lines = read_regular(path, MOST_REASON).decode(errors="replace").splitlines()
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            why = f"its file {LEAVING} cannot be read: {error.strerror}"
            log_event(self._directory, "notice", message=why)
            path.unlink(missing_ok=True)
            return
        for line in filter(str.strip, lines):
            if (refusal := self._drain(*line.split()[:2])) is not None:
                log_event(self._directory, "notice", message=f"{LEAVING} says {line.strip()!r}: {refusal}")

    def _drain(self, name: str, seconds: str = f"{NOTICE_S:g}") -> str | None:
        """Return why a node is not drained; None if it is."""
        import ray
        from ray.exceptions import RayError

        try:
            left = float(seconds)
            if not 0 <= left < math.inf:
                raise ValueError(seconds)
        except ValueError:
            return f"{seconds} is no number of seconds"
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            known = {node[key]: node["NodeID"] for node in nodes for key in NODE_NAMES if node.get(key)}
            if name not in known:
                return nearest(name, known)
            address = str(ray.get_runtime_context().gcs_address)
            return drain_node(address, known[name], f"{LEAVING} of {self._directory}", left)
        except RayError as error:
            return f"Ray does not answer: {error}"


class DrainedNodes:
    """Asks a run for a checkpoint when nodes that it uses are drained, so that little is lost when they go."""

    def __init__(self, directory: Path, reservation: Reservation) -> None:
        self._directory, self._reservation = directory, reservation
        self._known: set[str] = set()

    def look(self) -> None:
        """See whether there are more of them; call it now and then."""
        from ray.exceptions import RayError

        try:
            result = draining_nodes() - self._known
            new = result & self._reservation.nodes() if result else result
        except RayError:  # it does not answer now: the run need not end for that
            return
        if not new:
            return
        self._known |= new
        ask(self._directory, SAVE)
        names = ", ".join(sorted(new))
        message = f"{len(new)} of its nodes will go, so a checkpoint is saved now: {names}"
        log_event(self._directory, "notice", message=message)
