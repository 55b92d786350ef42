"""Cut, placement and order found together: speed-up over interleaved 1F1B, and the gap to the certificate.

Every step is one step alone, from its first task to its last (updates wait for a global norm). A clock that shares
nothing with the planner times it (``tests/plan/joint/clock.py``), in the memory that interleaved 1F1B on the even cut
takes on its fullest device.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.errors import ScheduleError
from raypipe.files import write_whole
from raypipe.job.spec import job_from
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.instance import Resource
from raypipe.plan.certificate.of_plan import Certifiers
from raypipe.plan.joint.better_plans import better_plan
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.searched import searched_orders
from raypipe.plan.tensor_groups import ALONE, Judges
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.shape import Grid
from tests.bench.search.joint_models import MODELS, profile_of
from tests.bench.search.line import Effort, Line
from tests.plan.joint.clock import Layer, Timed, time_of

SPEED_UP = 1.42
"""AdaPtis' mean over interleaved 1F1B."""
CLOSE, MOST_CLOSE, FAR = 0.02, 0.9, 0.05
"""The gap to the certificate that so many of the cases are to be within, and that all of up to 8 devices are."""
STATE = 16.0
"""Bytes of a parameter with its gradient and optimizer state: float32 and two values of Adam."""
PIPELINES = (4, 8, 16)
ORDERS_ALONE = 2.0
"""Most of the seconds that are for the orders of named schedules, before the three are searched together."""


@dataclass(frozen=True)
class Found:
    """One case, judged by the clock."""

    base: float
    """Interleaved 1F1B on the even cut."""
    best: Timed
    bound: float
    binds: Resource
    room: float
    seconds: float
    plan: Prediction
    order: str
    """Of the plan, as text."""
    today: float
    """The best that the planner finds without searching the three together."""


def layers_of(profile: Profile) -> tuple[list[Layer], list[float]]:
    """As the clock reads them: layers, and the message behind each."""
    layers = []
    for x in profile.layers:
        t = x.times[1]
        layers.append(
            Layer(t.forward, t.input_grad, t.weight_grad, t.joint, x.kept_bytes, x.waiting, STATE * x.parameters)
        )
    return layers, [profile.inside.seconds(x.output_bytes) for x in profile.layers]


def even_cut(layers: int, stages: int) -> list[list[int]]:
    """As many layers in each stage, as far as they go; the embedding is with the first and the head with the last."""
    blocks = layers - 2
    ends = [1 + round(blocks * (s + 1) / stages) for s in range(stages)]
    starts = [1, *ends[:-1]]
    cut = [list(range(a, b)) for a, b in zip(starts, ends, strict=True)]
    cut[0].insert(0, 0)
    cut[-1].append(layers - 1)
    return cut


def interleaved_text(devices: int, chunks: int, count: int) -> str:
    """Megatron's interleaved 1F1B, from its description (Narayanan et al. 2021, section 2.2): joint backwards."""
    lines = []
    for d in range(devices):
        total = count * chunks
        warm = min(total, (devices - d - 1) * 2 + (chunks - 1) * devices)

        def task(k: int, back: bool, d: int = d) -> str:
            group, k = divmod(k, devices * chunks)
            chunk, m = divmod(k, devices)
            chunk = chunks - 1 - chunk if back else chunk
            return f"{chunk * devices + d}{'BW' if back else 'F'}{group * devices + m}"

        words = [task(k, False) for k in range(warm)]
        for k in range(total - warm):
            words += [task(warm + k, False), task(k, True)]
        words += [task(k, True) for k in range(total - warm, total)]
        lines.append(f"device {d}: " + " ".join(words))
    return "\n".join([f"microbatches {count}", *lines, ""])


@dataclass(frozen=True)
class Asked:
    """One case: what is planned, and what it is held against."""

    base: Timed
    """Interleaved 1F1B with two chunks (one, where there are too few layers) on the even cut."""
    base_order: str
    base_cut: list[list[int]]
    room: float
    """Bytes of its fullest device, which plans may take on each."""
    judge: Predictor
    """Counts what devices hold with messages, in so much more memory."""
    named: list[Prediction]
    """Plans that fit, without a search for an order, the fastest first."""
    grid: Grid
    layers: list[Layer]
    messages: list[float]


def asked(profile: Profile, devices: int, count: int) -> Asked:
    """A case in the memory of interleaved 1F1B."""
    layers, messages = layers_of(profile)
    chunks = 2 if len(layers) - 2 >= 2 * devices else 1
    base_cut = even_cut(len(layers), devices * chunks)
    base_order = interleaved_text(devices, chunks, count)
    base = time_of(base_order, base_cut, layers, messages)
    room = max(base.peaks)

    def judge_in(memory_bytes: float) -> Predictor:
        job = job_from({
            "name": "joint", "model": {"type": "gpt", "layers": len(layers) - 2, "hidden": 32, "heads": 4,
                                       "sequence": 16, "vocabulary": 256},
            "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": count, "clip": 1.0},
            "parallel": "auto",
        })  # fmt: skip
        there = profile.model_copy(update={"memory_bytes": memory_bytes})
        return Predictor(there, job.train, len(layers), divides=False)

    # The planner counts messages and the outputs that stages keep, which the clock does not: room for a few of these.
    judge, grid = judge_in(room + 6 * max(x.output_bytes for x in profile.layers)), Grid(devices, 1, 1, count)
    named = _fitting(judge, grid, len(layers))
    if not named:  # then for those of interleaved 1F1B, which is a plan to begin with
        own = replace(Candidate.on(grid, "auto"), update="wait")
        cut = tuple(range(part[0], part[-1] + 1) for part in base_cut)
        counted = judge.predict_order(own, from_text(base_order), cut)
        judge = judge_in(max(counted.memory_bytes))
        named = [judge.predict_order(own, from_text(base_order), cut)]
    return Asked(base, base_order, base_cut, room, judge, named, grid, layers, messages)


def solve(profile: Profile, devices: int, count: int, seconds: float) -> Found:
    """Plan in the memory of interleaved 1F1B."""
    of = asked(profile, devices, count)
    base, room, judge, layers, messages = of.base, of.room, of.judge, of.layers, of.messages
    judges = Judges({ALONE: judge})
    began = time.monotonic()
    ranked = list(of.named)
    alone = min(ORDERS_ALONE, seconds / 3)
    for p in searched_orders(judges, ranked[:6], alone, better=False):
        assert p.order is not None
        ranked.append(judge.predict_order(replace(p.candidate, update="wait"), p.order))
    today = min([p for p in ranked if p.fits], key=lambda p: p.step_s)
    certifiers = Certifiers(judges)
    result = better_plan(judge, today, seconds - alone, certifiers.of(today))
    best = min([p for p in (result, today) if p is not None and p.fits], key=lambda p: p.step_s)
    bound, binds = _makespan_bound(certifiers, best, 3.0), certifiers.certificate(best).binds
    order = to_text(judge.schedule_of(best))
    timed = time_of(order, [list(own) for own in best.cut], layers, messages)
    return Found(base.makespan, timed, bound, binds, room, time.monotonic() - began, best, order, today.step_s)


def plan_name(model: str, devices: int, per: int) -> str:
    """Of a case's plan file, without its suffix."""
    return f"{model}-{devices}-{per * devices}"


def write_plan(path: Path, f: Found) -> None:
    """Keep the order and the cut that were found (``joint_emulated`` runs them)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"cut": [list(own) for own in f.plan.cut], "order": f.order}))


def _makespan_bound(certifiers: Certifiers, p: Prediction, seconds: float) -> float:
    """The certificate of what the clock times: it knows nothing of the sum that makes the global norm."""
    return certifiers.certificate(p, seconds).bound_s - certifiers.of(p).instance(p).after


def _fitting(judge: Predictor, grid: Grid, layers: int) -> list[Prediction]:
    """Named schedules within memory, the fastest first."""
    made = (_predicted(judge, c) for c in _families(grid, layers))
    return sorted((p for p in made if p is not None and p.fits), key=lambda p: p.step_s)


def _families(grid: Grid, layers: int) -> Iterator[Candidate]:
    for name, chunks in (
        ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2),
        ("zeropp", 2), ("gpipe", 1),
    ):  # fmt: skip
        if chunks * grid.stages <= layers:
            for balance in ("stages", "devices"):
                yield Candidate.on(grid, name, chunks=chunks, update="wait", balance=balance)


def _predicted(judge: Predictor, c: Candidate) -> Prediction | None:
    try:
        return judge.predict(c)
    except ScheduleError:
        return None


def adaptis_cases() -> list[tuple[str, Profile, int, int]]:
    """Name, profile, devices and micro-batches a device; deep pipelines have models with twice the blocks."""

    def sized(name: str, devices: int) -> Profile:
        make = MODELS[name]
        return profile_of(make() if devices < 16 else make(2 * len(make()) - 4), devices)

    return [(name, sized(name, devices), devices, per) for per in (2, 4) for devices in PIPELINES for name in MODELS]


def ceilings(effort: Effort) -> Iterator[Line]:
    """What no plan exceeds: interleaved 1F1B's step over the certificate, without any search for a plan."""
    by: dict[str, list[float]] = {}
    for name, profile, devices, per in adaptis_cases()[effort.first :][: effort.count or None]:
        of = asked(profile, devices, per * devices)
        bound = _makespan_bound(Certifiers(Judges({ALONE: of.judge})), of.named[0], effort.seconds)
        ratio = of.base.makespan / bound
        for group in (f"{per} micro-batches a device", f"{per} on 4 and 8 devices" if devices < 16 else "", "all"):
            by.setdefault(group, []).append(ratio)
        if name != "GPT":
            by.setdefault(f"{per} micro-batches a device, all but GPT", []).append(ratio)
        yield Line(
            f"{name:16} P={devices:<2} N={per * devices:<2} at most {ratio:.3f}x, best named schedule "
            f"{of.base.makespan / of.named[0].step_s:.3f}x"
        )
    for group, result in sorted(by.items()):
        if group:
            yield Line(
                f"{group}: {len(result)} cases, geometric mean at most {exp(sum(map(log, result)) / len(result)):.3f}x"
            )


def joint(effort: Effort) -> Iterator[Line]:
    """Speed-up over interleaved 1F1B on AdaPtis' kinds of models, then gaps of random uneven cases."""
    ratios: list[float] = []
    most: list[float] = []
    for name, profile, devices, per in adaptis_cases()[effort.first :][: effort.count or None]:
        f = solve(profile, devices, per * devices, effort.seconds)
        ratios.append(f.base / f.best.makespan)
        most.append(f.base / f.bound)
        if effort.plans is not None:
            write_plan(effort.plans / f"{plan_name(name, devices, per)}.json", f)
        yield Line(
            f"{name:16} P={devices:<2} N={per * devices:<2} interleaved {f.base:7.3f} s, found "
            f"{f.best.makespan:7.3f} s ({ratios[-1]:.3f}x; before {f.base / f.today:.3f}x), certificate "
            f"{f.bound:7.3f} s ({most[-1]:.3f}x), gap {f.best.makespan / f.bound - 1:6.2%}, "
            f"{f.plan.candidate.schedule} {f.plan.candidate.placement}, {f.plan.form.stages} stages, {f.seconds:.0f} s",
            max(f.best.peaks), f.room * 1.0005,
        )  # fmt: skip
    mean, ceiling = (exp(sum(map(log, x)) / len(x)) for x in (ratios, most))
    text = f"geometric mean {mean:.3f}x of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}"
    yield Line(f"{text}; no plan in this memory can reach more than {ceiling:.3f}x", SPEED_UP - mean)


def certificates(effort: Effort) -> Iterator[Line]:
    """Random uneven models on 2 to 16 devices: how far from the certificate."""
    rows: list[tuple[int, float]] = []
    for seed in range(effort.first, effort.first + effort.count):
        profile, devices, count = uneven(seed)
        f = solve(profile, devices, count, effort.seconds)
        gap = f.best.makespan / f.bound - 1
        rows.append((devices, gap))
        yield Line(
            f"seed {seed:<3} D={devices:<2} N={count:<2} L={len(profile.layers):<2} gap {gap:6.2%} (before "
            f"{f.today / f.bound - 1:6.2%}), {f.plan.candidate.schedule} "
            f"{f.plan.candidate.placement}, {f.plan.form.stages} stages, {f.binds} binds, {f.seconds:.0f} s",
            max(f.best.peaks), f.room * 1.0005,
        )  # fmt: skip
    close = sum(gap <= CLOSE for _, gap in rows) / len(rows)
    gaps = [gap for _, gap in rows]
    yield Line(f"{len(rows)} cases: {close:.0%} within {CLOSE:.0%}, median {median(gaps):.2%}", MOST_CLOSE - close)
    small = [gap for devices, gap in rows if devices <= 8]
    yield Line(f"at most {max(small):.2%} on up to 8 devices, {max(gaps):.2%} on all", max(small), FAR)


def uneven(seed: int) -> tuple[Profile, int, int]:
    """Layers that differ by up to a factor of two, a head of one to four of them, links of a tenth of a task."""
    rng = random.Random(seed)
    devices = rng.choice((2, 3, 4, 4, 5, 6, 8, 8, 12, 16))
    count = devices * rng.choice((2, 3, 4))  # whole rounds, which interleaved 1F1B asks for
    blocks = devices * rng.choice((3, 4, 5, 6))
    sizes: Sequence[float] = [0.05, *(rng.uniform(1, 2) for _ in range(blocks)), rng.uniform(1, 4)]
    link = LinkFit(alpha_s=rng.choice((0.0, 1e-4, 1e-3)), beta_s_per_byte=0.0)

    def layer(n: int, size: float) -> LayerProfile:
        f, b, w = (1e-2 * size * rng.uniform(0.9, 1.1) * x for x in (1.0, 1.1, 0.9))
        times = TaskTimes(forward=f, input_grad=b, weight_grad=w, joint=b + w, recompute=f)
        return LayerProfile(
            name=f"layer.{n}", parameters=int(1e6 * size), times={1: times}, kept_bytes=4e7 * size,
            waiting_bytes=4e7 * size, output_bytes=1e6,
        )  # fmt: skip

    profile = Profile(
        source="analytic", device="made up", dtype="float32", devices=devices, devices_per_host=devices,
        memory_bytes=1e15, layers=tuple(layer(n, size) for n, size in enumerate(sizes)), update_s_per_parameter=0.0,
        inside=link, between=link,
    )  # fmt: skip
    return profile, devices, count
