"""A clock of its own for plans: the makespan and the memory of a step, from the plan's text and the layers' times.

It shares nothing with ``raypipe.schedule.walk`` and ``raypipe.cost.memory``: it parses the order itself and knows tasks
F, B, W and BW alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Layer(NamedTuple):
    forward: float
    input_grad: float
    weight_grad: float
    joint: float
    kept: float
    """Bytes from the F to the end of the W or BW."""
    waiting: float
    """Bytes from the B to the W."""
    state: float
    """Bytes of weights, gradients and optimizer state."""


class Timed(NamedTuple):
    makespan: float
    peaks: list[float]
    """Per device: weights and everything, and activations at the fullest moment."""


def orders_of(text: str) -> list[list[tuple[str, int, int]]]:
    """Per device, its tasks as (kind, stage, micro-batch)."""
    found = []
    for line in text.splitlines():
        if line.startswith("device "):
            tasks = line.split(":", 1)[1].split()
            found.append([(m[2], int(m[1]), int(m[3])) for t in tasks if (m := re.fullmatch(r"(\d+)([A-Z]+)(\d+)", t))])
            assert len(found[-1]) == len(tasks), "a task that this clock does not know"
    return found


def time_of(text: str, cut: Sequence[Sequence[int]], layers: Sequence[Layer], message: Sequence[float]) -> Timed:
    """Run every device's tasks in order, each when what it needs has arrived; ``message`` behind each layer."""
    orders = orders_of(text)
    total = {
        (kind, s): sum({"F": x.forward, "B": x.input_grad, "W": x.weight_grad, "BW": x.joint}[kind] for x in own)
        for s, own in enumerate([layers[i] for i in part] for part in cut) for kind in ("F", "B", "W", "BW")
    }  # fmt: skip
    device = {s: d for d, order in enumerate(orders) for _, s, _ in order}
    last = len(cut) - 1
    ended: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)

    def ready(kind: str, s: int, m: int) -> float | None:
        needs: list[tuple[tuple[str, int, int], int]] = []
        if kind == "F" and s:
            needs.append((("F", s - 1, m), s - 1))
        if kind in ("B", "BW"):
            needs.append((("F", s, m), s))
            if s < last:
                back = "B" if ("B", s + 1, m) in known else "BW"
                needs.append(((back, s + 1, m), s + 1))
        if kind == "W":
            needs.append((("B", s, m), s))
        moment = 0.0
        for what, other in needs:
            if what not in ended:
                return None
            lag = message[cut[min(s, other)][-1]] if device[s] != device[other] else 0.0
            moment = max(moment, ended[what] + lag)
        return moment

    known = {task for order in orders for task in order}
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                moment = ready(*order[at[d]])
                if moment is None:
                    break
                kind, s, m = order[at[d]]
                free[d] = ended[kind, s, m] = max(free[d], moment) + total[kind, s]
                at[d] += 1
                moved = True
    assert all(k == len(order) for k, order in zip(at, orders, strict=True)), "devices wait for one another"
    peaks = []
    for order in orders:
        held = sum(x.state for s in {s for _, s, _ in order} for x in (layers[i] for i in cut[s]))
        most = held
        for kind, s, _ in order:
            kept, waiting = (sum(getattr(layers[i], name) for i in cut[s]) for name in ("kept", "waiting"))
            held += {"F": kept, "B": waiting - kept, "W": -waiting, "BW": -kept}[kind]
            most = max(most, held)
        peaks.append(most)
    return Timed(max(free), peaks)
