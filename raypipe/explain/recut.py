"""Find a better cut for a measured step: the same stages on the same devices, borders moved layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from raypipe.errors import SpecError
from raypipe.plan.cut.layers import cut_layers
from raypipe.schedule.costs import CostTable

Cut = tuple[tuple[int, ...], ...]
"""Per stage, the layers it holds."""
BY_LAYERS = ("forward", "input_grad", "weight_grad", "recompute", "update", "attention", "attention_grad")
"""Costs that go with the layers of a stage."""
MOST_MOVES = 200
"""Cuts that are timed."""


def layer_shares(cut: Cut, weights: Sequence[float] | None) -> list[float]:
    """Return the share of its stage's time that each layer takes: as ``weights`` say, or else all alike.

    >>> layer_shares(((0, 1, 2), (3,)), [1.0, 1.0, 2.0, 5.0])
    [0.25, 0.25, 0.5, 1.0]
    """
    found = [0.0] * sum(map(len, cut))
    for layers in cut:
        own = [1.0 if weights is None else weights[layer] for layer in layers]
        total = sum(own)
        for layer, weight in zip(layers, own, strict=True):
            found[layer] = weight / total if total > 0 else 1.0 / len(layers)
    return found


def costs_of_cut(
    costs: CostTable, present: Cut, other: Cut, shares: Sequence[float], speed: Sequence[float]
) -> CostTable:
    """Return the costs of another cut, from those measured with the present one.

    Args:
        costs: measured, per stage.
        present: the cut they were measured with.
        other: the cut to cost.
        shares: each layer's share of its present stage.
        speed: per stage, how many times as long as an undisturbed device the one that holds it takes.
    """
    at = {layer: s for s, layers in enumerate(present) for layer in layers}

    def moved(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(
            speed[s] * sum(values[at[layer]] / speed[at[layer]] * shares[layer] for layer in layers)
            for s, layers in enumerate(other)
        )

    return replace(costs, **{name: moved(getattr(costs, name)) for name in BY_LAYERS})


def better_cut(
    present: Cut, layer_s: Sequence[float], placement: Sequence[Sequence[int]], step_s: Callable[[Cut], float]
) -> tuple[Cut, float]:
    """Return the cut with the shortest step that moving borders finds, and its step in seconds.

    Args:
        present: where to start, beside the cut that is best by ``layer_s`` alone; a chain of runs of layers.
        layer_s: seconds of each layer for one micro-batch, on an undisturbed device.
        placement: device of every stage, one row per replica of one data-parallel copy.
        step_s: the simulated step of a cut.
    """
    starts = [present]
    with suppress(SpecError):  # what it refuses is no reason not to move borders
        starts.append(tuple(map(tuple, cut_layers(layer_s, placement).stages)))
    timed = {cut: step_s(cut) for cut in dict.fromkeys(starts)}
    best = min(timed, key=lambda cut: timed[cut])
    while len(timed) < MOST_MOVES:
        for cut in _neighbours(best):
            if cut not in timed:
                timed[cut] = step_s(cut)
        found = min(timed, key=lambda cut: timed[cut])
        if timed[found] >= timed[best] * (1 - 1e-9):
            break
        best = found
    return best, timed[best]


def _neighbours(cut: Cut) -> list[Cut]:
    """The cuts that differ by one border that is one layer further to the left or to the right."""
    found = []
    for s, (left, right) in enumerate(pairwise(cut)):
        if len(left) > 1:
            found.append((*cut[:s], left[:-1], (left[-1], *right), *cut[s + 2 :]))
        if len(right) > 1:
            found.append((*cut[:s], (*left, right[0]), right[1:], *cut[s + 2 :]))
    return found
