"""Say what a searched plan does otherwise than the plan that it was searched from."""

from __future__ import annotations

from raypipe.plan.predict.prediction import Prediction


def moved(found: Prediction, like: Prediction) -> str:
    """One clause: the stages, what changed its device, and how much the slowest device's work fell."""
    layers = sum(map(len, found.cut))
    where, was = _devices(found), _devices(like)
    other = sum(a != b for a, b in zip(where, was, strict=True))
    slowest, before = max(_work(found)), max(_work(like))
    parts = [f"{other} of {layers} layers on another device than in {like.candidate.schedule}"]
    if found.form.stages != like.form.stages:
        parts.append(f"{found.form.stages} stages for {like.form.stages}")
    change = slowest / before - 1 if before else 0.0
    if abs(change) >= 5e-4:
        parts.append(f"the slowest device has {abs(change):.1%} {'less' if change < 0 else 'more'} work")
    return "cut, placement and order found together: " + ", ".join(parts)


def _devices(p: Prediction) -> list[int]:
    """The device of each layer, in the first of the plan's own replicas."""
    return [d for own, d in zip(p.cut, p.form.placement[0], strict=True) for _ in own]


def _work(p: Prediction) -> list[float]:
    """Per device, seconds of a micro-batch's tasks, averaged over replicas."""
    costs = p.costs
    each = [sum(times) for times in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    found = [0.0] * p.candidate.stages
    for row in p.form.placement:
        for s, d in enumerate(row):
            found[d] += each[s] / p.form.replicas
    return found
