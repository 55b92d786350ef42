"""The learning rate of each step, as the Hugging Face Trainer's scheduler gives it.

What follows from the step alone is written down once, for the whole run, by the scheduler itself: ``train.lr_table``.
The schedules that a job file has by name keep their name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raypipe.errors import SpecError, nearest
from raypipe.trainer.optimization.optimizers import reference_group, start_rate

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
"""Schedules of transformers that ``train.lr_schedule`` has."""
FOLLOWS_THE_RUN = ("reduce_lr_on_plateau", "greedy")
"""Schedules whose rates depend on what the run does."""
STEP_ALONE = "use a schedule of the step alone, such as cosine_with_min_lr or warmup_stable_decay"


def kind_of(a: Mapping[str, Any]) -> str:
    """Return the name of the schedule that the arguments ask for.

    Raises:
        SpecError: there is none of that name, or its rates depend on what the run does.
    """
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    kind = str(getattr(a["lr_scheduler_type"], "value", a["lr_scheduler_type"]))
    known = [one.value for one in TYPE_TO_SCHEDULER_FUNCTION if one.value not in FOLLOWS_THE_RUN]
    if kind in FOLLOWS_THE_RUN:
        raise SpecError("args.lr_scheduler_type", f"{kind} changes rates by the losses of the run", STEP_ALONE)
    if kind not in known:
        raise SpecError("args.lr_scheduler_type", f"{kind} is not available", nearest(kind, known))
    return kind


def warmup(a: Mapping[str, Any], steps: int) -> int:
    """Return the warm-up steps; as in newer transformers, a number below 1 is a share of all steps."""
    given, ratio = float(a["warmup_steps"] or 0.0), float(a["warmup_ratio"] or 0.0)
    return int(given) if given >= 1 else math.ceil(steps * (given or ratio))


def scheduler_of(a: Mapping[str, Any], optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return the scheduler of transformers that the arguments ask for.

    Raises:
        SpecError: as ``kind_of``, or it does not take ``lr_scheduler_kwargs``.
    """
    from transformers import get_scheduler

    kind, more = kind_of(a), a["lr_scheduler_kwargs"]
    try:
        return get_scheduler(kind, optimizer, warmup(a, steps), steps, dict(more) if more else None)
    except (TypeError, ValueError) as error:
        fix = f"give the arguments of transformers' schedule {kind}"
        raise SpecError("args.lr_scheduler_kwargs", str(error), fix) from None


def rate_keys(trainer: Any, plain: type, steps: int) -> dict[str, Any]:
    """Return the keys of ``train`` that say the learning rates of a trainer's run.

    Args:
        trainer: the trainer; its ``optimizer`` and ``lr_scheduler`` are those that the script makes or gives, or None.
        plain: the class whose ``create_scheduler`` is transformers' own.
        steps: of the run.

    Raises:
        SpecError: as ``scheduler_of``, or the rates of a scheduler cannot be written down.
    """
    a = trainer.arguments
    own = "create_scheduler" in vars(trainer) or type(trainer).create_scheduler is not plain.create_scheduler  # type: ignore[attr-defined]
    given = trainer.lr_scheduler is not None
    if not (own or given) and (kind := kind_of(a)) in SCHEDULES and not a["lr_scheduler_kwargs"]:
        # transformers' constant has no warm-up
        ahead = 0 if kind == "constant" else warmup(a, steps)
        return {"lr_schedule": SCHEDULES[kind], "warmup_steps": ahead, "warmup_from_zero": ahead > 0}
    where = f"{type(trainer).__name__}.create_scheduler" if own else "optimizers" if given else "args.lr_scheduler_type"
    if trainer.optimizer is None:
        trainer.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=float(a["learning_rate"]))
    made = trainer.create_scheduler(num_training_steps=steps)
    return {"lr_table": table(trainer.lr_scheduler or made, trainer.optimizer, steps, where)}


def table(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int, where: str) -> list[float]:
    """Return the learning rates of a run's steps, by doing the steps of its scheduler; it is as before afterwards.

    They are those of the optimizer's ``reference_group``, and the other groups' are multiples of them.

    Args:
        scheduler: of ``optimizer``.
        optimizer: its gradients are dropped, as the Trainer does before its first step.
        steps: of the run.
        where: names the scheduler in errors.

    Raises:
        SpecError: it is no scheduler of the optimizer, it waits for the losses of the run, changes more than the rate,
            rates of groups are no multiples of one another, or a rate is negative or not finite.
    """
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) or name == "GreedyLR":
        raise SpecError(where, f"{name} changes rates by the losses of the run", STEP_ALONE)
    if not isinstance(scheduler, LRScheduler):
        fix = "return one of torch.optim.lr_scheduler, and keep it as self.lr_scheduler"
        raise SpecError(where, f"makes {name}, which is no scheduler of torch", fix)
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise SpecError(where, "its scheduler is of another optimizer", "make it of self.optimizer")
    before = copy.deepcopy(scheduler.state_dict()), [{**group} for group in optimizer.param_groups]
    try:
        return _rates(scheduler, optimizer, steps, where)
    finally:
        scheduler.load_state_dict(before[0])
        for group, values in zip(optimizer.param_groups, before[1], strict=True):
            group.update(values)


def _rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int, where: str) -> list[float]:
    optimizer.zero_grad()
    held, groups, name = _others(optimizer), optimizer.param_groups, type(scheduler).__name__
    reference = groups[reference_group(optimizer)]
    highest = start_rate(reference)
    found: list[float] = []
    for step in range(steps):
        rate = float(reference["lr"])
        if not (math.isfinite(rate) and rate >= 0):
            raise SpecError(where, f"gives step {step + 1} a learning rate of {rate}", "give finite rates of 0 or more")
        for group in groups:
            if not math.isclose(group["lr"], rate * (start_rate(group) / highest), rel_tol=1e-12):
                why = f"{name} gives step {step + 1} rates of groups that are no multiples of those they begin with"
                raise SpecError(
                    where, why, "multiply the rates of all groups by the same, as LambdaLR with one function"
                )
        found.append(rate)
        optimizer.step()  # of no gradient: a scheduler asks for it
        scheduler.step()
        if (now := _others(optimizer)) != held:
            changed = next(key for (number, key), value in now.items() if value != held.get((number, key)))
            raise SpecError(where, f"{name} changes {changed}, and here only the learning rate can change", STEP_ALONE)
    return found


def _others(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """Return what an optimizer is told beside its rates; ``initial_lr`` and the like belong to schedulers."""
    return {
        (number, key): value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key in optimizer.defaults and key != "lr"
    }
