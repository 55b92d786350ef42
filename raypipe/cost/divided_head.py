"""Costs of a model whose head's rows are divided over the devices of a pipeline (``parallel.vocabulary: split``).

Its layers are those of ``models.divided_head``: the model itself, a share of the head for each device, and the loss. A
share makes its logits and, of these, the gradient of what the head reads, in its forward; and its logits once more for
the weight gradient: four products where a whole head takes three.
"""

from __future__ import annotations

from raypipe.cost.layer_work import LayerWork, TaskWork, with_head
from raypipe.cost.profile import HeadProfile, LayerProfile, Profile, TaskTimes
from raypipe.cost.stages import Cut
from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec

NUMBERS = 2
"""What a share says of each token."""


def divided_head(profile: Profile, shares: int) -> Profile:
    """Return the costs of a model whose head's rows are divided in ``shares``.

    Raises:
        SpecError: the profile knows no head that can be, or it has fewer rows.
    """
    head = profile.head
    if head is None or profile.tied_parameters:
        what = "is tied to another layer" if head else "is not known, or cannot be divided"
        raise SpecError("parallel.vocabulary", f"the profile's head {what}", "use whole, or give the whole plan")
    if head.rows <= (shares - 1) * head.rows_of(shares):
        raise SpecError("parallel.vocabulary", f"{head.rows} rows for {shares} devices", "use whole")
    *body, last = profile.layers
    said = float(NUMBERS * head.statistic * head.tokens)
    share = _share(last, head, shares, said)
    nothing = TaskTimes(forward=0.0, input_grad=0.0, weight_grad=0.0, joint=0.0, recompute=0.0)
    loss = LayerProfile(
        name="loss",
        parameters=0,
        times=dict.fromkeys(last.times, nothing),
        kept_bytes=2 * shares * said,  # as they come, and stacked
        output_bytes=0.0,
        input_bytes=shares * said,
        read_bytes=last.read_bytes,
    )
    named = (share.model_copy(update={"name": f"head.{i}"}) for i in range(shares))
    layers = (*body, _without(last, head), *named, loss)
    return profile.model_copy(update={"layers": layers, "head": None, "shares": shares})


def as_divided(profile: Profile, parallel: ParallelSpec) -> Profile:
    """Return the profile of a plan's layers, from that of the model's own."""
    split = parallel.vocabulary == "split" and profile.shares == 1
    return profile.each_kind(lambda kind: divided_head(kind, parallel.stages)) if split else profile


def divided_cut(body: Cut, shares: int) -> tuple[range, ...]:
    """Return the cut of a model whose head is divided: the model's own stages, then each share, and the loss."""
    first = body[-1][-1] + 1
    own = (range(part[0], part[-1] + 1) for part in body)
    return (*own, *(range(i, i + 1) for i in range(first, first + shares + 1)))


def _without(last: LayerProfile, head: HeadProfile) -> LayerProfile:
    """The last layer without the head, up to what that reads."""
    rest, parameters = 1.0 - head.share, head.rows * head.row_parameters
    logits = 0.0 if head.chunk is not None else float(head.statistic * head.tokens * head.rows)
    trained = None if last.trained_parameters is None else max(0, last.trained_parameters - parameters)
    return last.model_copy(
        update={
            "parameters": last.parameters - parameters,
            "trained_parameters": trained,
            "times": {size: times.scaled(rest) for size, times in last.times.items()},
            "kept_bytes": max(0.0, last.kept_bytes - logits - head.operand_bytes),  # what it reads is the output now
            "cast_bytes": max(0.0, last.cast_bytes - head.width * parameters * (head.width != head.master)),
            "waiting_bytes": max(0.0, last.waiting - head.operand_bytes - head.width * head.tokens * head.rows),
            "output_bytes": head.input_bytes,
            "workspace_bytes": max(0.0, last.workspace_bytes - 2 * logits),
            "workspace_fixed_bytes": 0.0,
            "split_workspace_bytes": None,
            "chunk_bytes": 0.0,
        }
    )


def _share(last: LayerProfile, head: HeadProfile, shares: int, said: float) -> LayerProfile:
    """Return what the first, and largest, share costs."""
    rows = head.rows_of(shares)
    part = head.share * rows / head.rows
    none = TaskWork()
    bare = LayerWork(
        name="head",
        parameters=rows * head.row_parameters,
        forward=none,
        input_grad=none,
        weight_grad=none,
        kept_bytes=head.operand_bytes if head.width != head.master else 0.0,  # else it is what came
        output_bytes=said,
        split_workspace_bytes=0.0,
        waiting_bytes=0.0,
    )
    work = with_head(bare, head.model_copy(update={"rows": rows}))
    # Logits and their gradients are narrow before and after the loss.
    narrow = 2.0 * head.width * (head.chunk or head.tokens) * rows if head.width != head.statistic else 0.0
    logits = work.chunk_bytes + narrow

    def times(of: TaskTimes) -> TaskTimes:
        # The loss and its gradient are computed anew in W, as in F.
        forward, weight = part * (of.forward + of.input_grad), part * (of.forward + max(of.input_grad, of.weight_grad))
        return TaskTimes(
            forward=forward, input_grad=0.0, weight_grad=weight, joint=weight, recompute=forward, spread=of.spread
        )

    return LayerProfile(
        name="head",
        parameters=work.parameters,
        times={size: times(of) for size, of in last.times.items()},
        kept_bytes=work.kept_bytes + head.input_bytes,
        cast_bytes=work.cast_bytes,
        waiting_bytes=work.waiting_bytes,
        output_bytes=said,
        input_bytes=head.input_bytes,
        read_bytes=last.read_bytes,
        workspace_bytes=head.operand_bytes + (logits if head.chunk is None else 0.0),
        workspace_fixed_bytes=work.workspace_fixed_bytes,
        chunk_bytes=0.0 if head.chunk is None else logits,
    )
