"""The program runner: runs one device's program of a step, moves its messages, and records when each task ran.

What a task does is its handler's, by the kind of task: kernels on tensors (``executor``) or timed waits
(``emulation``).

While the update before a step is pending (``update.policy``), the runner already runs the first tasks of the program,
its head, on the uncommitted weights, and then commits the update. If the update had to be undone, all messages that the
heads of all devices have sent are stale: every device drains them from its channels and begins the step again as
attempt 1. Which messages these are is known beforehand, since every device sends all messages of its head (blank ones
for tasks it did not run), and a head receives only messages that other heads send.

Hot path: which receives are posted and who waits for whom is decided before the step, so that between two tasks there
are only the message and a few dictionary look-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.models.host_copies import runs_behind
from raypipe.runtime.executor.casts import MessageCast
from raypipe.runtime.process.clock import Spans, clock_for
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.transport.channel import (
    CountsUnreceived,
    Expected,
    IssuesReceives,
    Label,
    Payload,
    Progress,
    Receiver,
    Sender,
    StageIOSpec,
    TensorSpec,
)
from raypipe.runtime.update.policy import UpdatePolicy
from raypipe.schedule.ir import Task
from raypipe.schedule.lowering.programs import Action, Inserted, Message, Program, RunAhead

NO_RUN_AHEAD = RunAhead(0, {})
CPU = torch.device("cpu")
NOTICED_S = 1e-4
"""Shorter waits for messages are not reported: one that has arrived is read in less."""
POLL_S = 5e-5
"""How often the host looks whether a GPU has come to the end of a step."""


Handler = Callable[[Any, Action], None]
"""Runs one task of a runner, its first argument; leaves the tensors to send in the runner's ``p2p_buffers``."""


class Recorder(Protocol):
    """Keeps a device's place in its step for others to read (``recovery.flight_recorder``)."""

    def begin(self, program: Program, step: int) -> None:
        """Begin a step."""

    def at(self, position: int, awaits: int = 0) -> None:
        """Note the task at a position, and which of its messages it waits for, from 1; 0: it runs."""


class ProgramRunner:
    """Runs the programs of one device: owns its channels and the messages that arrived but are not used yet."""

    def __init__(
        self,
        microbatches: int,
        timeout_s: float,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        io_spec: Mapping[tuple[int, int], StageIOSpec],
        device: torch.device = CPU,
        message_cast: MessageCast | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.timeout_s = timeout_s
        self.senders = senders
        self.receivers = receivers
        self.outgoing = Progress()
        for sender in senders.values():
            self.outgoing.add(sender)
        self.io_spec = io_spec
        self.message_cast = message_cast
        self.device = device
        self.clock = clock_for(device)
        # Keys hold micro-batch ids that continue over the steps (step * N + id), because an asynchronous program also
        # runs micro-batches of the next step.
        self.p2p_buffers: dict[tuple[str, int, int, int], Payload] = {}
        self.received = self.received_bytes = 0
        self.message_waits: dict[int, tuple[float, float]] = {}
        """Position of a task in the program -> seconds that the host waited for its messages, and seconds from then to
        the task's start; on CPUs."""
        self.doing: Action | None = None
        """The task that is running, for error messages."""
        self.position = 0
        """Its position in the program."""
        self.handlers: dict[str, Handler] = {}
        """By kind of task. They get the runner, and do not hold it: it is to end when nobody uses it any more."""
        self.turns: Alternation | None = None
        """Runs the two halves of a pair in turns; None: one after the other."""
        self.updates = UpdatePolicy()
        self.hold_updates: Callable[[], None] = lambda: None
        """What each step's updates wait for beside their gradients."""
        self.recorder: Recorder | None = None

    def surround(self, around: Callable[[Handler], Handler]) -> None:
        """Put something around every handler."""
        self.handlers = {kind: around(handler) for kind, handler in self.handlers.items()}

    def forget(self) -> None:
        """Drop the state that the head of the step has left, except ``p2p_buffers``."""

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Get ready for the step's updates; see UpdatePolicy.before_updates."""
        self.hold_updates()
        self.updates.before_updates(times)

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of all channels and groups, for good, also while a collective is under way; return the groups."""
        self.senders, self.receivers, self.outgoing = {}, {}, Progress()
        return self.updates.leave()

    def walk(self, program: Program, step: int) -> NDArray[np.float64]:
        """Run a whole program.

        Returns:
            ``[tasks, 2]``: start and end of every task, in seconds on this host's monotonic clock.

        Raises:
            TransportError: a message did not arrive in time; it names task, peer and micro-batch.
        """
        times = self.issue(program, step)
        return self.times_of(self.clock.end(times))

    def times_of(self, spans: Spans) -> NDArray[np.float64]:
        """Wait for the end of a step that was issued, and until this device's messages need the host no more.

        Raises:
            TransportError: the device, or a message, does not get there in time.
        """
        if runs_behind(self.device):
            deadline = time.monotonic() + self.timeout_s
            while self.outgoing.push() or not spans.ready():
                if time.monotonic() > deadline:
                    for sender in self.senders.values():
                        sender.flush(0.0)  # its error names the peer
                    raise TransportError(
                        "this device",
                        f"did not end its step within {self.timeout_s:g} s",
                        "look at the devices it gets messages from; train.message_timeout_s",
                    )
                time.sleep(POLL_S)
        return spans.times()

    def issue(self, program: Program, step: int) -> NDArray[np.float64]:
        """Run a whole program as far as the host is concerned; a GPU may still be at work when it returns.

        Returns:
            ``[tasks, 2]``: marks of ``clock``.

        Raises:
            TransportError: a message did not arrive in time; it names task, peer and micro-batch.
        """
        self.clock.begin()
        self.step, self.base, self.program = step, step * self.microbatches, program
        self.attempt = self.received = self.received_bytes = 0
        self.message_waits = {}
        times = np.empty((len(program.actions), 2))
        if self.recorder is not None:
            self.recorder.begin(program, step)
        begin = 0
        if self.updates.pending:
            begin = self._run_head(times)
        else:
            self._post({})
        self._run(times, begin, len(program.actions))
        if self.recorder is not None:
            self.recorder.at(len(program.actions))
        if not runs_behind(self.device):  # else ``times_of`` pushes them, when the device has come to them
            for sender in self.senders.values():
                sender.flush(self.timeout_s)
        self.doing = None
        return times

    def _run_head(self, times: NDArray[np.float64]) -> int:
        """Run the head of the program, then commit the last update; return the index of the next task to run."""
        head = self.program.ahead or NO_RUN_AHEAD
        for source, count in head.arrivals.items():
            self._announce(source, 0, count)
        ran, stands = 0, None
        while ran < head.tasks and stands is not False:
            stands = stands or self.updates.commit(wait=False)
            if stands is not False:
                self._run(times, ran, ran + 1)
                ran += 1
        if stands is None:
            stands = self.updates.commit()
        if stands:
            self._post(head.arrivals)
            return head.tasks
        self._break_off(ran, head)
        self.p2p_buffers.clear()
        self.forget()
        self.attempt, self.received, self.received_bytes = 1, 0, 0
        self.message_waits = {}
        self._post({})
        return 0

    def _break_off(self, ran: int, head: RunAhead) -> None:
        """Empty the channels of attempt 0: send the head's remaining messages as blanks, receive the unread ones."""
        actions = self.program.actions
        for message in (m for action in actions[ran : head.tasks] for m in action.sends if not m.local):
            # Nobody uses the values; they are zeros because a receiving stage may read some as indices.
            blank = [torch.zeros(s.shape, dtype=s.dtype, device=self.device) for s in self._specs(message)]
            self.senders[message.dst_device].send(self.label(message), blank)
        used = {m for action in actions[:ran] for m in action.receives}
        for source, count in head.arrivals.items():
            for message in self.program.arrivals[source][:count]:
                if message not in used:
                    self.receivers[source].recv(self.label(message), self.timeout_s)

    def _post(self, announced: Mapping[int, int]) -> None:
        """Post receives for all messages of the step, except the first ``announced[source]`` of each source."""
        for source, messages in self.program.arrivals.items():
            self._announce(source, announced.get(source, 0), len(messages))

    def _announce(self, source: int, begin: int, end: int) -> None:
        messages = self.program.arrivals[source][begin:end]
        self.receivers[source].post([Expected(self.label(m), self._specs(m)) for m in messages])

    def _run(self, times: NDArray[np.float64], begin: int, end: int) -> None:
        mark, handlers, actions = self.clock.mark, self.handlers, self.program.actions
        senders = tuple(self.senders.values())
        waits, measures = True, not runs_behind(self.device)
        clock = time.perf_counter
        note = None if self.recorder is None else self.recorder.at
        for i, action in enumerate(actions[begin:end], begin):
            self.doing, self.position = action, i
            inserted, waited = action.inserted, 0.0
            for position, message in enumerate(action.receives):
                if inserted:
                    self._issue(inserted, position)
                if message.src_device != message.dst_device:
                    if note is not None:
                        note(i, position + 1)
                    began = clock()
                    self.receive(message, action)
                    arrived = clock()
                    waited += arrived - began
            if inserted:
                self._issue(inserted, len(action.receives))
            if note is not None:
                note(i)
            if waits and action.task.kind == "U":
                waits = False
                self.before_updates(times)
            times[i, 0] = mark()
            if measures and waited > NOTICED_S:
                self.message_waits[i] = waited, clock() - arrived
            if self.turns is not None and i + 1 < end and actions[i + 1].joined:
                continue  # the other half runs it, too, once its own messages are here
            first = actions[i - 1] if self.turns is not None and action.joined and i > begin else None
            if first is not None:
                self._run_pair(first, action, times[i - 1 : i + 1])
            elif not action.deferred:
                handlers[action.task.kind](self, action)
            times[i, 1] = mark()
            for message in () if first is None else first.sends:
                if message.src_device != message.dst_device:
                    self.send(message)
            for position, message in enumerate(action.sends, len(action.receives) + 1):
                if inserted:
                    self._issue(inserted, position)
                if message.src_device != message.dst_device:
                    self.send(message)
            if inserted:
                self._issue(inserted, len(action.receives) + 1 + len(action.sends))
            for sender in senders:
                sender.progress()

    def _run_pair(self, first: Action, second: Action, times: NDArray[np.float64]) -> None:
        """Run the two tasks of a pair in turns, and set where the first one's span ends and the second one's begins.

        Each has the time for which it had the turn, so spans neither overlap nor count what the other one hid.

        Args:
            first, second: its actions, whose messages are here.
            times: ``[2, 2]``: their spans, of which the second one's end is not known yet.
        """
        assert self.turns is not None
        if self.position in self.message_waits:
            waited, after = self.message_waits.pop(self.position)
            before, _ = self.message_waits.get(self.position - 1, (0.0, 0.0))
            self.message_waits[self.position - 1] = before + waited, after
        run = (partial(self.handlers[one.task.kind], self, one) for one in (first, second))
        self.turns.run(*run)
        times[0] = times[1, 0], times[1, 0] + self.turns.first_s
        times[1, 0] = times[0, 1]

    def _issue(self, inserted: Sequence[Inserted], position: int) -> None:
        """Issue the receives and all-reduces that ``safe_order`` has inserted here; they keep GPUs from deadlock."""
        for at, what in inserted:
            if at != position:
                continue
            if isinstance(what, Task):
                self.handlers[what.kind](self, Action(what, (), ()))
                continue
            receiver = self.receivers[what.src_device]
            if isinstance(receiver, IssuesReceives):
                receiver.issue(self.label(what), self.timeout_s)

    def io_spec_of(self, src: int, dst: int, mb: int) -> StageIOSpec:
        """Return the dtypes and shapes that stage ``src`` sends to ``dst`` for ``mb``, of this step or (ids from N on)
        of the next, and of the gradients that come back."""
        return self.io_spec[src, dst]

    def _specs(self, message: Message) -> tuple[TensorSpec, ...]:
        """Return the specs of a message's tensors as they are sent, after any cast."""
        specs = self._stage_specs(message)
        return specs if self.message_cast is None else tuple(map(self.message_cast.spec, specs))

    def _stage_specs(self, message: Message) -> tuple[TensorSpec, ...]:
        # A gradient belongs to the output of the stage it goes to.
        if message.direction == "act":
            return self.io_spec_of(message.src_stage, message.dst_stage, message.mb).act
        return self.io_spec_of(message.dst_stage, message.src_stage, message.mb).grad

    def label(self, m: Message) -> Label:
        """Return the label that identifies a message of this step on its channel."""
        ahead, mb = divmod(m.mb, self.microbatches)
        return Label(m.direction, m.src_stage, m.dst_stage, mb, self.step + ahead, self.attempt)

    def receive(self, m: Message, action: Action) -> None:
        """Receive one message into ``p2p_buffers``."""
        try:
            tensors = self.receivers[m.src_device].recv(self.label(m), self.timeout_s)
        except TransportError as error:
            raise TransportError(
                f"{action.task} of step {self.step + 1}, {error.where}", error.why, error.fix
            ) from None
        self.received += 1
        self.received_bytes += sum(t.nbytes for t in tensors)
        if self.message_cast is not None:
            tensors = self.message_cast.unpack(m.direction, tensors, self._stage_specs(m))
        self.p2p_buffers[(m.direction, m.src_stage, m.dst_stage, self.base + m.mb)] = tuple(tensors)

    def send(self, m: Message) -> None:
        """Send one message that a task has left in ``p2p_buffers``, and remove it there."""
        payload: Sequence[Tensor] = self.p2p_buffers.pop((m.direction, m.src_stage, m.dst_stage, self.base + m.mb))
        if self.message_cast is not None:
            payload = self.message_cast.pack(m.direction, payload)
        sender = self.senders[m.dst_device]
        limit = self.program.unreceived.get(m.dst_device, 0)
        if limit and isinstance(sender, CountsUnreceived):
            self._wait_for_room(sender, limit)
        sender.send(self.label(m), payload)

    def _wait_for_room(self, sender: CountsUnreceived, limit: int) -> None:
        """Wait until fewer than ``limit`` messages of a channel are unreceived; they hold memory of the GPU.

        Raises:
            TransportError: the peer does not receive in time.
        """
        deadline = time.monotonic() + self.timeout_s
        while sender.unreceived >= limit:
            self.outgoing.push()  # a peer may need another message first
            if time.monotonic() > deadline:
                sender.flush(0.0)  # its error names the peer
            time.sleep(POLL_S)
