"""The optimizer of a stage and the learning rate of a step. Both follow from the job alone, not from the plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypipe.cost.layer_work import newton_schulz_flops
from raypipe.job.train_spec import OPTIMIZERS, TrainSpec

MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of torch's optimizers that ``torch.compile`` is not to trace."""


def adafactor(held: list[dict[str, Any]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Make transformers' Adafactor, at the rates that are given; its state is of tensors alone, as checkpoints are.

    Its ``step`` counts in an integer, which a checkpoint would lose.
    """
    from transformers.optimization import Adafactor

    def count_in_tensors(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32)

    made: torch.optim.Optimizer = Adafactor(
        held, lr=lr, weight_decay=weight_decay, scale_parameter=False, relative_step=False
    )
    made.register_step_post_hook(count_in_tensors)
    return made


SCALE = "scale"
"""Key of a parameter group: the factor of each step's learning rate."""


class ParameterPiece(NamedTuple):
    """A part of a parameter that an optimizer updates: flat, or a whole matrix."""

    values: nn.Parameter
    name: str
    """The whole parameter's; empty for padding."""
    dims: int
    """The whole parameter's number of dimensions."""


def make_optimizer(
    train: TrainSpec, parameters: Mapping[str, nn.Parameter], pieces: Iterable[ParameterPiece] = ()
) -> torch.optim.Optimizer:
    """Make ``train.optimizer`` over the parameters of one stage.

    What decays, and at which rate a parameter is updated, follows from its name and its number of dimensions, which
    tensor parallelism and tying do not change. Where the parameters are bfloat16, the optimizer updates float32 master
    weights (``master_groups``).

    Args:
        train: says the optimizer.
        parameters: those that are updated whole, by name.
        pieces: of those that are divided.
    """
    groups = {name: group for group in train.groups for name in group.parameters}
    # A frozen stage has a group too.
    held: dict[tuple[float, float, bool], list[nn.Parameter]] = {(1.0, train.weight_decay, False): []}
    for values, name, dims in (*(ParameterPiece(p, name, p.dim()) for name, p in parameters.items()), *pieces):
        group = groups.get(name)
        decay = train.weight_decay if train.decay == "all" or dims > 1 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        by_muon = train.iterates_on(name, dims)
        held.setdefault((1.0 if group is None else group.scale, decay, by_muon), []).append(values)
    made = [
        {"params": some, SCALE: scale, "weight_decay": decay, **({MUON: by_muon} if train.optimizer == "muon" else {})}
        for (scale, decay, by_muon), some in held.items()
    ]
    if train.dtype != "bfloat16-true":
        return _optimizer(train, made)
    optimizer = _optimizer(train, master_groups(made))
    round_after_step(optimizer)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, that of each group by its factor.

    ``rate`` is a tensor while a step is captured.
    """
    for group in optimizer.param_groups:
        scale = group.get(SCALE, 1.0)
        group["lr"] = rate if scale == 1.0 else rate * scale


def _optimizer(train: TrainSpec, held: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if train.optimizer == "muon":
        both: torch.optim.Optimizer = untraced(MuonAndAdamW)(held, untraced, train)
        return both
    kind = OPTIMIZERS[train.optimizer]
    options: dict[str, Any] = {key: getattr(train, key) for key in kind.options}
    if kind.fused:
        options["fused"] = True
    name = kind.made_by.removeprefix("torch.optim.")
    make = adafactor if name == kind.made_by else untraced(getattr(torch.optim, name))
    made: torch.optim.Optimizer = make(held, lr=train.lr, weight_decay=train.weight_decay, **options)
    return made


@cache
def untraced(kind: Any) -> Any:
    """Return a subclass of an optimizer without the marks that keep ``torch.compile`` out; its updates are the same.

    To set them, the first call of a method imports the tracer (``torch._dynamo`` with SymPy): 1.9 s of processor time
    in every worker, where nothing is traced.
    """
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in MARKED}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))  # what marks ``step`` turns gradients off, too
    return type(kind.__name__, (kind,), methods)


def learning_rate(train: TrainSpec, step: int) -> float:
    """Return the learning rate of ``step``, which counts from 0.

    A linear warm-up comes first, then a constant rate or a cosine or linear decay to ``min_lr``, unless a table says
    all rates; steps beyond its end, of profiling, have its last one.
    """
    if train.lr_table is not None:
        return train.lr_table[min(step, len(train.lr_table) - 1)]
    if step < train.warmup_steps:
        return train.lr * (step if train.warmup_from_zero else step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if train.lr_schedule == "cosine" else 1 - min(1.0, done)
    return train.min_lr + (train.lr - train.min_lr) * share


# float32 master weights: what the optimizer updates where a stage's parameters are bfloat16.
#
# An update is often smaller than the last of a bfloat16's 8 bits and would be lost; in the master weight it adds up.
# The optimizer's step reads each gradient in float32, updates the master weight, and rounds it to the parameter.
# Optimizer state is float32 too. A parameter group of the optimizer has the parameters themselves under ``ROUNDED``.
#
# Source: Micikevicius et al. 2018 (Mixed Precision Training, arXiv:1710.03740), section 3.1.


ROUNDED = "rounded"
"""Key of a parameter group: the parameters that are rounded from its ``params``, in the same order."""


def master_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace the 16-bit parameters of parameter groups by float32 copies, their master weights."""
    result = []
    for group in groups:
        rounded = list(group["params"])
        params = [nn.Parameter(p.detach().float()) if p.element_size() < 4 else p for p in rounded]
        result.append({**group, "params": params, ROUNDED: rounded})
    return result


def round_after_step(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of an optimizer over ``master_groups`` take the parameters' gradients and round to them."""
    optimizer.register_step_pre_hook(_take_gradients)
    optimizer.register_step_post_hook(_round)


def updated_tensor(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """Return what the optimizer updates for a parameter: its master weight, or the parameter itself."""
    return next((master for p, master in _pairs(optimizer) if p is parameter), parameter)


@torch.no_grad()
def load_master(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter, and its master weight if it has one."""
    parameter.copy_(value)
    master = updated_tensor(optimizer, parameter)
    if master is not parameter:
        master.copy_(value)


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each parameter that has a master weight, with it."""
    for group in optimizer.param_groups:
        for p, master in zip(group.get(ROUNDED, ()), group["params"], strict=False):  # no ROUNDED: no masters
            if p is not master:
                yield p, master


@torch.no_grad()
def round_all(optimizer: torch.optim.Optimizer, of: Callable[[nn.Parameter], bool] = lambda master: True) -> None:
    """Round every parameter from its master weight, if it is one ``of`` these."""
    pairs = [(p, master) for p, master in _pairs(optimizer) if of(master)]
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])


def _take_gradients(optimizer: torch.optim.Optimizer, *_hook: object) -> None:
    for p, master in _pairs(optimizer):
        master.grad = None if p.grad is None else p.grad.to(master.dtype)


def _round(optimizer: torch.optim.Optimizer, *_hook: object) -> None:
    round_all(optimizer, lambda master: master.grad is not None)
    for _, master in _pairs(optimizer):
        master.grad = None


class OptimizerSnapshot:
    """A copy of what the next step of an optimizer overwrites.

    Parameters that are rounded from master weights are not in it: after ``restore``, the next step rounds them again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        groups = [(group.get(ROUNDED, group["params"]), group["params"]) for group in optimizer.param_groups]
        held = [master for both in groups for p, master in zip(*both, strict=True) if p.grad is not None]
        states = [optimizer.state.get(p) for p in held]
        self._kept = [
            (p, p.detach().clone(), state and {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
            for p, state in zip(held, states, strict=True)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copy. It can be used once."""
        for parameter, value, state in self._kept:
            parameter.copy_(value)
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = state


# Muon for a stage's matrices and AdamW for its other parameters, as one optimizer.
#
# Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is Scalable for LLM Training, arXiv:2502.16982), section 2.2.


MUON = "muon"
"""Key of a parameter group: whether Muon updates it."""


def whole_costs(train: TrainSpec, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Return the FLOPs of the update of each parameter that the optimizer reads whole, by name."""
    return {n: newton_schulz_flops(*p.shape) for n, p in parameters.items() if train.iterates_on(n, p.dim())}


class MuonAndAdamW(torch.optim.AdamW):
    """Updates the parameter groups with a true ``muon`` by torch.optim.Muon, and the others by AdamW.

    Both keep their state here, so that checkpoints, snapshots and moves to other devices see one optimizer.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], made_by: Callable[[Any], Any], train: TrainSpec) -> None:
        """Make both.

        Args:
            groups: parameter groups, each with ``muon``.
            made_by: makes the class of torch to use of a class (``untraced``).
            train: says the options.
        """
        options: dict[str, Any] = {
            "momentum": train.momentum,
            "nesterov": train.momentum > 0,
            "adjust_lr_fn": train.muon_rate,
        }
        matrices = [dict(group) for group in groups if group[MUON] and group["params"]]
        others = [dict(group) for group in groups if not group[MUON] or not group["params"]]
        super().__init__(others, train.lr, train.betas, train.eps, train.weight_decay)
        self._step_others = made_by(torch.optim.AdamW).step
        self._muon = made_by(torch.optim.Muon)(matrices, train.lr, train.weight_decay, **options) if matrices else None
        if self._muon is not None:
            self.param_groups += self._muon.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group[MUON]]
            self._step_others(self)
        finally:
            self.param_groups = groups
        if self._muon is not None:
            self._muon.state = self.state
            self._muon.param_groups = [group for group in groups if group[MUON]]
            self._muon.step()
