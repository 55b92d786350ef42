"""DualPipe and its V-shaped form, and interleaved 1F1B with overlap: a forward runs together with a backward, F||B.

Where tokens travel to experts, one half of such a pair computes while the other's tokens are under way. A pair takes
as long as the cost table says (``CostTable.together``); without experts that is the sum of its halves.
"""

from __future__ import annotations

from collections import deque

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.chimera import check_bidirectional, placement
from raypipe.schedule.families.textbook import interleaved_orders
from raypipe.schedule.families.zero_bubble import vee
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BW, Kind
from raypipe.schedule.passes.backward import insert_weights
from raypipe.schedule.shape import Shape


class _DualOrder:
    """Builds the order of one device, which alternates between two streams of micro-batches, 0 and 1."""

    def __init__(self, streams: tuple[tuple[int, int, range], tuple[int, int, range]]) -> None:
        """Take the stage, the replica and the micro-batches of each stream."""
        self.streams = streams
        self.done: dict[tuple[Kind, int], int] = {}
        self.tasks: list[Task] = []
        self.joined: list[Task] = []
        self.weights: deque[Task] = deque()
        """Weight gradients that are left for later, the oldest first."""

    def forward(self, stream: int) -> None:
        self._next("F", stream)

    def backward(self, stream: int, split: bool = False) -> None:
        """Run the next backward; if ``split``, only its B."""
        task = self._next("B" if split else BW, stream)
        if split:
            self.weights.append(task._replace(kind="W"))

    def weight(self) -> None:
        """Run the oldest weight gradient that is left."""
        if self.weights:
            self.tasks.append(self.weights.popleft())

    def together(self, forward: int, backward: int) -> None:
        """Pair the next forward of one stream with the next backward of the other."""
        self.forward(forward)
        self.backward(backward)
        self.joined.append(self.tasks[-1])

    def _next(self, kind: Kind, stream: int) -> Task:
        stage, replica, ids = self.streams[stream]
        n = self.done.get((way := "F" if kind == "F" else BW, stream), 0)
        self.done[way, stream] = n + 1
        self.tasks.append(Task(kind, stage, (ids[n],), replica))
        return self.tasks[-1]

    def run(self, depth: int, place: int, count: int) -> None:
        """Fill, alternate, drain; step by step as the authors' code names them.

        Args:
            depth: stages that a micro-batch passes before it turns (V) or meets the other direction.
            place: this device's, 0 for the first one.
            count: micro-batches of each stream; of a V, where both are the same ones, of it.
        """
        ahead = depth - place - 1
        for _ in range(2 * ahead):  # 1: F0
            self.forward(0)
        for _ in range(place + 1):  # 2: F0 F1
            self.forward(0)
            self.forward(1)
        for _ in range(ahead):  # 3: B1 W1 F1
            self.backward(1, split=True)
            self.weight()
            self.forward(1)
        for n in range(count - 2 * depth + place + 1):  # 4: F0||B1 F1||B0
            if n == 0 and place == depth - 1:  # apart, the next device gets its input sooner
                self.forward(0)
                self.backward(1)
            else:
                self.together(0, 1)
            self.together(1, 0)
        for _ in range(ahead):  # 5: B1 F1||B0
            self.backward(1)
            self.together(1, 0)
        split = False
        for n in range(place + 1):  # 6: B1 B0, the second half of them split
            split = split or (n == (place + 1) // 2 and place % 2 == 1)
            self.backward(1, split)
            split = split or (n == (place + 1) // 2 and place % 2 == 0)
            self.backward(0, split)
        for _ in range(ahead):  # 7: W B0
            self.weight()
            self.backward(0, split=True)
        for _ in range(place + 1):  # 8: W
            self.weight()


def dualpipev(shape: Shape, costs: CostTable) -> Schedule:
    """DualPipe cut in half: stages d and 2D-1-d are on device d, and a micro-batch comes back the way it went.

    The bubble of a device is (D-1)(F&B + B - 3W) of chunk times, with F&B the time of a pair and B that of a whole
    backward; a device holds 2D + 1 activations of a chunk. This is DualPipe's with twice the devices.

    Source: Qi et al. 2025, "DualPipe could be better without the Dual" (Sea AI Lab); DeepSeek-AI,
    github.com/deepseek-ai/DualPipe, dualpipev.py, whose steps these are.
    """
    depth, count = shape.devices, shape.microbatches
    _check_many(count, 2 * depth)
    where = vee(shape)
    orders, joined = [], []
    for d in range(depth):
        order = _DualOrder(((d, 0, range(count)), (2 * depth - 1 - d, 0, range(count))))
        order.run(depth, d, count)
        orders.append(order.tasks)
        joined += order.joined
    return Schedule.of_chain("dualpipev", [where], orders, count, joined=joined)


def dualpipe(shape: Shape, costs: CostTable) -> Schedule:
    """Run two opposite pipelines, and pair every forward of one with a backward of the other in steady state.

    The bubble of a device is (D/2 - 1)(F&B + B - 3W), with F&B the time of a pair and B that of a whole backward; a
    device holds D + 1 activations and two stages' weights. Each direction runs half of the micro-batches.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe,
    dualpipe.py, whose steps these are.
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    _check_many(count, 2 * depth)
    if count % 2:
        why = f"{count} micro-batches; the two directions share them evenly"
        raise ScheduleError("microbatches", why, f"use {count - 1} or {count + 1}")
    half = count // 2
    down, up = range(half), range(half, count)
    orders, joined = [], []
    for d in range(depth):
        streams = (d, 0, down), (depth - 1 - d, 1, up)
        near = d < depth // 2  # the stream that starts nearer comes first
        order = _DualOrder(streams if near else streams[::-1])
        order.run(depth // 2, min(d, depth - 1 - d), half)
        orders.append(order.tasks)
        joined += order.joined
    return Schedule.of_chain("dualpipe", placement(depth, 2), orders, count, joined=joined)


def interleaved_overlap(shape: Shape, costs: CostTable) -> Schedule:
    """Interleaved 1F1B with one more forward ahead, so that each forward of the steady state is paired with a backward.

    After its last forward, a device splits its backwards, and weight gradients wait for idle time. Device d holds at
    most 2(D-1-d) + (V-1)D + 2 activations of a chunk. With F = B = W of a chunk and D dividing N, the makespan is
    (3VN + 2D - 1)F. With one chunk, a stage warms up twice as long as in 1F1B.

    Source: NVIDIA, Megatron Core ("combined 1F1B", ``overlap_moe_expert_parallel_comm`` and
    ``delay_wgrad_compute``), github.com/NVIDIA/Megatron-LM.
    """
    depth, chunks = shape.devices, shape.chunks
    orders, joined = [], []
    for order, ahead in interleaved_orders(shape, more=1):
        drain = len(order) - ahead  # as many backwards are left as there were forwards ahead
        joined += order[ahead + 1 : drain : 2]
        orders.append(order[:drain] + [task._replace(kind=kind) for task in order[drain:] for kind in ("B", "W")])
    where = [[s % depth for s in range(depth * chunks)]]
    made = Schedule.of_chain("interleaved-overlap", where, orders, shape.microbatches, joined=joined)
    return insert_weights(made, costs)


def _check_many(count: int, least: int) -> None:
    if count < least:
        why = f"{count} micro-batches; the steady state begins with {least}"
        raise ScheduleError("microbatches", why, f"use {least} or more")
