"""A clock of its own for plans: the makespan and the memory of a step, from the plan's text and the layers' times.

It shares nothing with ``raypipe.schedule.walk``, ``raypipe.cost`` and ``raypipe.plan``: it parses the order itself. It
knows tasks F, R, B, W and BW, W that wait for the incoming gradient alone, several copies of the weights in one order
(Chimera), sums of gradients, and stages that have no W, or no backward, because they are frozen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple


class Layer(NamedTuple):
    forward: float
    input_grad: float
    weight_grad: float
    joint: float
    kept: float
    """Bytes from the F (the R, if it is recomputed) to the end of the W or BW."""
    waiting: float
    """Bytes from the B to the W."""
    state: float
    """Bytes of weights, gradients and optimizer state."""
    arriving: float = 0.0
    """Bytes of its input, which a stage that starts with this layer keeps from its F to its R."""
    gradient: float = 0.0
    """Bytes of gradients that are there from the first W or BW on, if ``state`` leaves them out."""


class Timed(NamedTuple):
    makespan: float
    peaks: list[float]
    """Per device: weights and everything, and activations at the fullest moment."""
    graded: Mapping[tuple[int, int], float]
    """When the last gradient of each (stage, device) is there."""
    free: list[float]
    """Per device, when its last task ends."""


class Before(NamedTuple):
    """What the step before leaves behind."""

    free: Sequence[float]
    """Per device, when it may begin."""
    updated: Mapping[tuple[int, int], float]
    """When each (stage, device) has its new weights."""


Task = tuple[str, int, int, int]
"""Kind, stage, micro-batch, copy of the weights."""


UNKNOWN = r"^(edges|size|versions|zero)\b"


def orders_of(text: str) -> list[list[Task]]:
    """Per device, its tasks."""
    result = []
    for line in text.splitlines():
        if line.startswith("device "):
            words = line.split(":", 1)[1].split()
            read = [re.fullmatch(r"(\d+)(F|R|B|W|BW)(\d+)(?:@(\d+))?", word) for word in words]
            result.append([(m[2], int(m[1]), int(m[3]), int(m[4] or 0)) for m in read if m])
            assert all(read), "a task that this clock does not know"
    assert not re.search(UNKNOWN, text, re.MULTILINE), "a rule that this clock does not know"
    return result


def time_of(
    text: str, cut: Sequence[Sequence[int]], layers: Sequence[Layer], message: Sequence[float] | None = None,
    *, recomputed: Collection[int] | None = None, links: Mapping[tuple[int, int, int], float] | None = None,
    before: Before | None = None,
) -> Timed:  # fmt: skip
    """Run every device's tasks in order, each when what it needs has arrived.

    Args:
        text: the plan's order.
        cut: layers of each stage.
        layers: their times and bytes.
        message: seconds of a message behind each layer, on every link.
        recomputed: layers that an R runs again; all by default.
        links: in place of ``message``, seconds by (device, device, layer).
        before: the step before, if there is one.
    """
    orders = orders_of(text)
    parts = [[layers[i] for i in part] for part in cut]
    again = [[layers[i] for i in part if recomputed is None or i in recomputed] for part in cut]
    total = {
        **{("F", s): sum(x.forward for x in own) for s, own in enumerate(parts)},
        **{("R", s): sum(x.forward for x in own) for s, own in enumerate(again)},
        **{("B", s): sum(x.input_grad for x in own) for s, own in enumerate(parts)},
        **{("W", s): sum(x.weight_grad for x in own) for s, own in enumerate(parts)},
        **{("BW", s): sum(x.joint for x in own) for s, own in enumerate(parts)},
    }
    # A W without a B runs back through its stage all the same; it leaves out the input gradient of the first layer.
    inner = {s: sum(x.input_grad for x in own[1:]) for s, own in enumerate(parts)}
    device = {(s, copy): d for d, order in enumerate(orders) for _, s, _, copy in order}
    last = len(cut) - 1
    known = {task for order in orders for task in order}
    assert len(known) == sum(map(len, orders)), "a task runs twice"
    late = "recompute late" in text  # an R waits for the gradient that it is for
    alone = "w_dep grad" in text  # a W waits for no B of its stage
    ended: dict[Task, float] = {}
    free, at = list(before.free) if before else [0.0] * len(orders), [0] * len(orders)

    def lag(s: int, other: int, copy: int) -> float:
        a, b = device[s, copy], device[other, copy]
        layer = cut[min(s, other)][-1]
        if a == b:
            return 0.0
        return links[a, b, layer] if links is not None else message[layer] if message is not None else 0.0

    def ready(kind: str, s: int, m: int, copy: int) -> float | None:
        needs: list[tuple[Task, int]] = []
        if kind == "F" and s:
            needs.append((("F", s - 1, m, copy), s - 1))
        if kind == "R":
            needs.append((("F", s, m, copy), s))
        if kind == "W" and not alone and ("B", s, m, copy) in known:
            needs.append((("B", s, m, copy), s))
        elif kind in ("B", "BW", "W"):
            remade = ("R", s, m, copy)
            needs.append((remade if remade in known else ("F", s, m, copy), s))
        if s < last and (kind in ("B", "BW") or (kind == "R" and late) or (kind == "W" and needs[0][0][0] != "B")):
            back = "B" if ("B", s + 1, m, copy) in known else "BW"
            needs.append(((back, s + 1, m, copy), s + 1))
        moment = before.updated[s, device[s, copy]] if before and kind == "F" else 0.0
        for what, other in needs:
            if what not in ended:
                return None
            moment = max(moment, ended[what] + lag(s, other, copy))
        return moment

    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                moment = ready(*order[at[d]])
                if moment is None:
                    break
                kind, s, m, copy = order[at[d]]
                takes = total[kind, s] + (inner[s] if kind == "W" and ("B", s, m, copy) not in known else 0.0)
                free[d] = ended[kind, s, m, copy] = max(free[d], moment) + takes
                at[d] += 1
                moved = True
    assert all(k == len(order) for k, order in zip(at, orders, strict=True)), "devices wait for one another"
    graded: dict[tuple[int, int], float] = {}
    for (kind, s, _, copy), moment in ended.items():
        if kind in ("W", "BW"):
            key = s, device[s, copy]
            graded[key] = max(graded.get(key, 0.0), moment)
    peaks = []
    for order in orders:
        held = sum(x.state for s, _ in {(s, copy) for _, s, _, copy in order} for x in parts[s])
        most, done, graded_here = held, set[Task](), set[tuple[int, int]]()
        for kind, s, m, copy in order:
            kept, waiting = sum(x.kept for x in parts[s]), sum(x.waiting for x in parts[s])
            dropped = sum(x.kept for x in again[s]) - parts[s][0].arriving if ("R", s, m, copy) in known else 0.0
            if kind in ("W", "BW") and (s, copy) not in graded_here:
                graded_here.add((s, copy))
                held += sum(x.gradient for x in parts[s])
                most = max(most, held)
            if kind == "B" and (("W", s, m, copy) in done or ("W", s, m, copy) not in known):  # none: it is frozen
                waiting = 0.0
            if kind == "W" and ("B", s, m, copy) not in done:  # the B, if there is one, still needs all
                waiting = 0.0 if ("B", s, m, copy) in known else kept
            held += {"F": kept - dropped, "R": dropped, "B": waiting - kept, "W": -waiting, "BW": -kept}[kind]
            most = max(most, held)
            if kind == "F" and not any((back, s, m, copy) in known for back in ("B", "W", "BW")):
                held -= kept  # nothing is kept without a backward
            done.add((kind, s, m, copy))
        peaks.append(most)
    return Timed(max(free), peaks, graded, free)


def summed(timed: Timed, seconds: Mapping[int, float], lanes: dict[int, float]) -> dict[tuple[int, int], float]:
    """When each (stage, device) has the sum of its gradients over all holders.

    A device sums one stage after another, beside its tasks, in the order in which their last gradients are there at all
    holders. All data-parallel copies do the same at the same time.

    Args:
        timed: the step's tasks.
        seconds: of each stage's sum.
        lanes: per device, when its last sum ended; brought up to date.
    """
    holders: dict[int, list[int]] = {}
    for s, d in timed.graded:
        holders.setdefault(s, []).append(d)
    ready = {s: max(timed.graded[s, d] for d in own) for s, own in holders.items()}
    result = {}
    for s in sorted(ready, key=lambda s: (ready[s], s)):
        end = max(ready[s], *(lanes.get(d, 0.0) for d in holders[s])) + seconds[s]
        lanes.update(dict.fromkeys(holders[s], end))
        result.update({(s, d): end for d in holders[s]})
    return result


def period(step: Callable[[Before | None], Timed], seconds: Mapping[int, float], steps: int = 4) -> tuple[float, Timed]:
    """Steady seconds of a step, each device going on with the next one as soon as its weights are new; the first step.

    Args:
        step: one step, after the one before.
        seconds: of each stage's sum of gradients.
        steps: that are run; the second half counts.
    """
    lanes: dict[int, float] = {}
    before: Before | None = None
    ran, ends = [], []
    for _ in range(steps):
        ran.append(step(before))
        before = Before(ran[-1].free, summed(ran[-1], seconds, lanes))
        ends.append(max(ran[-1].makespan, *before.updated.values()))
    return (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2), ran[0]
