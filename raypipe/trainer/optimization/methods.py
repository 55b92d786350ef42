"""Optimizer and scheduler of a trainer: the methods that a subclass may define, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from raypipe.errors import SpecError
from raypipe.trainer.optimization.optimizers import check_optimizer, decays_as_matrices, optimizer_keys
from raypipe.trainer.optimization.rates import rate_keys, scheduler_of

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

        found: tuple[Any, Any] = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return found

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
        found = self._made_keys[steps]
        if "optimizer" in found:
            train = {key: value for key, value in train.items() if key not in SAID_BY_OPTIMIZER}
        return train | found

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
