"""Decide whether GPUs that run given operations can deadlock, whatever their speed.

A process (one per GPU) has a host, which issues operations in a fixed order, and streams, which run them. What is
modelled, and why it suffices:

- The host issues one operation after another. Before it issues one, it may wait for *announcements*: the envelopes that
  another host sends when it comes to an operation (``transport.gpu.nccl``). A *host* operation stops the host until it
  is done: reading a number from the GPU, flushing, the exchange of the gradient norm.
- A stream runs its operations in the order of issue. An operation also waits for events of its own process (``after``).
- Operations that share a *meeting* (a send with its receive; the members of an all-reduce; all messages of one grouped
  NCCL call at once) run at the same time, when all of them are at the head of their queue: an NCCL kernel occupies its
  place until its peers are there too.
- Streams feed hardware queues, as many as CUDA_DEVICE_MAX_CONNECTIONS says. The operations of one queue run one after
  another in the order of issue, whatever their streams: one that waits blocks those behind it. Real queues block less
  (a kernel that has started lets the next one start); what finishes here, finishes there.
- CUDA does not document which streams share a queue. With at least as many queues as streams, each stream has its own.
  With fewer, any mapping is possible, and the worst one puts all streams on one queue: merging two queues only adds
  pairs of operations of which the second waits for the first, and takes away none. With one queue, nothing is assumed
  about progress between streams, which CUDA indeed does not promise (NCCL issue 783).

All of these are rules of the form "x waits for y", without a choice: nothing that happens can take away another
operation's turn. So the end does not depend on the order in which things happen, and some operations never run if and
only if the waits contain a circle. ``find_circle`` looks for one, in time linear in operations and waits.

Not modelled: kernels that wait for a free multiprocessor. Kernels without a meeting end by themselves; those with one
wait while they occupy a few multiprocessors each, and there are at most as many as streams.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedule.garbage_collection import no_collection

HOST = "host"
"""The stream of host operations."""


@dataclass(frozen=True, slots=True)
class GpuOperation:
    """One operation of a process, in the order in which its host issues them."""

    name: str
    """For errors."""
    stream: str
    """The stream that runs it, or HOST."""
    after: tuple[int, ...] = ()
    """Operations of the same process, by position, that have to be done before it runs."""
    meetings: tuple[Hashable, ...] = ()
    """Transfers and collectives that it is an end of."""
    announced: tuple[Hashable, ...] = ()
    """Meetings whose other members' hosts must have come to them before this host issues the operation."""


_OWN = ("follows", "runs after the issue of")
"""Waits of an operation's run for its own issue, which nobody needs to read."""


@dataclass(frozen=True, slots=True)
class Circle:
    """Operations that wait for each other: each entry for the next, the last for the first."""

    waits: tuple[tuple[int, GpuOperation, str], ...]
    """(process, operation, how it waits for the next entry or, in a transfer, for the other end of that)."""

    def __str__(self) -> str:
        said = [w for w in self.waits if w[2] not in _OWN]
        return "; ".join(f"{op.name} (device {process}) {why}" for process, op, why in said or self.waits)


def streams(operations: Sequence[GpuOperation]) -> int:
    """Return the number of streams that a process uses."""
    return len({op.stream for op in operations} - {HOST})


@no_collection()
def find_circle(
    processes: Sequence[Sequence[GpuOperation]], queues: int, members: Mapping[Hashable, int] | None = None
) -> Circle | None:
    """Find operations that can never run, or return None if every execution finishes.

    Args:
        processes: per process, its operations.
        queues: hardware queues of each process, at least 1.
        members: number of operations that each meeting takes; 2 where it is not given.

    Raises:
        ScheduleError: a meeting has too few or too many operations.
    """
    return _Waits(processes, queues, members or {}).circle()


def check_streams(
    processes: Sequence[Sequence[GpuOperation]], queues: int, members: Mapping[Hashable, int] | None = None
) -> None:
    """Check that every execution finishes; the arguments are those of ``find_circle``.

    Raises:
        ScheduleError: operations can wait for each other for ever; it names them.
    """
    circle = find_circle(processes, queues, members)
    if circle is not None:
        needed = max(map(streams, processes), default=1)
        raise ScheduleError(
            f"order of GPU operations with {queues} hardware queue{'s' * (queues != 1)}",
            f"devices can wait for each other for ever; each of these waits for the next: {circle}",
            f"set CUDA_DEVICE_MAX_CONNECTIONS to at least {needed} on every node, or choose another schedule"
            if queues < needed
            else "issue transfers in one order on both devices",
        )


class _Waits:
    """The graph of waits. Operation i has two nodes: its issue, and its run, which members of a meeting share."""

    def __init__(
        self, processes: Sequence[Sequence[GpuOperation]], queues: int, members: Mapping[Hashable, int]
    ) -> None:
        self.operations = [op for process in processes for op in process]
        self.process = [p for p, process in enumerate(processes) for _ in process]
        count = len(self.operations)
        # Nodes: 0 to count - 1 are announcements (the host has come here), then issues, then runs.
        self.first = count
        self.edges: list[list[tuple[int, int, str]]] = [[] for _ in range(3 * count)]
        """Per node, what waits for it: the node, the operation that it is, and why it waits."""
        self._shared = list(range(count))
        meeting: dict[Hashable, list[int]] = {}
        for i, op in enumerate(self.operations):
            for key in op.meetings:
                meeting.setdefault(key, []).append(i)
        for key, ends in meeting.items():
            if len(ends) != members.get(key, 2):
                i = ends[0]
                raise ScheduleError(
                    f"device {self.process[i]}, {self.operations[i].name}",
                    f"{len(ends)} of {members.get(key, 2)} devices take part",
                    "give it one end on each of them",
                )
            for other in ends[1:]:
                self._shared[self._find(other)] = self._find(ends[0])
        base = 0
        for process in processes:
            one = streams(process) > queues
            last: dict[str, int] = {}
            for k, op in enumerate(process):
                i = base + k
                self._wait(i, count + i, i, "follows")
                for key in op.announced:
                    for other in meeting.get(key, ()):
                        if self.process[other] != self.process[i]:
                            self._wait(other, count + i, i, "is issued after the announcement of")
                for j in op.after:
                    self._wait(self._run(base + j), self._run(i), i, "waits for")
                self._wait(count + i, self._run(i), i, "runs after the issue of")
                if k + 1 < len(process):
                    self._wait(count + i, i + 1, i + 1, "is issued after")
                    if op.stream == HOST:
                        self._wait(self._run(i), i + 1, i + 1, "is issued after the host has done")
                if op.stream != HOST:
                    queue = "" if one else op.stream
                    if queue in last:
                        self._wait(self._run(last[queue]), self._run(i), i, "is queued behind")
                    last[queue] = i
            base += len(process)

    def _find(self, i: int) -> int:
        while self._shared[i] != i:
            self._shared[i] = self._shared[self._shared[i]]
            i = self._shared[i]
        return i

    def _run(self, i: int) -> int:
        return 2 * self.first + self._find(i)

    def _wait(self, before: int, node: int, operation: int, why: str) -> None:
        """Node waits for ``before``; a shared run that waits for itself is a circle as well."""
        self.edges[before].append((node, operation, why))

    def circle(self) -> Circle | None:
        """A circle of waits, or None."""
        left = [0] * len(self.edges)
        for waiting in self.edges:
            for node, _, _ in waiting:
                left[node] += 1
        ready = [node for node, waits in enumerate(left) if not waits]
        for node in ready:  # grows
            for later, _, _ in self.edges[node]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        if len(ready) == len(self.edges):
            return None
        # Every node that is left waits for another one that is left: go back along these until one comes twice.
        before: dict[int, tuple[int, int, str]] = {}
        for node, waiting in enumerate(self.edges):
            if left[node]:
                before.update({later: (node, i, why) for later, i, why in waiting if left[later]})
        seen: dict[int, int] = {}
        path: list[tuple[int, str]] = []
        node = next(iter(before))
        while node not in seen:
            seen[node] = len(path)
            node, i, why = before[node]
            path.append((i, why))
        return Circle(tuple((self.process[i], self.operations[i], why) for i, why in path[seen[node] :]))
