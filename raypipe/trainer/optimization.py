"""Optimizer and scheduler of a trainer: the methods that a subclass may define, and what becomes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raypipe.errors import SpecError, nearest
from raypipe.job.train_spec import OPTIMIZERS
from raypipe.trainer.given_model import without_peft

MAKE_OPTIMIZERS = ("create_optimizer", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names")
SAY_DECAY = frozenset({"weight_decay", "decay", "groups"})
SAID_BY_OPTIMIZER = SAY_DECAY | {"optimizer", "betas", "eps", "momentum", "alpha", "lr"}
"""Keys of ``train`` that follow from an optimizer."""


class Optimization:
    """Optimizer and scheduler of a trainer, as transformers' makes them."""

    args: Any
    arguments: dict[str, Any]
    directory: Path
    optimizer: Any
    lr_scheduler: Any
    _model: Any

    def _take_optimizers(self, optimizers: Any, optimizer_cls_and_kwargs: Any) -> None:
        """Take the arguments of the constructor.

        Raises:
            SpecError: both are given.
        """
        self.optimizer, self.lr_scheduler = optimizers or (None, None)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if self.optimizer is not None and optimizer_cls_and_kwargs is not None:
            raise SpecError("optimizer_cls_and_kwargs", "and optimizers are both given", "give one of them")
        self._made_keys: dict[int, dict[str, Any]] = {}

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer of the arguments, as the Trainer's; a subclass may return another.

        It is made once, before training, and updates nothing here: class, options and parameter groups are read off it.
        """
        if self.optimizer is None:
            from raypipe.trainer.in_process import training_arguments

            chosen = self._model if model is None else model
            args = training_arguments(self.args, str(self.directory))
            decays = set(self.get_decay_parameter_names(chosen))
            trained = [(name, p) for name, p in chosen.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in trained if name in decays], "weight_decay": args.weight_decay},
                {"params": [p for name, p in trained if name not in decays], "weight_decay": 0.0},
            ]
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(args, chosen)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters that decay, as the Trainer's; a subclass may return others."""
        from transformers import Trainer

        names: list[str] = Trainer.get_decay_parameter_names(None, model)
        return names

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return class and options of the arguments' optimizer, as the Trainer's; a subclass may return others."""
        from transformers import Trainer

        result: tuple[Any, Any] = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return result

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the scheduler of ``args.lr_scheduler_type``, as the Trainer's; a subclass may return another.

        It does all its steps before training, over the optimizer that the script makes, or one of one parameter; the
        rates are those of the run.
        """
        if self.lr_scheduler is None:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = scheduler_of(self.arguments, chosen, num_training_steps)
        return self.lr_scheduler

    def _optimized(self, train: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of ``train`` with those of optimizer and rates.

        Args:
            train: as the arguments say them.
            more: those that a job gives.

        Raises:
            SpecError: as ``optimizer_keys`` and ``rate_keys``, or a key has no effect beside them.
        """
        steps = int(more.get("steps", train["steps"]))
        if steps not in self._made_keys:
            self._made_keys[steps] = self._keys(steps, more)
        result = self._made_keys[steps]
        if "optimizer" in result:
            train = {key: value for key, value in train.items() if key not in SAID_BY_OPTIMIZER}
        return train | result

    def _keys(self, steps: int, more: Mapping[str, Any]) -> dict[str, Any]:
        given = self.optimizer, self.lr_scheduler
        where = self._origin(more)
        try:
            if where is not None:
                if not isinstance(self._model, nn.Module):
                    why = "is about the parameters of a model, and this one is given by name"
                    raise SpecError(where, why, "give the model as an instance")
                made = self.create_optimizer()
                self.optimizer = made if self.optimizer is None else self.optimizer
                check_optimizer(self.optimizer, where)
                if where != "args.weight_decay" and (vain := sorted(SAID_BY_OPTIMIZER & set(more))):
                    raise SpecError(f"job.train.{vain[0]}", f"is given beside {where}", "leave one of them out")
            rates = rate_keys(self, Optimization, steps)
            if "lr_table" in rates and "lr" in more:
                fix = "give args.learning_rate, or a scheduler"
                raise SpecError("job.train.lr", "has no effect where a scheduler gives the rates", fix)
            return rates if where is None else rates | optimizer_keys(self.optimizer, self._model, where)
        finally:
            self.optimizer, self.lr_scheduler = given

    def _origin(self, more: Mapping[str, Any]) -> str | None:
        """Return what makes an optimizer that a job has no name for; None if nothing does."""
        kind = type(self)
        for name in MAKE_OPTIMIZERS:
            if name in vars(self) or getattr(kind, name) is not getattr(Optimization, name):
                return f"{kind.__name__}.{name}"
        if self.optimizer is not None:
            return "optimizers"
        if self.optimizer_cls_and_kwargs is not None:
            return "optimizer_cls_and_kwargs"
        decay = float(self.arguments["weight_decay"])
        if not decay or not isinstance(self._model, nn.Module) or SAY_DECAY & set(more):
            return None
        return (
            None
            if decays_as_matrices(self._model, self.get_decay_parameter_names(self._model))
            else "args.weight_decay"
        )


# The optimizer that the Hugging Face Trainer would make, or that a script makes, as keys of ``train``.
#
# Its parameter groups become ``train.groups``: who a parameter is, is known by identity, and the workers know its name.


CLASSES = {
    getattr(torch.optim, kind.made_by.rpartition(".")[2]): (name, kind.options)
    for name, kind in OPTIMIZERS.items()
    if kind.made_by.startswith("torch.")
}
"""PyTorch's optimizers that ``train.optimizer`` has, each with its name and the keys of ``train`` that it reads."""
EPS = {"adagrad": 1e-10, "rmsprop": 1e-8}
"""PyTorch's default of optimizers for which the Trainer does not pass on ``adam_epsilon``."""
BY_OPTIM_ARGS = {"sgd": ("momentum",), "adagrad": ("eps",), "rmsprop": ("alpha", "eps", "momentum")}
"""Options that ``optim_args`` gives to an optimizer."""
OF_GROUPS = ("lr", "weight_decay")
"""Options that groups may differ in."""
WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")
"""Options that change no value."""


def decays_as_matrices(model: nn.Module, decays: Collection[str]) -> bool:
    """Return whether, of the trained parameters, the matrices alone are named in ``decays``."""
    return all((p.dim() > 1) == (name in decays) for name, p in model.named_parameters() if p.requires_grad)


def start_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group before any scheduler changed it."""
    return float(group.get("initial_lr", group["lr"]))


def reference_group(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of the parameter group whose rates are ``train``'s: the one with the highest."""
    rates = [start_rate(group) for group in optimizer.param_groups]
    return rates.index(max(rates))


def check_optimizer(optimizer: Any, where: str) -> None:
    """Check that workers can make an optimizer like this one.

    Args:
        optimizer: what was made.
        where: names its origin in errors.

    Raises:
        SpecError: it is of another class, has options that are not carried, or it has been used.
    """
    if type(optimizer) not in CLASSES:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in CLASSES)
        raise SpecError(where, f"makes {type(optimizer).__name__}, which is not available", f"make one of {names}")
    _, options = CLASSES[type(optimizer)]
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad's begins at 0
        raise SpecError(where, "its optimizer has made steps already, whose state is not carried", "make a new one")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise SpecError(where, "its optimizer has hooks, which no worker has", "remove them")
    usual = type(optimizer)([nn.Parameter(torch.zeros(1))]).defaults
    for key in usual.keys() - set(OF_GROUPS) - set(WAYS_TO_COMPUTE):
        result = [group[key] for group in optimizer.param_groups]
        if key in options:
            if any(value != result[0] for value in result):
                why = f"its groups differ in {key}, and here they may in {' and '.join(OF_GROUPS)} alone"
                raise SpecError(where, why, f"give all of them the same {key}")
        elif any(value != usual[key] for value in result):
            other = next(value for value in result if value != usual[key])
            raise SpecError(where, f"its optimizer has {key}={other}, which is not available", f"leave {key} out")


def optimizer_keys(optimizer: torch.optim.Optimizer, model: nn.Module, where: str) -> dict[str, Any]:
    """Return the keys of ``train`` that say an optimizer, after ``check_optimizer``.

    Parameters that it has not got stay as they are, as there, by a rate of 0.

    Args:
        optimizer: of parameters of the model.
        model: the instance that trains.
        where: names the optimizer's origin in errors.

    Raises:
        SpecError: it has parameters of something else, or its rates are all 0.
    """
    groups = optimizer.param_groups
    base = start_rate(groups[reference_group(optimizer)])
    if not (math.isfinite(base) and base > 0):
        raise SpecError(where, f"its highest learning rate is {base}", "give a finite one above 0")
    named = dict(without_peft(model).named_parameters())
    name_of = {id(p): name for name, p in named.items()}
    left = {name for name, p in named.items() if p.requires_grad}
    held: dict[tuple[float, float], list[str]] = {}
    for group in groups:
        if any(id(p) not in name_of for p in group["params"]):
            fix = "make it of self.model.parameters(), or of those of the model that you give"
            raise SpecError(where, "its optimizer has a parameter that is not the model's", fix)
        some = [name for p in group["params"] if (name := name_of[id(p)]) in left]
        held.setdefault((start_rate(group) / base, float(group["weight_decay"])), []).extend(some)
        left.difference_update(some)
    usual = next(key for key in held if key[0] == 1.0)
    if left:
        held.setdefault((0.0, 0.0), []).extend(sorted(left))
    made = [
        {"parameters": some, "scale": scale, "weight_decay": decay}
        for (scale, decay), some in held.items()
        if some and (scale, decay) != usual
    ]
    name, options = CLASSES[type(optimizer)]
    of_all = {key: groups[0][key] for key in options}
    return {"optimizer": name, **of_all, "lr": base, "weight_decay": usual[1], "decay": "all", "groups": made}


def options(a: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the keys of ``train`` that the arguments give to an optimizer, such as ``momentum``.

    Args:
        a: values of the arguments; ``optim_args`` is a text such as ``momentum=0.9``.
        optimizer: ``train.optimizer``.

    Raises:
        SpecError: ``optim_args`` says anything else.
    """
    takes = BY_OPTIM_ARGS.get(optimizer, ())
    usual = {
        "betas": [float(a["adam_beta1"]), float(a["adam_beta2"])],
        "eps": EPS.get(optimizer, float(a["adam_epsilon"])),
        "momentum": 0.0,
        "alpha": 0.99,
    }
    result = {key: usual[key] for key in OPTIMIZERS[optimizer].options}
    for one in str(a["optim_args"] or "").replace(" ", "").split(","):
        key, _, value = one.partition("=")
        if not one:
            continue
        try:
            if key not in takes:
                raise ValueError
            result[key] = float(value)
        except ValueError:
            fix = "give what AdamW has as adam_beta1, adam_beta2, adam_epsilon"
            if takes:
                fix = f"give {' or '.join(f'{name}=NUMBER' for name in takes)} alone"
            raise SpecError("args.optim_args", f"{one} is not available for {a['optim']}", fix) from None
    return result


# The learning rate of each step, as the Hugging Face Trainer's scheduler gives it.
#
# What follows from the step alone is written down once, for the whole run, by the scheduler itself: ``train.lr_table``.
# The schedules that a job file has by name keep their name.


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
    result: list[float] = []
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
        result.append(rate)
        optimizer.step()  # of no gradient: a scheduler asks for it
        scheduler.step()
        if (now := _others(optimizer)) != held:
            changed = next(key for (number, key), value in now.items() if value != held.get((number, key)))
            raise SpecError(where, f"{name} changes {changed}, and here only the learning rate can change", STEP_ALONE)
    return result


def _others(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """Return what an optimizer is told beside its rates; ``initial_lr`` and the like belong to schedulers."""
    return {
        (number, key): value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key in optimizer.defaults and key != "lr"
    }
