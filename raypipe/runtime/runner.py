"""The program runner: walks one device's program of a step, moves its messages, and records when each task ran.

What a task does is a subclass's business: kernels on tensors (``executor``) or timed waits (``emulation``).

Hot path: everything that can be decided before the step is decided before it (what is posted, who waits for whom), so
that between two tasks there is only the message and a few dictionary look-ups.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Receiver, Sender, TensorSpec, Wire
from raypipe.schedule.messages import Action, Message, Program

Payload = tuple[Tensor, ...]
"""The tensors one stage hands to another for one micro-batch."""


class ProgramRunner(ABC):
    """One device: its channels, and the messages that have come and not been used yet."""

    def __init__(
        self,
        microbatches: int,
        timeout_s: float,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        wire: Mapping[int, Wire],
    ) -> None:
        self.microbatches = microbatches
        self.timeout_s = timeout_s
        self.senders = senders
        self.receivers = receivers
        self.wire = wire
        # Micro-batch ids below count on over the steps (step * N + id): an asynchronous program reaches into the next.
        self.mail: dict[tuple[str, int, int, int], Payload] = {}
        self.received = 0

    @abstractmethod
    def run_task(self, action: Action) -> None:
        """Do one task; leave what it sends in ``mail``."""

    @abstractmethod
    def before_updates(self, program: Program, times: NDArray[np.float64]) -> None:
        """Called before the first U of a step: wait for what other devices contribute. Part of no task."""

    def walk(self, program: Program, step: int) -> NDArray[np.float64]:
        """Run a whole program; returns ``[tasks, 2]`` start and end in seconds on this host's monotonic clock.

        Raises:
            TransportError: a message did not come in time; names task, peer and micro-batch.
        """
        self.step, self.base, self.program = step, step * self.microbatches, program
        self.received = 0
        for source, messages in program.arrivals.items():
            self.receivers[source].post([Expected(self._label(m), self._specs(m)) for m in messages])
        times = np.empty((len(program.actions), 2))
        clock = time.monotonic
        senders = tuple(self.senders.values())
        waits = True
        for i, action in enumerate(program.actions):
            for message in action.receives:
                if message.src_device != message.dst_device:
                    self.receive(message, action)
            if waits and action.task.kind == "U":
                waits = False
                self.before_updates(program, times)
            times[i, 0] = clock()
            self.run_task(action)
            times[i, 1] = clock()
            for message in action.sends:
                if message.src_device != message.dst_device:
                    self._send(message)
            for sender in senders:
                sender.progress()
        for sender in senders:
            sender.flush(self.timeout_s)
        return times

    def _specs(self, message: Message) -> tuple[TensorSpec, ...]:
        # A gradient belongs to the output of the stage it goes to.
        if message.direction == "act":
            return self.wire[message.src_stage].act
        return self.wire[message.dst_stage].grad

    def _label(self, m: Message) -> Label:
        ahead, mb = divmod(m.mb, self.microbatches)
        return Label(m.direction, m.src_stage, m.dst_stage, mb, self.step + ahead)

    def receive(self, m: Message, action: Action) -> None:
        """Take one message into ``mail``."""
        try:
            tensors = self.receivers[m.src_device].recv(self._label(m), self.timeout_s)
        except TransportError as error:
            raise TransportError(
                f"{action.task} of step {self.step + 1}, {error.where}", error.why, error.fix
            ) from None
        self.received += 1
        self.mail[(m.direction, m.src_stage, m.dst_stage, self.base + m.mb)] = tuple(tensors)

    def _send(self, m: Message) -> None:
        payload = self.mail.pop((m.direction, m.src_stage, m.dst_stage, self.base + m.mb))
        self.senders[m.dst_device].send(self._label(m), payload)
