"""A model's cut into stages: sub-graphs, cuts, seconds and parameters, before and after balancing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypipe.cost.memory import ParameterBytes, kept_bytes, parameter_bytes
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import stage_times
from raypipe.cost.stages import costs_of
from raypipe.errors import SpecError
from raypipe.plan.cut.exact import Memory
from raypipe.plan.cut.layers import NOISE, LayerCut, check_stages, cut_layers, fastest_cut, given_cut
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import births, deaths, recomputed_pairs
from raypipe.simulate.engine import simulate

MANY_TASKS = 20_000
"""Beyond this a simulated step takes too long to try several."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor that crosses a cut."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """One sub-graph, or one layer of the built-in GPT."""

    label: str
    block: str
    """The repeated block it is part of, or ""."""
    parameters: tuple[tuple[str, int], ...]
    """Names and numbers of values; one that is tied has the same name in every piece that reads it."""
    flops: float
    """Of the forward, for one sample."""
    behind: tuple[Crossing, ...]
    """What crosses a cut behind it, for one micro-batch; nothing behind the last."""
    weight_flops: float = 0.0
    """Of its weight gradients, for one sample."""
    weight_flops_in_b: float = 0.0
    """Those of them that cannot wait for W where backwards are split."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A model cut into stages, beside the cut that gives every stage as many blocks."""

    pieces: tuple[ModelPiece, ...]
    profile: Profile
    schedule: Schedule
    microbatch: int
    even: LayerCut
    balanced: LayerCut

    def step_s(self, cut: LayerCut) -> float:
        """Predicted seconds of a step: the schedule's makespan with this cut's costs."""
        costs = costs_of(self.profile, cut.stages, self.microbatch, self.schedule)
        return simulate(self.schedule, costs).makespan


def make_partition(
    pieces: Sequence[ModelPiece],
    profile: Profile,
    schedule: Schedule,
    microbatch: int,
    memory_bytes: float | None = None,
    optimizer: str = "adamw",
    momentum: float = 0.0,
) -> Partition:
    """Cut pieces into the stages of a schedule by the profile's seconds for one micro-batch.

    Args:
        pieces: of the model, in order.
        profile: costs of the same pieces.
        schedule: which stages there are, on which devices, and how many micro-batches each keeps.
        microbatch: samples of one.
        memory_bytes: of a device for weights, gradients, optimizer state and activations; None if it does not matter.
        optimizer, momentum: ``train``'s, for the size of the optimizer's state.

    The slowest device of the result is the fastest possible but for ``NOISE``; within that, the predicted step is as
    short as moving borders makes it, for it also matters where the slowest stage stands. Where balanced stages give a
    shorter step than that, those.

    Raises:
        SpecError: more stages than pieces, a profile of another model, or nothing fits the memory.
    """
    if len(profile.layers) != len(pieces):
        why = f"holds {len(profile.layers)} layers, the model has {len(pieces)}"
        raise SpecError("profile", why, "measure it again: raypipe profile JOB.yaml -o PROFILE.json")
    seconds = [sum(_seconds(profile, microbatch, [i])) for i in range(len(pieces))]
    memory = None
    if memory_bytes is not None:
        each = parameter_bytes(profile.dtype, optimizer, momentum)
        memory = _memory(pieces, profile, schedule, microbatch, memory_bytes, each)
    best = cut_layers(seconds, schedule.placement, memory)
    even = given_cut(
        seconds, schedule.placement, even_starts([p.block for p in pieces], schedule.stages), memory, best.bound
    )
    first = Partition(tuple(pieces), profile, schedule, microbatch, even, best)
    limit = None if memory is None else memory.limit_bytes

    def near(starts: Sequence[int]) -> LayerCut | None:
        """The cut, if its slowest device is as fast as can be but for noise, and it fits."""
        cut = given_cut(seconds, schedule.placement, starts, memory, best.bound)
        fits = limit is None or max(cut.device_bytes) <= limit
        return cut if fits and cut.slowest <= best.slowest * (1 + NOISE) else None

    moved = _fastest(first, near)
    other = fastest_cut(seconds, schedule.placement, first.step_s, memory)
    return replace(first, balanced=min(moved, other, key=first.step_s) if other != moved else moved)


def _fastest(partition: Partition, near: Callable[[Sequence[int]], LayerCut | None]) -> LayerCut:
    """Of the cuts that are as good as the best but for noise, one with a short step: where the slowest stage stands
    matters too. Found by moving one border by one piece at a time."""
    result = partition.balanced
    if sum(map(len, partition.schedule.orders)) > MANY_TASKS:
        return result
    step = partition.step_s(result)
    even = near(partition.even.starts)
    tried = {result.starts}
    todo = [] if even is None else [even]
    while todo:
        cut = todo.pop()
        tried.add(cut.starts)
        took = partition.step_s(cut)
        if took < step * (1 - 1e-9):
            result, step, todo = cut, took, []
        if not todo:
            others = (near(n) for n in _neighbours(result.starts, result.pieces) if n not in tried)
            todo = [other for other in others if other is not None]
    return result


def _neighbours(starts: Sequence[int], count: int) -> list[tuple[int, ...]]:
    edges = [*starts, count]
    moves = [(s, step) for s in range(1, len(starts)) for step in (-1, 1)]
    return [
        (*starts[:s], starts[s] + step, *starts[s + 1 :])
        for s, step in moves
        if edges[s - 1] < starts[s] + step < edges[s + 1]
    ]


def even_starts(blocks: Sequence[str], stages: int) -> list[int]:
    """First piece of each stage if each gets as many blocks as the others: what people do by hand.

    What comes before a block goes with it, what comes behind the last with that; the first stages get one more where
    it does not come out even. Without enough blocks, pieces are counted instead.

    >>> even_starts(["", "h.0", "h.0", "h.1", "h.2", "h.3", ""], 2)
    [0, 4]
    """
    check_stages(stages, len(blocks))
    begins = [i for i, block in enumerate(blocks) if block and (i == 0 or blocks[i - 1] != block)]
    if len(begins) < stages:
        begins = list(range(len(blocks)))
    share, more = divmod(len(begins), stages)
    firsts = [s * share + min(s, more) for s in range(stages)]
    starts = [0]
    for first in firsts[1:]:
        start = begins[first]
        while start - 1 > starts[-1] and begins[first - 1] < start - 1 and not blocks[start - 1]:
            start -= 1
        starts.append(start)
    return starts


def live_per_stage(schedule: Schedule) -> tuple[float, ...]:
    """Full micro-batches that each stage keeps at once, at most."""
    again = recomputed_pairs(schedule)
    most = [0] * schedule.stages
    for order in schedule.orders:
        alive = [0] * schedule.stages
        for task in order:
            alive[task.stage] += births(task, again)
            most[task.stage] = max(most[task.stage], alive[task.stage])
            alive[task.stage] -= deaths(task, schedule.backwards)
    return tuple(float(n * schedule.size) for n in most)


def report(partition: Partition) -> dict[str, Any]:
    """Everything as plain data. Times are of one micro-batch in seconds; sizes in bytes."""
    pieces = partition.pieces
    before, after = partition.step_s(partition.even), partition.step_s(partition.balanced)
    return {
        "subgraphs": [
            {
                "label": p.label,
                "block": p.block,
                "parameters": sum(n for _, n in p.parameters),
                "flops": p.flops * partition.microbatch,
                **_times(partition, [i]),
                "tensors_across": len(p.behind),
                "bytes_across": sum(t.bytes for t in p.behind),
            }
            for i, p in enumerate(pieces)
        ],
        "parameters": sum(_values(pieces).values()),
        "weight_gradients_in_b": _share_in_b(pieces),
        "most_tensors_across_any_cut": max((len(p.behind) for p in pieces[:-1]), default=0),
        "stages": [_stage(partition, s, part) for s, part in enumerate(partition.balanced.stages)],
        "cuts": [
            {
                "behind_subgraph": part[-1],
                "tensors": [
                    {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.bytes}
                    for t in pieces[part[-1]].behind
                ],
                "bytes": sum(t.bytes for t in pieces[part[-1]].behind),
            }
            for part in partition.balanced.stages[:-1]
        ],
        "balance": {
            "even": _cut(partition.even, before),
            "balanced": _cut(partition.balanced, after),
            "speedup": before / after,
            "proven": partition.balanced.proven,
            "bound_s": partition.balanced.bound,
        },
        "schedule": partition.schedule.name,
        "microbatch": partition.microbatch,
        "microbatches": partition.schedule.microbatches,
        "placement": [list(row) for row in partition.schedule.placement],
        "seconds_from": partition.profile.source,
        "device": partition.profile.device,
    }


def _share_in_b(pieces: Sequence[ModelPiece]) -> float:
    """Share of the weight gradients' FLOPs that B computes even where backwards are split, 0..1."""
    total = sum(piece.weight_flops for piece in pieces)
    return sum(piece.weight_flops_in_b for piece in pieces) / total if total else 0.0


def _stage(partition: Partition, number: int, part: range) -> dict[str, Any]:
    inside = partition.pieces[part.start : part.stop]
    return {
        "subgraphs": [part.start, part.stop],
        "devices": sorted({row[number] for row in partition.schedule.placement}),
        "parameters": sum(_values(inside).values()),
        **_times(partition, part),
    }


def _cut(cut: LayerCut, step_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "subgraphs": [len(part) for part in cut.stages],
        "starts": list(cut.starts),
        "stage_seconds": list(cut.stage_cost),
        "device_seconds": list(cut.device_cost),
        "step_s": step_s,
    }
    return result | ({"device_bytes": list(cut.device_bytes)} if cut.device_bytes else {})


def _times(partition: Partition, layers: Sequence[int]) -> dict[str, float]:
    forward, backward = _seconds(partition.profile, partition.microbatch, layers)
    return {"forward_s": forward, "backward_s": backward, "seconds": forward + backward}


def _seconds(profile: Profile, microbatch: int, layers: Sequence[int]) -> tuple[float, float]:
    """Forward and joint backward of one micro-batch."""
    times = stage_times([profile.layers[i] for i in layers], microbatch)
    return times.forward, times.joint


def _values(pieces: Iterable[ModelPiece]) -> dict[str, int]:
    """Parameters of some pieces, each once."""
    return {name: count for piece in pieces for name, count in piece.parameters}


def _memory(
    pieces: Sequence[ModelPiece],
    profile: Profile,
    schedule: Schedule,
    microbatch: int,
    limit: float,
    each: ParameterBytes,
) -> Memory:
    split = any(task.kind == "W" for task in schedule.tasks())
    return Memory(
        limit_bytes=limit,
        weights=[
            {name: each.held(count, 0 if name in piece.frozen else count) for name, count in piece.parameters}
            | {f"casts of piece {i}": layer.cast_bytes}
            for i, (piece, layer) in enumerate(zip(pieces, profile.layers, strict=True))
        ],
        kept_bytes=[kept_bytes(layer, microbatch, split) for layer in profile.layers],
        output_bytes=[layer.output_bytes * microbatch for layer in profile.layers],
        live=live_per_stage(schedule),
    )
