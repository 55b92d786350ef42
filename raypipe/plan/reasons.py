"""Why a plan lost, in one sentence: the part of its step that costs it most, or the memory it lacks."""

from __future__ import annotations

from raypipe.plan.best_first import NEAR
from raypipe.plan.candidate import PLAIN
from raypipe.plan.predict.prediction import Prediction

GIB = 2**30
ALIKE = 5e-4
"""Steps within this share of each other are called equally fast."""


def why_won(best: Prediction, fastest: Prediction) -> str:
    """What is to be said of the chosen plan; ``fastest`` is another one where a simpler plan is about as fast."""
    c = best.candidate
    head = "fastest"
    if best is not fastest:
        less = _less_simple(fastest, best)
        head = f"as fast as {_named(fastest)} within {100 * NEAR:g} %, and simpler ({less} there)"
    if c.devices == 1:
        return f"{head}: one device does it alone"
    if c.stages == 1:
        return f"{head}: no bubbles, {_share(_after(best), best)} of the step for gradient sums and updates"
    after = _after(best)
    sums = f", gradient sums and updates {_share(after, best)}" if after > ALIKE * best.step_s else ""
    return f"{head}: bubbles {_share(_idle(best), best)} of the step{sums}"


def _named(p: Prediction) -> str:
    c = p.candidate
    shape = f"{c.stages} x {c.replicas}" + (f" x {c.tensor}" if c.tensor > 1 else "")
    return f"{c.schedule if c.stages > 1 else 'one stage'} on {shape}"


def _less_simple(p: Prediction, best: Prediction) -> str:
    """The weightiest thing in which ``p`` is less simple; empty where it is not."""
    worse = (word for word, a, b in zip(PLAIN, p.plainness, best.plainness, strict=True) if a != b)
    return next(worse, "") if p.plainness > best.plainness else ""


def why_slower(p: Prediction, best: Prediction) -> str:
    """Compare a plan that fits with the best one."""
    slower = p.step_s / best.step_s - 1
    less = _less_simple(p, best)
    if slower < -ALIKE:
        return f"{_per_cent(-slower)} faster, which is too little to tell, and less simple: {less}"
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
    return f"{head}: gradient sums and updates take {share} of the step, against {least}"


def why_refused(reason: str, p: Prediction, best: Prediction) -> str:
    """A plan that may not be chosen, and what it would have brought."""
    change = p.step_s / best.step_s - 1
    if not p.fits:
        return reason
    return f"{_slower(change) if change > 0 else _per_cent(-change) + ' faster'}, but {reason}"


def why_too_large(p: Prediction, remedy: str | None) -> str:
    """Name the device, its largest term, the excess, and what would fit."""
    device = p.fullest
    memory = p.memory[device]
    said = (
        f"does not fit: {gib(p.excess)} over on device {device}, {memory.largest} {gib(memory.terms()[memory.largest])}"
    )
    return f"{said}; {remedy} would fit" if remedy else said


def gib(size_bytes: float) -> str:
    """A size for people.

    >>> gib(3 * 2**29), gib(5e6)
    ('1.5 GiB', '4.8 MiB')
    """
    return f"{size_bytes / GIB:.1f} GiB" if abs(size_bytes) >= 0.1 * GIB else f"{size_bytes / 2**20:.1f} MiB"


def _work(p: Prediction, best: Prediction) -> str:
    """Each device computes longer than with the best plan."""
    c, b = p.candidate, best.candidate
    if c.devices < b.devices:
        return f"it uses {c.devices} device{'s' * (c.devices > 1)}, against {b.devices}"
    if _recomputes(p) and not _recomputes(best):
        return "it computes activations twice"
    if p.form.size != best.form.size:
        return f"kernels on {p.form.size} of a micro-batch of {c.microbatch} take longer a sample"
    if c.tensor != b.tensor:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        return f"layers shared by {c.tensor} and their sums take {ratio:.2f} times the device time of {b.tensor}"
    if c.microbatch != b.microbatch:
        ratio = (p.busy_s * c.devices) / (best.busy_s * b.devices)
        apart = ", in backwards of two parts," if best.form.joint and not p.form.joint else ""
        return (
            f"kernels on micro-batches of {c.microbatch}{apart} take {ratio:.2f} times as long a sample as of "
            f"{b.microbatch}"
        )
    longer = f"its devices compute {p.busy_s / best.busy_s:.2f} times as long"
    if _recomputes(p) and _recomputes(best):
        return f"{longer}, with more activations computed twice"
    if best.form.joint and not p.form.joint:
        return f"{longer}, with backwards in two parts"
    return longer


def _recomputes(p: Prediction) -> bool:
    return p.candidate.recompute != "none" or bool(p.form.recomputes)


def _idle(p: Prediction) -> float:
    """Until the last compute task is done."""
    return p.compute_s - p.busy_s


def _after(p: Prediction) -> float:
    """What gradient sums and updates add to that."""
    return p.step_s - p.compute_s


def _share(seconds: float, p: Prediction) -> str:
    return f"{max(0.0, seconds) / p.step_s:.0%}"


def _shares(a: float, p: Prediction, b: float, best: Prediction) -> tuple[str, str]:
    """Shares of two steps, with as many digits as it takes to tell them apart."""
    for digits in (0, 1, 2):
        first, second = (f"{max(0.0, x) / of.step_s:.{digits}%}" for x, of in ((a, p), (b, best)))
        if first != second:
            break
    return first, second


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _slower(share: float) -> str:
    return f"{_per_cent(share)} slower" if share < 2 else f"{share + 1:.1f} times as long"
