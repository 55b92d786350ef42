"""How long a step of a plan takes and whether it fits, by a clock that shares nothing with any of the planners.

The steady time of a step: compute tasks and messages (``tests/plan/joint/clock.py``), and sums of gradients over all
holders of a stage, in a flat ring or first inside hosts, whichever is shorter; a device goes on with the next step as
soon as its weights are new. The devices of the copies follow one another, host by host. The clock counts weights,
gradients from the first of them on, optimizer state and activations, and no buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tests.bench.planners.cases import Case
from tests.plan.joint.clock import Layer, orders_of, period, time_of

STATE, GRADIENT = 16.0, 4.0
"""Bytes of a parameter with its gradient and two values of Adam, and of the gradient alone; all in float32."""


class Choice(NamedTuple):
    """A plan, as any system may write it down."""

    words: str
    text: str
    """The order of one data-parallel copy."""
    cut: Sequence[Sequence[int]]
    copies: int
    microbatch: int
    tensor: int = 1
    """Devices of a group, which counts as one device of the order."""
    recomputed: Collection[int] | None = None
    """Layers that an R runs again; all by default."""
    predicted_s: float | None = None
    """What the system itself says of its step."""
    copies_inside: bool = False
    """Whether the copies of a stage follow one another on hosts, and not the stages of a copy."""


class Verdict(NamedTuple):
    choice: Choice
    seconds: float
    fullest: float
    """Bytes of the device that holds most."""
    fits: bool


def judge(case: Case, choice: Choice) -> Verdict:
    """Time the plan on the case's cluster."""
    profile = case.profiles[choice.tensor]
    per_host = case.cluster.per_host // choice.tensor
    layers, n = [], choice.microbatch
    for i, x in enumerate(profile.layers):
        t = x.times[n]
        arriving = profile.layers[i - 1].output_bytes * n if i else 0.0
        layers.append(Layer(t.forward, t.input_grad, t.weight_grad, t.joint, x.kept_bytes * n, x.waiting * n,
                            (STATE - GRADIENT) * x.parameters, arriving, GRADIENT * x.parameters))  # fmt: skip
    width = choice.text.count("\ndevice ") + choice.text.startswith("device ")
    used = width * choice.copies
    assert used * choice.tensor <= case.cluster.devices, "the plan takes more devices than there are"

    def number(c: int, d: int) -> int:
        return d * choice.copies + c if choice.copies_inside else c * width + d

    def message(a: int, b: int, layer: int) -> float:
        """Over the slowest of the copies' links; those that leave a host at the same time share its card."""
        ends = [(number(c, a) // per_host, number(c, b) // per_host) for c in range(choice.copies)]
        leaving = Counter(x for x, y in ends if x != y)
        link = profile.between if leaving else profile.inside
        users = max(1.0, max(leaving.values(), default=0) / profile.host_links)
        return link.alpha_s + profile.layers[layer].output_bytes * n * link.beta_s_per_byte * users

    ends = [part[-1] for part in choice.cut]
    links = {
        (a, b, layer): message(a, b, layer) for a in range(width) for b in range(width) if a != b for layer in ends
    }
    devices: dict[int, set[int]] = {s: set() for s in range(len(choice.cut))}
    for d, order in enumerate(orders_of(choice.text)):
        for _, s, _, _ in order:
            devices[s].add(d)
    sums = {}
    for s, part in enumerate(choice.cut):
        holders = [number(c, d) for c in range(choice.copies) for d in devices[s]]
        size = GRADIENT * sum(profile.layers[i].parameters for i in part)
        inside, between = profile.inside, profile.between
        sums[s] = ring_sum(
            holders, per_host, used, size, (inside.alpha_s, inside.beta_s_per_byte),
            (between.alpha_s, between.beta_s_per_byte),
        )  # fmt: skip
    seconds, first = period(
        lambda before: time_of(
            choice.text, choice.cut, layers, links=links, recomputed=choice.recomputed, before=before
        ), sums,
    )  # fmt: skip
    fullest = max(first.peaks)
    return Verdict(choice, seconds, fullest, fullest <= case.cluster.memory)


def ring_sum(
    holders: Sequence[int], per_host: int, used: int, size: float, inside: tuple[float, float],
    between: tuple[float, float],
) -> float:  # fmt: skip
    """Seconds of an all-reduce over some of the ``used`` devices while the others do theirs.

    A host's devices share its network card. One ring enters every host once; with two levels each of a host's k holders
    sends a k-th.

    Args:
        holders: numbers of the devices.
        per_host: devices of a host.
        used: devices that are used, the first so many.
        size: bytes.
        inside: latency of a message in a host, and seconds a byte.
        between: the same between two hosts.

    >>> ring_sum([0, 1], 2, 2, 100.0, (1.0, 0.5), (9.0, 9.0))
    52.0
    """
    hosts = Counter(d // per_host for d in holders)
    r, k, groups = len(holders), max(hosts.values()), len(hosts)
    if r == 1:
        return 0.0
    if groups == 1:
        return _ring(r, size, *inside)
    alpha, beta = between
    rings = max(1, min(per_host, used) // k)  # of other stages, which enter the host as well
    flat = _ring(r, size, alpha, beta * rings)
    levels = _ring(k, size, *inside) + _ring(groups, size / k, alpha, beta * rings * k)
    return min(flat, levels)


def _ring(count: int, size: float, alpha: float, beta: float) -> float:
    return 2 * (count - 1) * (alpha + size / count * beta)
