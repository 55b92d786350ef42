"""The error where no plan fits: the least memory that any plan needs, on which device, and the cheapest ways out.

Every way out is a changed job, or other devices, for which a plan was found that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil

from raypipe.cost.memory.terms import FEWER, RECOMPUTE, SMALLER, STAGES
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sizes import OF_A_SAMPLE
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.model_spec import GptSpec, HfSpec
from raypipe.job.parallel_spec import GatherKey
from raypipe.plan.best_first import Ranking, effort_s
from raypipe.plan.candidate import Candidate, chunk_counts, divisors
from raypipe.plan.choice import PlanChoice
from raypipe.plan.predict.bounds import waiting
from raypipe.plan.predict.form import form_of
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.tensor_groups import ALONE, Judges
from raypipe.schedule.shape import Grid

GIB = 2**30
SMALLEST = 60
"""Of the plans that need least memory by closed forms, those whose memory is played."""
MOST_S, LEAST_MOST_S = 0.2, 0.15
"""Seconds that making these orders takes at most, by estimate: for a way out, and for the least memory of all."""
ONE_IN_FLIGHT = "model-parallel"
"""The schedule that begins a micro-batch when the one before has ended."""
FEW = 4
"""Micro-batches of which the memory of a plan is played that has one at a time."""
FEW_GRIDS = 40
"""Of more grids with the smallest micro-batches, only those whose copies have one device or as many as there are."""
NAMED = 3
"""Ways out that are named."""
MOST_DEVICES = 64
"""More devices are suggested up to so many times those that there are."""
COARSE = 4
"""Parts of the last doubling of devices, by which fewer are tried: another host or two is no other way out."""
BRIEFLY_S = 0.05
"""As ``MOST_S``, where finding nothing only means that more devices than needed are suggested."""
SHORTEST = 128
"""Positions of a sequence below which no shorter one is suggested."""
WISHES = ("recompute", "microbatch", "shard", "schedule", "chunks", "unit", "stages", "replicas", "tensor")
"""Keys of ``parallel`` that decide how much memory a plan needs, those first that cost least time."""


def nothing_fits(choice: PlanChoice, found: Ranking) -> SpecError:
    """Return the error of a job for which no plan fits.

    Args:
        choice: what a plan was to be chosen from.
        found: what the search found, none of which fits.
    """
    tried = sorted(found.too_large, key=lambda p: p.excess)[:1]
    fewest = min((p.excess for p in tried), default=float("inf"))
    for lacks, p in _smallest(choice, [c for c in found.unmade if c.shard != "none"], LEAST_MOST_S, every=True):
        tried.append(p)
        fewest = min(fewest, p.excess)
        if fewest <= lacks:
            break
    if not tried:
        wanted = (c for grid in choice.grids for c in choice.judge.of(grid).on(grid) if choice.wished(c))
        refused = next(filter(None, map(choice.refusal, wanted)), None)
        if refused is not None:
            return SpecError(*refused)
        why = "no schedule of this kind exists for the devices and the mini-batch"
        return SpecError("parallel", why, "give fewer keys")
    least = min(tried, key=lambda p: p.excess)
    c, device = least.candidate, least.fullest
    shared = f" x {c.tensor}" if c.tensor > 1 else ""
    recomputed = ", recomputing" if c.recompute != "none" else ""
    divided = f", {c.shard}" if c.shard != "none" else ""
    return SpecError(
        "memory",
        f"no plan fits: of all, {c.schedule} on {c.stages} x {c.replicas}{shared} devices with micro-batches of "
        f"{c.microbatch}{recomputed}{divided} needs least; of these, {_place(least, device)} "
        + least.memory[device].sentence(least.capacity, used_up(least)),
        ", or ".join(islice(_ways_out(choice, least), NAMED)),
    )


def _place(p: Prediction, device: int) -> str:
    """Say which device of a copy it is, and which layers it holds."""
    held = sorted({s for row in p.form.placement for s, d in enumerate(row) if d == device})
    layers = [f"{p.cut[s].start} to {p.cut[s].stop - 1}" for s in held if len(p.cut[s])]
    some = layers if len(layers) <= 2 else [layers[0], "...", layers[-1]]
    each = " of each copy" if p.candidate.replicas > 1 else ""
    return f"device {device}{each} (layers {', '.join(some)})"


def _smallest(
    choice: PlanChoice,
    known: Sequence[Candidate] = (),
    most_s: float = MOST_S,
    every: bool = False,
    fitting: bool = False,
) -> Iterator[tuple[float, Prediction]]:
    """Yield the plans that may need least memory, each after the least bytes that it and all later ones lack.

    Micro-batches are the smallest, one after the other, where the job leaves that open. Of what closed forms say needs
    least, the orders of ``SMALLEST`` are made.

    Args:
        choice: what they are chosen from.
        known: candidates that are considered beside these.
        most_s: seconds that making orders takes at most, by estimate.
        every: of few grids, consider all schedules.
        fitting: leave out the grids on which none fits.
    """
    judge = choice.judge
    grids = _small(choice.grids)
    few = len(grids) <= FEW_GRIDS
    bounds: dict[object, float] = {}
    first = {way: (-1, k) for k, way in enumerate(way for c in known for way in _least_ways(choice, c))}
    ranked = [(_lacks(judge, c, bounds), not _one_in_flight(c), *place, c) for c, place in first.items()]
    ends = ((-judge.of(grid).room_on(grid), n, grid) for n, grid in enumerate(grids if few else _ends(grids)))
    for bound, n, grid in sorted(ends, key=lambda end: end[:2]):
        if bound > 0 and (fitting or (len(ranked) == SMALLEST and bound > ranked[-1][0])):
            break  # later ones lack as much
        made = (way for c in _in_turn(choice, grid, every=every and few) for way in _least_ways(choice, c))
        ways = enumerate(way for way in dict.fromkeys(made) if way not in first)
        ranked += ((_lacks(judge, c, bounds), not _one_in_flight(c), n, k, c) for k, c in ways)
        ranked = heapq.nsmallest(SMALLEST, ranked)
    spent_s = 0.0
    for lacks, *_, way in ranked:
        played = _shortest(judge, way)
        spent_s += effort_s(played)
        try:
            yield lacks, judge.of(played).predict(played)
        except ScheduleError:
            continue
        if spent_s > most_s:
            return


def _one_in_flight(c: Candidate) -> bool:
    """Return whether micro-batches follow one another, so that no schedule of these stages holds less."""
    return c.schedule == ONE_IN_FLIGHT or (c.stages == 1 and c.schedule.endswith("1f1b"))


def _shortest(judge: Judges, c: Candidate) -> Candidate:
    """Return the candidate with few micro-batches, where these hold as much as many do."""
    once = c.level < 3 or c.gather == "microbatch"
    if not (once and _one_in_flight(c)) or any(layer.read_bytes for layer in judge.of(c).profile.layers):
        return c
    return c.sized(c.microbatch, min(c.microbatches, FEW))


def _in_turn(choice: PlanChoice, grid: Grid, every: bool) -> list[Candidate]:
    """Return the candidates on a grid that begin a micro-batch when the one before has ended; ``every`` one, if so
    asked or if the job wants other schedules."""
    made = []
    if not every:
        most = choice.judge.of(Candidate.on(grid, "1f1b")).most_stages
        chunks = chunk_counts(grid.stages, most) if grid.stages > 1 else [1]
        turns = [Candidate.on(grid, ONE_IN_FLIGHT if grid.stages > 1 else "1f1b", chunks=n) for n in chunks]
        made = [c for c in turns if not isinstance(form_of(c), ScheduleError) and choice.pick(c) is not None]
    return list(filter(None, map(choice.pick, made or choice.judge.of(grid).on(grid))))


def _lacks(judge: Judges, c: Candidate, known: dict[object, float]) -> float:
    """Return the bytes that a device lacks at least (``Bounds.least_excess``).

    ``known`` keeps what was found: most schedules of a grid place the same stages on the same devices.
    """
    form = c.form
    way = (form.placement, form.joint, form.size, c.level, c.shard_group, c.balance, waiting(c, form))
    key = (c.stages, c.replicas, c.microbatch, c.tensor, c.sub_pipelined, c.experts, c.context, way)
    if key not in known:
        known[key] = judge.of(c).least_excess(c)
    return known[key]


def _small(grids: Sequence[Grid]) -> list[Grid]:
    """Return the grids with the smallest micro-batches."""
    smallest: dict[bool, int] = {}
    for g in grids:
        smallest[g.sub_pipelined] = min(g.microbatch, smallest.get(g.sub_pipelined, g.microbatch))
    return [g for g in grids if g.microbatch == smallest[g.sub_pipelined]]


def _ends(grids: Sequence[Grid]) -> list[Grid]:
    """Return those of the grids whose copies have one device, or as many as there are for them."""
    deepest: dict[tuple[int, int, bool], int] = {}
    for g in grids:
        key = g.replicas, g.tensor, g.sub_pipelined
        deepest[key] = max(g.stages, deepest.get(key, 0))
    return [g for g in grids if g.stages in (1, deepest[g.replicas, g.tensor, g.sub_pipelined])]


def _least_ways(choice: PlanChoice, c: Candidate) -> list[Candidate]:
    """Return a candidate and what its copies may divide, each as it takes least memory: over as many as may be."""
    judge = choice.judge.of(c)
    divided = list(judge.shard_ways(c)) if c.shard == "none" else []
    most = max((way.shard_group for way in divided), default=1)
    ways = dict.fromkeys([c, *(way for way in divided if way.shard_group == most)])
    by_microbatch: GatherKey = "microbatch"  # nothing stays gathered for longer otherwise
    least = [
        replace(way, update="wait") for way in ways if replace(way, gather=by_microbatch) not in ways.keys() - {way}
    ]
    return [replace(way, recompute="full") if judge.recompute else way for way in least]


def _ways_out(choice: PlanChoice, least: Prediction) -> Iterator[str]:
    """Yield the changes with which a plan fits, the cheapest first.

    Keys of ``parallel`` cost time alone; shorter sequences and another optimizer change what is trained; devices cost
    most. Larger devices always do, so there is always one.
    """
    job = choice.job
    yield from _other_wishes(choice)
    shorter = _shorter(choice)
    if shorter is not None:
        yield f"model.sequence: {shorter}"
    if job.train.optimizer != "sgd":
        plain = job.model_copy(update={"train": job.train.model_copy(update={"optimizer": "sgd"})})
        if _fitting(choice.of(plain, choice.profiles)) is not None:
            yield "train.optimizer: sgd"
    more = _more_devices(choice)
    if more is not None:
        yield f"use {more} devices"
    profile = choice.judge.of(least.candidate).profile
    yield f"use devices of {device_gib(profile, max(least.memory_bytes)):.1f} GiB"


def _fitting(choice: PlanChoice, most_s: float = MOST_S) -> Prediction | None:
    """Return a plan that fits, if one of those that need least memory does; ``most_s``: as ``_smallest``."""
    for lacks, p in _smallest(choice, most_s=most_s, fitting=True):
        if p.fits or lacks > 0:
            return p if p.fits else None
    return None


def _other_wishes(choice: PlanChoice) -> Iterator[str]:
    """Yield values of the ``parallel`` keys that the job fixes, with each of which alone a plan fits."""
    for key in (key for key in WISHES if key in choice.given):
        fitting = _fitting_with(choice, key, None)
        if fitting is None:
            continue
        mild: Sequence[object] = ()
        if key == "microbatch":
            mild = [size for size in reversed(divisors(choice.job.train.batch)) if size < choice.given[key]]
        elif key == "schedule":
            mild = ["1f1b"]
        elif key == "shard":
            mild = ["zero1", "zero2"]
        values = (value for value in mild if _fitting_with(choice, key, value) is not None)
        yield f"parallel.{key}: {next(values, getattr(fitting.candidate, key))}"


def _fitting_with(choice: PlanChoice, key: str, value: object) -> Prediction | None:
    """Return a plan that fits with another value of a key that the job fixes; None: with any."""
    job = choice.job
    keys = {**job.parallel.model_dump(include=set(choice.given)), "auto": True}
    del keys[key]
    keys |= {} if value is None else {key: value}
    parallel = type(job.parallel).model_validate(keys)
    try:
        return _fitting(choice.of(job.model_copy(update={"parallel": parallel}), choice.profiles))
    except SpecError:  # of the keys that are left
        return None


def _shorter(choice: PlanChoice) -> int | None:
    """Return the longest sequence, of the job's halved again and again, with which a plan fits; None if none does."""
    job = choice.job
    if not isinstance(job.model, GptSpec | HfSpec) or job.data.type != "bytes" or not job.model.sequence:
        return None
    lengths = [job.model.sequence >> n for n in range(1, job.model.sequence.bit_length())]
    lengths = [n for k, n in enumerate(lengths, 1) if n >= SHORTEST and n << k == job.model.sequence]
    enough = None
    for length in reversed(lengths):  # from the shortest: where that does not fit, none does
        share = job.model.sequence // length
        profiles = {sharing: _of_shorter(own, share) for sharing, own in choice.profiles.items()}
        if _fitting(choice.of(job, profiles)) is None:
            return enough
        enough = length
    return enough


def _of_shorter(profile: Profile, share: int) -> Profile:
    """Return a profile of sequences of a part of the length, as far as memory goes."""

    def less(layer: LayerProfile) -> LayerProfile:
        known = {name: getattr(layer, name) for name in OF_A_SAMPLE}
        return layer.model_copy(update={name: n if n is None else n / share for name, n in known.items()})

    return profile.model_copy(
        update={
            "layers": tuple(map(less, profile.layers)),
            "other_kinds": tuple(_of_shorter(kind, share) for kind in profile.other_kinds),
        }
    )


def _more_devices(choice: PlanChoice) -> int | None:
    """Return a number of devices on which a plan fits; None if there is none, or none is known.

    The smallest but for a quarter of the last doubling, and of whole hosts where it is more than one.
    """
    profile = choice.profiles[ALONE]
    if profile.other_kinds or {"stages", "replicas"} <= set(choice.given):
        return None
    failed, enough = choice.count, 2 * choice.count
    while _fitting(choice.on(enough)) is None:
        failed, enough = enough, 2 * enough
        if enough > MOST_DEVICES * choice.count:
            return None
    host = profile.devices_per_host
    each = max(1, failed // COARSE)
    each = each if enough <= host else ceil(each / host) * host
    while (tried := failed + (enough - failed) // (2 * each) * each) > failed:
        result = _fitting(choice.on(tried), BRIEFLY_S)
        failed, enough = (tried, enough) if result is None else (failed, tried)
    return enough


def used_up(p: Prediction) -> set[str]:
    """Return the ways to save memory that a plan has used up already."""
    c, form = p.candidate, p.form
    held = [len(p.cut[s]) for row in form.placement for s, device in enumerate(row) if device == p.fullest]
    exhausted = {
        RECOMPUTE: c.recompute != "none" or bool(form.recomputes),
        SMALLER: c.microbatch == 1,
        FEWER: c.microbatches == 1 or c.schedule == ONE_IN_FLIGHT,
        STAGES: held == [1],  # one layer
    }
    return {way for way, used in exhausted.items() if used}


def device_gib(profile: Profile, need: float) -> float:
    """Return the device memory in GiB, rounded up to tenths, that holds a plan of ``need`` bytes.

    ``need`` includes what the process takes and what is kept free. On a described device fragmentation and headroom,
    or where these are not described all of it, are a fixed share of the memory, so they grow with the device; the rest,
    and measured ones, stay as they are.
    """
    if profile.source == "analytic" and profile.memory_bytes:
        grows = profile.reserved.fragmentation_bytes + profile.reserved.headroom_bytes or profile.base_bytes
        share = grows / profile.memory_bytes
        need = (need - grows) / (1 - share) if share < 1 else need
    return ceil(10 * need / GIB * (1 - 1e-12)) / 10
