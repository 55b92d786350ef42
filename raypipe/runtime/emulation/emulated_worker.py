"""Emulated devices: the real programs and messages, with timed waits in place of kernels.

A task takes as long as the cost table says. A message carries the time at which the emulated link delivers it: its
bytes are transferred after those of earlier messages on the same directed link, and then the latency passes. The
receiver waits until that time. So two cores can run a pipeline of sixteen devices at its true proportions, with the
real overheads of dispatch and messages on top. DESIGN section 8.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.hosts.host_check import HostQuestion, HostReport, report_host
from raypipe.runtime.process.set_up import set_up_process
from raypipe.runtime.process.shared_clock import SharedClock
from raypipe.runtime.setup.communicators import Communicators, Location, Node, Topology, locate
from raypipe.runtime.transport.channel import Prepares, Receiver, Sender, StageIOSpec, TakesIn, TensorSpec
from raypipe.runtime.update.collectives import Push
from raypipe.runtime.update.norm import Shares
from raypipe.runtime.update.policy import UpdatePolicy
from raypipe.schedule.costs import Comm, latencies, latency
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import KINDS, NETWORK
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import Action, Message, Program

# Emulated collectives, which run one after another on each device's network while it computes.


class AllReduceLane:
    """Emulates the collectives of one device with the simulator's rule for their begin.

    One begins when its last holder has issued it and has finished its previous one. A thread exchanges these times with
    the other holders while the device computes.

    Args:
        groups: process groups by name.
        clock: of the run.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], clock: SharedClock) -> None:
        self.groups, self.clock = groups, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raypipe-sums")
        self._ends: dict[int, Future[float]] = {}
        self._free = float("-inf")

    def join(self, index: int, duration: float, group: str) -> None:
        """Issue a collective now; ``index`` names it later, ``group`` the devices that take part: "" for this alone."""
        self._ends[index] = self._thread.submit(self._run, time.monotonic(), duration, group)

    def end_of(self, index: int) -> float:
        """Wait until the end of an issued collective is known; see ``finish``."""
        return self._ends[index].result()

    def finish(self) -> list[tuple[int, float]]:
        """Wait until the ends of all collectives issued since the last call are known.

        Returns (index, end) of each, the end in seconds on this host's monotonic clock, perhaps in the future. Raises
        the error of the thread, if it failed.
        """
        ends, self._ends = self._ends, {}
        return [(index, end.result()) for index, end in ends.items()]

    def _run(self, issued: float, duration: float, name: str) -> float:
        begin = max(issued, self._free)
        if name:
            group = self.groups[name]
            own = torch.full((group.size(),), self.clock.shared(begin), dtype=torch.float64)
            begins = torch.empty_like(own)
            dist.all_to_all_single(begins, own, group=group)  # one hop, as in norm.Shares
            begin = self.clock.local(float(begins.max()))
        self._free = begin + duration
        return self._free

    def close(self) -> None:
        """End the thread after the collectives that were issued."""
        self._thread.shutdown()


# Faults of emulated devices, to see whether what explains a run finds them.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaults:
    """The faults of one emulated device; times in seconds."""

    slow: tuple[tuple[int, int, float], ...] = ()
    """(first step, end, factor): in these steps, counted from 0, its tasks take so many times as long."""
    data_s: float = 0.0
    """In the first forward of each step: the samples come late."""
    host_s: float = 0.0
    """Before each task of a micro-batch: the host starts it late."""
    between_steps_s: float = 0.0
    """Before each step: the driver is late."""
    norm_s: float = 0.0
    """Beyond a message's way, until the global gradient norm is known."""

    def slower(self, step: int) -> float:
        """Return the factor of a step's tasks."""
        factor = 1.0
        for first, end, one in self.slow:
            factor *= one if first <= step < end else 1.0
        return factor


NO_FAULTS = DeviceFaults()


@dataclass(frozen=True, slots=True)
class Routing:
    """How unevenly routers send tokens to the copies that divide experts: in each step another copy gets the most.

    The costs of experts are those of the busiest copy, which the all-to-all of all copies wait for.
    """

    places: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(stage of experts, replica) -> which of how many copies this device is."""
    skew: float = 1.0
    """Tokens of the busiest copy, as a multiple of the mean."""

    def share(self, task: Task, step: int) -> float:
        """Return how long a task takes in a step, as a share of what the busiest copy takes for it."""
        place, copies = self.places.get((task.stage, task.replica), (0, 1))
        if copies == 1 or place == np.random.default_rng(step).integers(copies):
            return 1.0
        return (copies - self.skew) / (copies - 1) / self.skew


OVERSHOOT_S = 0.0002
"""``time.sleep`` may return this late, so the last part of a wait yields the processor in a loop instead."""
LOOK_S = 0.0005
"""How long before the end of a task its device reads messages that have arrived for the next task."""
STAMP = StageIOSpec((TensorSpec((1,), torch.float64),), (True,))
"""Content of a message: when the link delivers it, in seconds on the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSetup:
    """Everything one emulated device needs."""

    rank: int
    topology: Topology
    microbatches: int
    programs: dict[Part, Program]
    durations: dict[Part, tuple[float, ...]]
    """Seconds of each action of each program; an AR counts from when its last holder has issued it and is free."""
    groups: dict[Part, tuple[str, ...]]
    """Per action of each program, the process group of a collective; nothing if the device is alone in it."""
    latency_s: Comm
    """Latency of messages between devices, without the transfer of their bytes; per link as in a cost table."""
    seconds_per_message: float
    """A message's bytes over the link's bandwidth; 0 for links without a limit."""
    waits: tuple[tuple[int, ...], ...] = ()
    """Where stages are sharded or experts divided: per action, the collectives of this device that it waits for."""
    norm: NormPolicy = "none"
    """What updates have to do with a global gradient norm."""
    clip_every: int = 0
    """Every so many steps the norm is too large, and with ``norm="optimistic"`` the update is undone; 0 for never."""
    faults: DeviceFaults = NO_FAULTS
    """What goes wrong on this device."""
    routing: Routing = field(default_factory=Routing)
    """Which of the tokens that travel to experts this device gets."""


class EmulatedUpdates(UpdatePolicy):
    """Waits for the emulated sums, and for the norm as the setup says; makes nothing."""

    def __init__(
        self, setup: EmulatedSetup, sums: AllReduceLane, world: dist.ProcessGroup | None, clock: SharedClock, push: Push
    ) -> None:
        self.setup, self.sums, self.shares, self.clock, self.push = setup, sums, Shares(world), clock, push
        self._done = 0
        """Steps whose norm was waited for, or is."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """See UpdatePolicy.begin_step."""
        self.ahead, self.step = program.ahead is not None, step

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Wait for the all-reduces, and for the global norm unless updates may run ahead of it."""
        self.finish(times)
        if self.setup.norm == "none":
            return
        self.shares.start(self.clock.shared(time.monotonic()))
        self._done = self.step + 1
        if self.ahead:
            self.pending = True
        else:
            wait_until(self._known_at())

    def finish(self, times: NDArray[np.float64]) -> None:
        """Wait for the end of all sums that were started."""
        for index, end in self.sums.finish():
            wait_until(end)
            times[index, 1] = end

    def commit(self, wait: bool = True) -> bool | None:
        """See UpdatePolicy.commit."""
        if not self.pending:
            return True
        if not wait and not (self.shares.ready() and time.monotonic() >= self._known_at()):
            return None
        wait_until(self._known_at())
        self.pending = False
        return self.setup.clip_every == 0 or self._done % self.setup.clip_every > 0

    def _known_at(self) -> float:
        """Return when the norm is known, on this host's clock: one message time after the last other device is done."""
        done = self.shares.wait(self.push)
        lag = max(latencies(self.setup.latency_s), default=0.0) + self.setup.seconds_per_message
        others = [at for rank, at in enumerate(done) if rank != self.setup.rank]
        return self.clock.local(max(others)) + lag + self.setup.faults.norm_s if others else 0.0


class EmulatedRunner(ProgramRunner):
    """Runs programs with timed waits in place of kernels."""

    updates: EmulatedUpdates

    def __init__(
        self,
        setup: EmulatedSetup,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        groups: Mapping[str, dist.ProcessGroup],
        world: dist.ProcessGroup | None,
        run_clock: SharedClock,
    ) -> None:
        super().__init__(
            setup.microbatches, timeout_s=setup.topology.timeout_s, senders=senders, receivers=receivers, io_spec={}
        )
        self.setup = setup
        self.run_clock = run_clock
        self.all_reduces = AllReduceLane(groups, run_clock)
        self.updates = EmulatedUpdates(setup, self.all_reduces, world, run_clock, self.outgoing.push)
        self.handlers = {k: EmulatedRunner._collective if k in NETWORK else EmulatedRunner._wait for k in KINDS}
        self._has_read = False
        self._began: dict[int, float] = {}
        """Position of a task -> when it began, where that was later than its messages and its device allowed."""
        self._link_free: dict[int, float] = {}
        self._prepare = {
            rank: sender.prepare if isinstance(sender, Prepares) else partial(partial, sender.send)
            for rank, sender in senders.items()
        }
        self._ready: deque[Callable[[], None]] = deque()

    def run(self, part: Part, step: int) -> NDArray[np.float64]:
        """Run one step; return ``[tasks, 2]``, start and end in seconds on this host's monotonic clock."""
        self._part = part
        self.forget()
        if self.setup.faults.between_steps_s:
            wait_until(time.monotonic() + self.setup.faults.between_steps_s)
        self.updates.begin_step(self.setup.programs[part], step, 0.0)
        times = self.walk(self.setup.programs[part], step)
        self.updates.finish(times)  # all-reduces that no update waited for
        for index, began in self._began.items():  # until then it waited for its weights, or for its host
            if index in self.message_waits:
                waited, after = self.message_waits[index]
                self.message_waits[index] = waited, after + began - float(times[index, 0])
            times[index, 0] = began
        return times

    def _collective(self, action: Action) -> None:
        """Issue a collective, which runs beside compute."""
        self._index += 1
        self.all_reduces.join(self._index, next(self._durations), self.setup.groups[self._part][self._index])

    def _wait(self, action: Action) -> None:
        """Wait as long as the task takes, preparing its messages meanwhile."""
        self._index += 1
        faults = self.setup.faults
        begin = time.monotonic() + (faults.host_s if action.task.mbs else 0.0)
        for index in self.setup.waits[self._index] if self.setup.waits else ():
            begin = max(begin, self.all_reduces.end_of(index))
        if begin > time.monotonic():
            wait_until(begin)
            begin = self._began[self._index] = time.monotonic()
        duration = next(self._durations) * faults.slower(self.step) * self.setup.routing.share(action.task, self.step)
        if action.task.kind == "F" and not self._has_read:  # a device reads a step's samples at once
            self._has_read = True
            duration += faults.data_s
        for message in action.receives:
            if not message.local:
                del self.p2p_buffers[self._slot(message)]
        end = begin + duration
        stamps = []
        for m in action.sends:
            if not m.local:
                stamp = np.empty(1)
                self._ready.append(self._prepare[m.dst_device](self.label(m), [torch.from_numpy(stamp)]))
                stamps.append((m, stamp))
        early = end - LOOK_S - time.monotonic()
        if early > 0:
            time.sleep(early)
            self._take_in()
        wait_until(end)
        now = time.monotonic()  # not `end`: a late wake-up must not be hidden in the link's latency
        for m, stamp in stamps:
            gone = max(now, self._link_free.get(m.dst_device, 0.0)) + self.setup.seconds_per_message
            self._link_free[m.dst_device] = gone
            stamp[0] = self.run_clock.shared(gone + latency(self.setup.latency_s, m.src_stage, m.dst_stage))

    def _take_in(self) -> None:
        """Read the messages of the next task that have arrived."""
        following = self._index + 1
        if following < len(self.program.actions):
            for m in self.program.actions[following].receives:
                if not m.local and isinstance(receiver := self.receivers[m.src_device], TakesIn):
                    receiver.take_in()

    def send(self, m: Message) -> None:
        """Send the next message that the task has prepared."""
        self._ready.popleft()()

    def io_spec_of(self, src: int, dst: int, mb: int) -> StageIOSpec:
        """See ProgramRunner.io_spec_of; every message is a stamp, whatever its emulated size."""
        return STAMP

    def _slot(self, m: Message) -> tuple[str, int, int, int]:
        return (m.direction, m.src_stage, m.dst_stage, self.base + m.mb)

    def receive(self, m: Message, action: Action) -> None:
        """Receive the message, then wait until the emulated link delivers it."""
        super().receive(m, action)
        (delivered,) = self.p2p_buffers[self._slot(m)]
        wait_until(self.run_clock.local(float(delivered)))

    def forget(self) -> None:
        """See ProgramRunner.forget."""
        self._durations = iter(self.setup.durations[self._part])
        self._index = -1
        self._has_read = False
        self._began.clear()
        self._ready.clear()

    def close(self) -> None:
        """End the thread of the emulated all-reduces."""
        self.all_reduces.close()


def wait_until(moment: float) -> None:
    """Sleep until ``moment`` (seconds on the monotonic clock), to within a few microseconds."""
    left = moment - time.monotonic()
    while left > 0:
        if left > OVERSHOOT_S:
            time.sleep(left - OVERSHOOT_S)
        else:
            os.sched_yield()
        left = moment - time.monotonic()


def set_up_device() -> None:
    """Make the settings of a device's process."""
    set_up_process(torch.device("cpu"))


class EmulatedWorker:
    """Serves the calls for one emulated device, in a process of its own (``device_processes``)."""

    def __init__(self, rank: int, title: str, node: str, address: str) -> None:
        self.rank, self.title, self.node = rank, title, Node(node, address)
        self.communicators: Communicators | None = None
        self.runner: EmulatedRunner | None = None
        set_up_device()
        gc.freeze()  # so that a garbage collection during a task does not scan torch's modules

    def locate(self) -> Location:
        """Return where this worker runs, and listen there for the rendezvous."""
        return locate(self.rank, self.title, torch.device("cpu"), self.node)

    def report(self, question: HostQuestion) -> HostReport:
        """Report whether this worker's node can work with the others."""
        return report_host(question, self.node.address)

    def setup(self, setup: EmulatedSetup) -> None:
        """Open the channels and make the runner, closing those of an earlier setup."""
        if self.runner is not None:
            self.runner.close()
        if self.communicators is not None:
            self.communicators.close()
        self.communicators = communicators = Communicators(setup.rank, setup.topology, "gloo", self.node.address)
        self.runner = EmulatedRunner(
            setup,
            communicators.senders,
            communicators.receivers,
            communicators.groups,
            communicators.world,
            communicators.clock,
        )

    def run_step(self, step: int, part: Part) -> tuple[NDArray[np.float64], Mapping[int, tuple[float, float]]]:
        """Run one step.

        Returns:
            ``[tasks, 2]``, start and end of each task in seconds on the run's clock; and the waits for messages.
        """
        assert self.runner is not None, "set up first"
        times: NDArray[np.float64] = self.runner.run_clock.shared(self.runner.run(part, step))
        return times, self.runner.message_waits
