"""Explain in one sentence why a plan was chosen or not: the most costly part of its step, or the memory it lacks."""

from __future__ import annotations

from raypipe.plan.best_first import NEAR
from raypipe.plan.candidate import PLAIN
from raypipe.plan.certificate.of_plan import Certificate
from raypipe.plan.predict.prediction import Prediction

GIB = 2**30
ALIKE = 5e-4
"""Steps within this share of each other are called equally fast."""


def why_won(best: Prediction, fastest: Prediction) -> str:
    """Explain the choice of ``best``; ``fastest`` differs from it where a simpler plan is about as fast."""
    c = best.candidate
    head = "fastest"
    if best is not fastest:
        less = _less_simple(fastest, best)
        head = f"as fast as {_named(fastest)} within {100 * NEAR:g} %, and simpler ({less} there)"
    if c.devices == 1:
        return f"{head}: it needs one device only"
    if c.stages == 1:
        return f"{head}: no bubbles, {_share(_after(best), best)} of the step for {_collectives(best)}{_divided(best)}"
    after = _after(best)
    all_reduces = f", {_collectives(best)} {_share(after, best)}" if after > ALIKE * best.step_s else ""
    arranged = f"; {best.moved}" if best.moved else ""
    return (
        f"{head}: bubbles {_share(_idle(best), best)} of the step{all_reduces}{_neighbours(best)}{_divided(best)}"
        f"{arranged}"
    )


def certified(p: Prediction, certificate: Certificate) -> str:
    """Say how far a plan is at most from the best of its division of the devices, and what keeps that from less."""
    c = p.candidate
    shape = f"{c.stages} x {c.replicas}" + (f" x {c.tensor}" if c.tensor > 1 else "")
    return (
        f"Certificate: on {shape} devices, with micro-batches of {c.microbatch}, a step takes at least "
        f"{certificate.bound_s:.4g} s, whatever the cut, placement and order. The chosen plan takes at most "
        f"{100 * certificate.gap(p.step_s):.1f} % more; {_BINDING[certificate.binds]}."
    )


_BINDING = {
    "compute": "what binds is compute",
    "link": "what binds are messages between devices and sums over copies",
    "memory": "what binds is memory",
    "barrier": "what binds is the barrier between steps, after which the pipeline fills anew",
}


def _collectives(p: Prediction) -> str:
    return "all-reduces and updates" if p.candidate.shard == "none" else "gathers, sums and updates"


def _neighbours(p: Prediction) -> str:
    """Which devices share a host, where that is the less usual way."""
    return "; stages on different hosts, each stage's copies inside one" if p.candidate.innermost == "replicas" else ""


def _divided(p: Prediction) -> str:
    """Return what the copies divide; a plan that divides nothing does not say so."""
    c = p.candidate
    if c.vocabulary == "split":
        return "; each device has a share of the head's rows"
    if c.experts > 1:
        travels = f", whose tokens travel {_share(_exchange(p), p)} of the step" if _exchange(p) else ""
        return f"; {c.experts} copies divide experts{travels}" + (f"; {_sharded(p)}" if c.shard != "none" else "")
    sequences = f"; {c.context} copies divide each sequence" if c.context > 1 else ""
    return sequences + (f"; {_sharded(p)}" if c.shard != "none" else "")


def _exchange(p: Prediction) -> float:
    """Seconds of a step in which the device that waits longest waits for tokens, recomputed forwards left out."""
    c, travel = p.candidate, [2 * sum(both) for both in zip(p.costs.dispatch, p.costs.combine, strict=True)]
    each = [sum(travel[s] for row in p.form.placement for s, d in enumerate(row) if d == at) for at in range(c.stages)]
    return max(each) * c.microbatches / p.form.replicas


def _sharded(p: Prediction) -> str:
    c = p.candidate
    what = ("optimizer state", "gradients and optimizer state", "weights, gradients and optimizer state")[c.level - 1]
    return f"{c.shard}: {c.shard_group} copies divide {what}"


def _named(p: Prediction) -> str:
    c = p.candidate
    shape = f"{c.stages} x {c.replicas}" + (f" x {c.tensor}" if c.tensor > 1 else "")
    return f"{c.schedule if c.stages > 1 else 'one stage'} on {shape}"


def _less_simple(p: Prediction, best: Prediction) -> str:
    """The most important respect in which ``p`` is less simple than ``best``; empty if it is not less simple."""
    worse = (word for word, a, b in zip(PLAIN, p.plainness, best.plainness, strict=True) if a != b)
    return next(worse, "") if p.plainness > best.plainness else ""


def why_slower(p: Prediction, best: Prediction) -> str:
    """Explain why a plan that fits was not chosen."""
    slower = p.step_s / best.step_s - 1
    less = _less_simple(p, best)
    if slower < -ALIKE:
        return f"{_per_cent(-slower)} faster, which is within the prediction's error, and less simple: {less}"
    if slower < ALIKE:
        if less:
            return f"as fast, but less simple: {less}"
        more = max(p.memory_bytes) - max(best.memory_bytes)
        if more > 0.01 * max(best.memory_bytes):
            return f"as fast, but takes {gib(more)} more memory"
        return "as fast"
    head = _slower(slower)
    work, idle, after = p.busy_s - best.busy_s, _idle(p) - _idle(best), _after(p) - _after(best)
    worst = max(work, idle, after)
    if worst == work:
        return f"{head}: {_work(p, best)}"
    if worst == idle:
        share, least = _shares(_idle(p), p, _idle(best), best)
        return f"{head}: bubbles {share} against {least}"
    share, least = _shares(_after(p), p, _after(best), best)
    return f"{head}: {_collectives(p)} take {share} of the step, against {least}"


def why_refused(reason: str, p: Prediction, best: Prediction) -> str:
    """Explain why a plan must not be chosen, and how fast it would have been if it fits."""
    change = p.step_s / best.step_s - 1
    if not p.fits:
        return reason
    return f"{_slower(change) if change > 0 else _per_cent(-change) + ' faster'}, but {reason}"


def why_too_large(p: Prediction, remedy: str | None) -> str:
    """Name the device that lacks memory, the excess, its largest memory term, and a fallback that would fit."""
    device = p.fullest
    memory = p.memory[device]
    said = (
        f"does not fit: {gib(p.excess)} over on device {device}, {memory.largest} {gib(memory.terms()[memory.largest])}"
    )
    return f"{said}; {remedy} would fit" if remedy else said


def gib(size_bytes: float) -> str:
    """Format a size in bytes.

    >>> gib(3 * 2**29), gib(5e6)
    ('1.5 GiB', '4.8 MiB')
    """
    return f"{size_bytes / GIB:.1f} GiB" if abs(size_bytes) >= 0.1 * GIB else f"{size_bytes / 2**20:.1f} MiB"


def _work(p: Prediction, best: Prediction) -> str:
    """Explain why each device computes longer than in the best plan."""
    c, b = p.candidate, best.candidate
    if c.devices < b.devices:
        return f"it uses {c.devices} device{'s' * (c.devices > 1)}, against {b.devices}"
    if _recomputes(p) and not _recomputes(best):
        return "it recomputes activations"
    if p.form.size != best.form.size:
        return f"kernels on {p.form.size} of a micro-batch of {c.microbatch} take longer per sample"
    if c.tensor != b.tensor:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        return f"tensor parallelism over {c.tensor} takes {ratio:.2f} times the device time of {b.tensor}"
    if c.experts != b.experts:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        return f"experts over {c.experts} take {ratio:.2f} times the device time of experts over {b.experts}"
    if c.context != b.context:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        return f"sequences over {c.context} copies take {ratio:.2f} times the device time of those over {b.context}"
    if c.microbatch != b.microbatch:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        split = ", with split backwards," if best.form.joint and not p.form.joint else ""
        return (
            f"kernels on micro-batches of {c.microbatch}{split} take {ratio:.2f} times as long per sample as of "
            f"{b.microbatch}"
        )
    longer = f"its devices compute {p.busy_s / best.busy_s:.2f} times as long"
    if _recomputes(p) and _recomputes(best):
        return f"{longer}, with more activations recomputed"
    if best.form.joint and not p.form.joint:
        return f"{longer}, with split backwards"
    return longer


def _recomputes(p: Prediction) -> bool:
    return p.candidate.recompute != "none" or bool(p.form.recomputes)


def _idle(p: Prediction) -> float:
    """Mean idle seconds of a device up to the end of the last compute task."""
    return p.compute_s - p.busy_s


def _after(p: Prediction) -> float:
    """Seconds that all-reduces and updates add after the last compute task."""
    return p.step_s - p.compute_s


def _share(seconds: float, p: Prediction) -> str:
    return f"{max(0.0, seconds) / p.step_s:.0%}"


def _shares(a: float, p: Prediction, b: float, best: Prediction) -> tuple[str, str]:
    """Format shares of two steps with as many digits (up to two) as it takes for them to differ."""
    for digits in (0, 1, 2):
        first, second = (f"{max(0.0, x) / of.step_s:.{digits}%}" for x, of in ((a, p), (b, best)))
        if first != second:
            break
    return first, second


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _slower(share: float) -> str:
    return f"{_per_cent(share)} slower" if share < 2 else f"{share + 1:.1f} times as long"
