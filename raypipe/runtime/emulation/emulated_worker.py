"""Emulated devices: the real driver, actors, programs and messages; kernels are timed waits.

A task takes its time from the cost table. A message carries the moment at which the emulated link delivers it: its
latency after its bytes have gone over, one message after another on each directed link; until then the receiver holds
it back. So two cores can run a pipeline of sixteen devices at its true proportions, with the real overheads of
dispatch and messages on top. DESIGN section 8.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from raypipe.runtime.cluster.host_report import HostQuestion, HostReport, report_host
from raypipe.runtime.communicators import Communicators, Location, Topology, locate, own_address
from raypipe.runtime.emulation.emulated_all_reduce import AllReduceLane
from raypipe.runtime.process import set_up_process
from raypipe.runtime.runner import ProgramRunner
from raypipe.runtime.shared_clock import SharedClock
from raypipe.runtime.transport.channel import Prepares, Receiver, Sender, StageIOSpec, TakesIn, TensorSpec
from raypipe.runtime.update.norm import Shares
from raypipe.schedule.latency import Comm, latency
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import Action, Message, Program

OVERSHOOT_S = 0.0002
"""``time.sleep`` comes back this late at times; the rest of a wait is spent giving up the processor."""
LOOK_S = 0.0005
"""So long before a task ends its device takes in what has come for the next one."""
STAMP = StageIOSpec((TensorSpec((1,), torch.float64),), (True,))
"""What a message carries: when the link delivers it, on the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSetup:
    """Everything one emulated device needs."""

    rank: int
    topology: Topology
    microbatches: int
    stages: int
    programs: dict[Part, Program]
    durations: dict[Part, tuple[float, ...]]
    """Seconds of each action of each program; of an AR, from the moment its last holder is there and free."""
    latency_s: Comm
    """Of messages between devices, beside their bytes; per link as in a cost table."""
    seconds_per_message: float
    """A message's bytes over the link's bandwidth; 0 for links without a limit."""
    norm: NormPolicy = "none"
    """What updates have to do with a global gradient norm."""
    clip_every: int = 0
    """Every so many steps the norm is too large, and with ``norm="optimistic"`` the update is undone; 0 for never."""


class EmulatedRunner(ProgramRunner):
    """Runs programs by waiting."""

    def __init__(
        self, setup: EmulatedSetup, senders: Mapping[int, Sender], receivers: Mapping[int, Receiver],
        groups: Mapping[str, dist.ProcessGroup], world: dist.ProcessGroup | None, run_clock: SharedClock,
    ) -> None:  # fmt: skip
        io_spec = dict.fromkeys(range(setup.stages), STAMP)
        super().__init__(setup.microbatches, timeout_s=300.0, senders=senders, receivers=receivers, io_spec=io_spec)
        self.setup = setup
        self.run_clock = run_clock
        self.all_reduces = AllReduceLane(groups, run_clock)
        self.shares = Shares(world)
        self._waits_for: int | None = None
        self._link_free: dict[int, float] = {}
        self._prepare = {
            rank: sender.prepare if isinstance(sender, Prepares) else partial(partial, sender.send)
            for rank, sender in senders.items()
        }
        self._ready: deque[Callable[[], None]] = deque()

    def run(self, part: Part, step: int) -> NDArray[np.float64]:
        """Run one step; returns ``[tasks, 2]`` start and end."""
        self._part = part
        self.forget()
        times = self.walk(self.setup.programs[part], step)
        self._finish(times)  # all-reduces that no update waited for
        return times

    def run_task(self, action: Action) -> None:
        """Wait as long as the task takes; what it sends is made ready meanwhile."""
        begin = time.monotonic()
        self._index += 1
        duration = next(self._durations)
        for message in action.receives:
            if not message.local:
                del self.p2p_buffers[self._slot(message)]
        if action.task.kind == "AR":
            self.all_reduces.join(self._index, action.task.stage, duration)
            return
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
        now = time.monotonic()  # not `end`: a device that woke late must not hide that in the link's latency
        for m, stamp in stamps:
            gone = max(now, self._link_free.get(m.dst_device, 0.0)) + self.setup.seconds_per_message
            self._link_free[m.dst_device] = gone
            stamp[0] = self.run_clock.shared(gone + latency(self.setup.latency_s, m.src_stage, m.dst_stage))

    def _take_in(self) -> None:
        """Take in what the next task needs, as far as it has come."""
        following = self._index + 1
        if following < len(self.program.actions):
            for m in self.program.actions[following].receives:
                if not m.local and isinstance(receiver := self.receivers[m.src_device], TakesIn):
                    receiver.take_in()

    def send(self, m: Message) -> None:
        """Send what ``run_task`` has made ready."""
        self._ready.popleft()()

    def _slot(self, m: Message) -> tuple[str, int, int, int]:
        return (m.direction, m.src_stage, m.dst_stage, self.base + m.mb)

    def receive(self, m: Message, action: Action) -> None:
        """Take the message, then hold it back until the emulated link delivers it."""
        super().receive(m, action)
        (delivered,) = self.p2p_buffers[self._slot(m)]
        wait_until(self.run_clock.local(float(delivered)))

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Wait for the all-reduces, then for the global norm or not."""
        self._finish(times)
        if self.setup.norm == "none":
            return
        self.shares.start(self.run_clock.shared(time.monotonic()))
        if self.program.ahead is None:
            wait_until(self._known_at())
        else:
            self._waits_for = self.step

    def update_pending(self) -> bool:
        """See ProgramRunner.uncertain."""
        return self._waits_for is not None

    def commit(self, wait: bool = True) -> bool | None:
        """See ProgramRunner.settle."""
        if self._waits_for is None:
            return True
        if not wait and not (self.shares.ready() and time.monotonic() >= self._known_at()):
            return None
        wait_until(self._known_at())
        done, self._waits_for = self._waits_for + 1, None
        return self.setup.clip_every == 0 or done % self.setup.clip_every > 0

    def _known_at(self) -> float:
        """When, on this host's clock, the norm is known: a link's latency after the last other device was through."""
        through = self.shares.wait(self.outgoing.push)
        slowest = self.setup.latency_s
        lag = (max(slowest) if isinstance(slowest, tuple) else slowest) + self.setup.seconds_per_message
        others = [at for rank, at in enumerate(through) if rank != self.setup.rank]
        return self.run_clock.local(max(others)) + lag if others else 0.0

    def forget(self) -> None:
        """See ProgramRunner.forget."""
        self._durations = iter(self.setup.durations[self._part])
        self._index = -1
        self._ready.clear()

    def _finish(self, times: NDArray[np.float64]) -> None:
        for index, end in self.all_reduces.finish():
            wait_until(end)
            times[index, 1] = time.monotonic()

    def close(self) -> None:
        """End what runs beside the programs."""
        self.all_reduces.close()


def wait_until(moment: float) -> None:
    """Sleep until ``moment`` on the monotonic clock, to a few microseconds."""
    left = moment - time.monotonic()
    while left > 0:
        if left > OVERSHOOT_S:
            time.sleep(left - OVERSHOOT_S)
        else:
            os.sched_yield()
        left = moment - time.monotonic()


class EmulatedStage:
    """The actor of one emulated device."""

    def __init__(self, rank: int, title: str) -> None:
        self.rank, self.title = rank, title
        self.communicators: Communicators | None = None
        self.runner: EmulatedRunner | None = None
        set_up_process(torch.device("cpu"))
        gc.freeze()  # torch's modules stay: a collection in the middle of a task need not walk them

    def __repr__(self) -> str:
        return self.title

    def locate(self) -> Location:
        """Say where this actor runs."""
        return locate(self.rank, self.title, torch.device("cpu"))

    def report(self, question: HostQuestion) -> HostReport:
        """Say whether this actor's node can take part."""
        return report_host(question, own_address())

    def setup(self, setup: EmulatedSetup) -> None:
        """Open the channels."""
        if self.runner is not None:
            self.runner.close()
        if self.communicators is not None:
            self.communicators.close()
        self.communicators = communicators = Communicators(setup.rank, setup.topology, "gloo")
        self.runner = EmulatedRunner(
            setup,
            communicators.senders,
            communicators.receivers,
            communicators.groups,
            communicators.world,
            communicators.clock,
        )

    def run_step(self, step: int, part: Part) -> NDArray[np.float64]:
        """Run one step; returns ``[tasks, 2]`` start and end of each task on the run's clock."""
        assert self.runner is not None, "set up first"
        times: NDArray[np.float64] = self.runner.run_clock.shared(self.runner.run(part, step))
        return times
