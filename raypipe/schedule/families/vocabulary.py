"""1F1B whose head is divided by rows: every device computes the logits of a share of the vocabulary.

A head that one device holds makes that device the slowest, by as much as the vocabulary is large. Its shares are stages
of their own here, one per device, with the ordinary tasks. A share's forward reads what the last block sends, and says
of each token the logsumexp of its own logits and, if it has it, the target's logit. One more stage, which has no
parameters, makes the loss of these. A share's backward only scales what its forward has kept, so the devices wait for
one another once per micro-batch, not twice; its weight gradient is a task that fills gaps.

Source: Yeung et al. 2024 (Vocabulary Parallelism), arXiv:2411.05288, sections 4.3 (the second algorithm) and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families import textbook
from raypipe.schedule.families.greedy import Policy, Unordered, ordered
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task
from raypipe.schedule.kinds import BW
from raypipe.schedule.shape import Shape

AHEAD = 1
"""Forwards of a device beyond those of 1F1B: while one more micro-batch is on its way through the shares."""


def graph_of(devices: int) -> StageGraph:
    """Return the stages of the blocks, the shares, which all read the last block, and the loss, which reads the shares.

    >>> graph_of(2).edges
    ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4))
    """
    shares, loss = range(devices, 2 * devices), 2 * devices
    edges = (*pairwise(range(devices)), *((devices - 1, s) for s in shares), *((s, loss) for s in shares))
    return StageGraph(loss + 1, edges)


def costs_of(blocks: Sequence[float], head: float) -> CostTable:
    """Return the times of a step of which only the work is known: B and W take as long as F, as each does for a block.

    A share's F has two products, of the logits and of the gradient they give back, and so has its W, which computes the
    logits again. Its B only scales.

    Args:
        blocks: the forward of each device's blocks.
        head: the product of the whole head.
    """
    shares, nothing = (2 * head / len(blocks),) * len(blocks), (0.0,) * len(blocks)
    return CostTable(
        forward=(*blocks, *shares, 0.0),
        input_grad=(*blocks, *nothing, 0.0),
        weight_grad=(*blocks, *shares, 0.0),
    )


def one_f_one_b(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B, on a head that is whole or on shares of it.

    With shares, stage s holds one activation more than in 1F1B, min(D - s + 1, N), and the tasks are in the order of a
    list schedule: a free device takes a share's backward first, then a share's forward, then a block's, then a block's
    backward, and a share's weight gradient where nothing else is ready, at most D micro-batches late.

    Raises:
        ScheduleError: one device, or slices, of which the order is not known.
    """
    if shape.vocabulary == "whole":
        return textbook.one_f_one_b(shape, costs)
    depth, count = shape.devices, shape.microbatches
    if depth == 1:
        raise ScheduleError("vocabulary", "one device has nothing to divide a head with", "use whole")
    if shape.slices > 1:
        raise ScheduleError("vocabulary", f"split has no order for {shape.slices} slices", "use whole, or slices: 1")
    placement = (*range(depth), *range(depth), depth - 1)
    loss, everything = 2 * depth, range(count)
    rows: list[list[Task]] = [
        [
            *(Task(kind, d, (m,)) for kind in ("F", BW) for m in everything),
            *(Task(kind, depth + d, (m,)) for kind in ("F", "B", "W") for m in everything),
        ]
        for d in range(depth)
    ]
    rows[-1] += [Task(kind, loss, (m,)) for kind in ("F", "B") for m in everything]
    tasks = Schedule.of_chain("1f1b", [placement], rows, count, Rules(frozen=(loss,)))
    step = Unordered(replace(tasks, graph=graph_of(depth)), costs)
    # Without a limit all weight gradients of the shares would wait for the end of the step, with what they read.
    number = {task: i for i, task in enumerate(step.graph.tasks)}
    for share in range(depth, loss):
        for m in everything[depth:]:
            step.wait(number[Task("F", share, (m,))], number[Task("W", share, (m - depth,))])

    def ahead(stage: int) -> int:
        return depth - stage + AHEAD if stage < depth else count

    def key(task: Task) -> tuple[int, ...]:
        return (task.stage < depth, task.mbs[0], -task.stage)

    made = ordered(step, Policy(("B", "F", BW, "W"), key, ahead=ahead))
    assert made is not None, "no task waits for a later one of its own device"
    return made.schedule
