"""What each system chooses for a case.

Baselines get more than they ask for: where their own description leaves something open (the micro-batch, or whether to
recompute), the clock itself picks the best.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from raypipe.errors import ScheduleError, SpecError
from raypipe.job.spec import job_from
from raypipe.plan.choose import choose
from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.forms.text import to_text
from tests.bench.planners.cases import MICROBATCHES, Case
from tests.bench.planners.judge import STATE, Choice, Verdict, judge
from tests.bench.search.joint import even_cut, interleaved_text

MOST_TASKS = 30_000
"""Longer orders are left out of what the clock chooses from."""
SEARCH_S = 2.0
"""Of each part of raypipe's search; its default is 3."""
TABLE = ((1.7e9, 1, 1), (3.6e9, 2, 1), (7.5e9, 4, 1), (18.4e9, 8, 1), (39.1e9, 8, 2), (76.1e9, 8, 4))
"""Parameters, and the tensor and pipeline sizes that NVIDIA trains so many with.

Source: Narayanan et al. 2021 (arXiv 2104.04473), table 1, as far as these cases go.
"""
NAMED = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("chimera", 1))


def interleaved(case: Case) -> Verdict | None:
    """Interleaved 1F1B with two chunks on an even cut, in as many copies as the clock finds best."""
    devices, layers = case.cluster.devices, len(case.profiles[1].layers)
    depths = [p for p in range(2, layers - 1) if devices % p == 0]
    return _best(case, (c for stages in depths for c in _pipelines(case, stages, 1)))


def nvidia(case: Case) -> Verdict | None:
    """The row of NVIDIA's table for the model's size; groups no larger than a host, interleaved where it is deeper."""
    parameters = sum(x.parameters for x in case.profiles[1].layers)
    _, tensor, stages = next(row for row in TABLE if parameters <= 1.02 * row[0])
    tensor, both = min(tensor, case.cluster.per_host), tensor * stages
    return _best(case, _pipelines(case, min(both, case.cluster.devices) // tensor, tensor))


def named(case: Case) -> Verdict | None:
    """Whichever of the named schedules, on even cuts of any depth, the clock finds best: no planner did."""
    return _best(case, _named(case))


def sailor(case: Case) -> Verdict | None:
    """Sailor's planner on devices all alike: 1F1B, any depth, copies, micro-batch and tensor size in a host.

    Layers are dealt out evenly, left-over ones to the last stages. A plan is held to fit if every stage's state and the
    activations that 1F1B keeps there do; nothing is recomputed. Of those, the least (N - 1) x slowest stage + all
    stages + all messages + slowest all-reduce. Its rules for several kinds of device, zones and prices fall away.
    Groups of one size in all stages, and bytes of the profile where it has constants of its runtime.

    Source: Strati et al. 2025 (arXiv 2504.17096) and its public planner.
    """
    result: tuple[float, Choice] | None = None
    for tensor, profile in case.profiles.items():
        groups, count = case.cluster.devices // tensor, len(profile.layers)
        per_host = case.cluster.per_host // tensor
        for stages in (p for p in range(1, count + 1) if groups % p == 0):
            cut = dealt(count, stages)
            copies = groups // stages
            for n in MICROBATCHES:
                if case.batch % (copies * n):
                    continue
                number = case.batch // copies // n
                parts = [[profile.layers[i] for i in own] for own in cut]
                held = [
                    sum(STATE * x.parameters + x.kept_bytes * n * min(number, stages - s) for x in own)
                    for s, own in enumerate(parts)
                ]
                if max(held) > case.cluster.memory:
                    continue
                compute = [sum(x.times[n].forward + x.times[n].joint for x in own) for own in parts]
                link = profile.inside if groups <= per_host or per_host % stages == 0 else profile.between
                sent = [link.seconds(own[-1].output_bytes * n) for own in parts[:-1]]
                slowest = max(c + a for c, a in zip(compute, [*sent, 0.0], strict=True))
                over = profile.inside if groups <= per_host else profile.between
                sums = max(sum(4.0 * x.parameters for x in own) for own in parts) * over.beta_s_per_byte
                sync = 2 * (copies - 1) / copies * sums
                step = (number - 1) * slowest + sum(compute) + 2 * sum(sent) + sync
                if result is None or step < result[0]:
                    words = f"1f1b {stages} x {copies} x T{tensor}, B = {n}"
                    result = step, Choice(words, _order("1f1b", stages, 1, number), cut, copies, n, tensor)
    return None if result is None else judge(case, result[1])


def raypipe(case: Case) -> Verdict | None:
    """The plan of ``raypipe autoconfigure``, without clipping, as the clock has it.

    State is not divided over copies, as in none of the other systems; layers are divided where their costs are known.
    """
    profile = case.profiles[1]
    job = job_from({
        "name": "compared", "model": {"type": "gpt", "layers": len(profile.layers) - 2, "hidden": 32, "heads": 8,
                                      "sequence": 16, "vocabulary": 256},
        "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": case.batch, "clip": None},
        "parallel": {"auto": True, "shard": "none"},
    })  # fmt: skip
    shared = {(t, False): own for t, own in case.profiles.items() if t > 1 and case.is_gpt}
    try:
        decision = choose(job, profile, search_s=SEARCH_S, shared=shared)
    except SpecError:
        return None
    p = decision.best
    c, text = p.candidate, to_text(decision.plan.one_copy().without({"AR", "U"}))
    words = f"{c.schedule} {c.stages} x {c.replicas} x T{c.tensor}, B = {c.microbatch}"
    words += "" if c.recompute == "none" else f", recompute {c.recompute}"
    inside = c.innermost == "replicas"
    words += ", copies inside hosts" if inside else ""
    return judge(case, Choice(words, text, p.cut, c.replicas, c.microbatch, c.tensor, p.recomputed, p.step_s, inside))


SYSTEMS: dict[str, Callable[[Case], Verdict | None]] = {
    "interleaved": interleaved, "named": named, "NVIDIA": nvidia, "Sailor": sailor, "raypipe": raypipe,
}  # fmt: skip


def dealt(layers: int, stages: int) -> list[list[int]]:
    """As many layers in each stage, and one more in the last ones.

    >>> dealt(5, 3)
    [[0], [1, 2], [3, 4]]
    """
    few, more = divmod(layers, stages)
    sizes = [few] * (stages - more) + [few + 1] * more
    starts = [sum(sizes[:s]) for s in range(stages)]
    return [list(range(a, a + size)) for a, size in zip(starts, sizes, strict=True)]


def recomputing(text: str) -> str:
    """The order with every forward run again right before its backward.

    >>> recomputing("device 0: 0F0 0BW0")
    'device 0: 0F0 0R0 0BW0'
    """
    return re.sub(r"\b(\d+)BW(\d+(?:@\d+)?)", r"\1R\2 \1BW\2", text)


def _best(case: Case, choices: Iterator[Choice]) -> Verdict | None:
    """The fastest that fits; recomputing only where it does not fit without, as then it is never faster."""
    best: Verdict | None = None
    for choice in choices:
        result = judge(case, choice)
        if not result.fits and "BW" in choice.text:
            result = judge(case, choice._replace(text=recomputing(choice.text), words=choice.words + ", recomputed"))
        if best is None or (not result.fits, result.seconds) < (not best.fits, best.seconds):
            best = result
    return best


def _pipelines(case: Case, stages: int, tensor: int) -> Iterator[Choice]:
    """Interleaved 1F1B with two chunks on so many groups, 1F1B where that does not go, of any micro-batch."""
    layers = len(case.profiles[tensor].layers)
    copies = case.cluster.devices // tensor // stages
    for n in MICROBATCHES:
        number, left = divmod(case.batch, copies * n)
        if left:
            continue
        chunks = 2 if stages > 1 and number % stages == 0 and 2 * stages <= layers - 2 else 1
        if chunks == 2:
            text, name = interleaved_text(stages, 2, number), "interleaved-1f1b"
        else:
            text, name = _order("1f1b", stages, 1, number), "1f1b"
        yield Choice(
            f"{name} {stages} x {copies} x T{tensor}, B = {n}", text, even_cut(layers, stages * chunks), copies, n,
            tensor,
        )  # fmt: skip


def _named(case: Case) -> Iterator[Choice]:
    devices, layers = case.cluster.devices, len(case.profiles[1].layers)
    for stages in (p for p in range(1, layers - 1) if devices % p == 0):
        for n in MICROBATCHES:
            copies = devices // stages
            number, left = divmod(case.batch, copies * n)
            for name, chunks in NAMED[1:2] if stages == 1 else NAMED:
                if left or chunks * stages > layers - 2 or 3 * chunks * stages * number > MOST_TASKS:
                    continue
                try:
                    text = _order(name, stages, chunks, number)
                except ScheduleError:
                    continue
                words = f"{name} {stages} x {copies} x T1, B = {n}"
                yield Choice(words, text, even_cut(layers, stages * chunks), copies, n)


def _order(name: str, devices: int, chunks: int, number: int) -> str:
    shape = Shape(devices=devices, microbatches=number, chunks=chunks)
    assert stages_of(name, shape) == devices * chunks
    return to_text(generate(name, shape))
