"""All stages of a model on one device, in this process: the real executor and programs, no actors and no messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.job.train_spec import TrainSpec
from raypipe.models import LayeredModel
from raypipe.plan.cut.layers import cut_layers, line_of
from raypipe.plan.online.tune_first_k import FirstKTuner
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StepSettings
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.shapes import StageIOSpecs
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import GradientSync, TiedHolders
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.update.optimizer import make_optimizer
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import StageGraph
from raypipe.schedule.lowering.programs import Program, programs
from raypipe.schedule.passes import add_updates, forwards_alone, place_gradient_sync
from raypipe.schedule.verify import verify

LR = 1.0


@dataclass
class Fixed:
    """The same mini-batch in every step."""

    rows: Mapping[str, Tensor]
    own: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Lengths of the samples, of fields where they differ."""

    def batch(self, split: str, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        return {name: values[:batch] for name, values in self.rows.items()}

    def lengths(self, split: str, seed: int, step: int, batch: int) -> dict[str, NDArray[np.int64]]:
        return {name: values[:batch] for name, values in self.own.items()}


@dataclass
class Outcome:
    """What one step did."""

    loss: float
    gradients: dict[str, Tensor]
    """By parameter name; summed over all that holds a parameter."""
    stages: list[StageModule]


def even_cut(model: LayeredModel, stages: int) -> list[range]:
    """Layers of each stage, equally many."""
    begins = [*cut_layers([1.0] * model.count, line_of(stages)).starts, model.count]
    return [range(a, b) for a, b in pairwise(begins)]


def order(stages: int, microbatches: int, split: bool, recompute: bool = False, pairs: bool = False) -> str:
    """All forwards of two micro-batches, then their backwards: activations of several are alive at a time.

    ``pairs``: each two forwards are one task, as in forward doubling.
    """
    tasks = []
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        tasks += [
            f"{s}F{','.join(map(str, ms))}" for ms in ([pair] if pairs else [[m] for m in pair]) for s in range(stages)
        ]
        for m in pair:
            for s in reversed(range(stages)):
                tasks += [f"{s}R{m}"] * recompute
                tasks += [f"{s}B{m}"] if split else [f"{s}BW{m}"]
        if split:  # out of order on purpose
            tasks += [f"{s}W{m}" for s in range(stages) for m in reversed(pair)]
    return "device 0: " + " ".join(tasks)


@dataclass
class OneDevice:
    """An executor with all stages, its program, the stages, and the program of a validation."""

    executor: Executor
    program: Program
    stages: list[StageModule]
    evaluate: Program


def one_device(
    model: LayeredModel, cut: Sequence[Sequence[int]], rows: Mapping[str, Tensor], dtype: torch.dtype, microbatch: int,
    *, split: bool = False, recompute: bool = False, pairs: bool = False, seed: int = 3,
    autocast: torch.dtype | None = None, recomputed: set[int] | None = None, finest: bool = False,
    lengths: Mapping[str, NDArray[np.int64]] | None = None, groups: Mapping[str, Any] | None = None,
    by_layer: bool = False, first_k: int | None = None, graph: StageGraph | None = None, text: str | None = None,
    side_stream: Mapping[int, int] | None = None, make: Callable[..., Executor] = Executor,
    data: Any = None, train: TrainSpec | None = None, device: torch.device | None = None,
) -> OneDevice:  # fmt: skip
    """An executor for steps over all rows, with plain SGD, or as ``train`` says; ``data``: other than always the same.

    ``groups``: process groups over which stages all-reduce their gradients, as in a data-parallel copy; ``by_layer``:
    each layer is updated when its own sum is in; ``first_k``: layers whose weight gradients are postponed; ``graph``:
    which stages talk, where they are no chain. ``text``: the order, if not ``order``'s; ``side_stream``: as in a job.
    """
    device = device or torch.device("cpu")
    batch = len(next(iter(rows.values())))
    count = batch // microbatch
    schedule = from_text(order(len(cut), count, split, recompute, pairs) if text is None else text)
    if graph is not None:
        schedule = replace(schedule, graph=graph)
    specs = StageIOSpecs(model, cut, microbatch, graph)
    if groups is not None:
        schedule = place_gradient_sync(schedule, "eager", copies=2)
    schedule = add_updates(schedule)
    verify(schedule)
    stages = [
        StageModule(model, part, seed, device, split or first_k is not None, recomputed, finest, specs.ends_of(s))
        for s, part in enumerate(cut)
    ]
    modules = {(s, 0): stage for s, stage in enumerate(stages)}
    optimizers: dict[Any, torch.optim.Optimizer] = {
        key: torch.optim.SGD([{"params": list(m.trained.values())}], lr=LR)
        if train is None
        else make_optimizer(train, m.trained)
        for key, m in modules.items()
    }
    tied = tuple(
        TiedHolders(g.name, tuple(dict.fromkeys(name for _, name in g.parameters)), (0,), g.parameters[0][0])
        for g in model.tied
    )
    fields = {name for stage in stages for name in stage.reads}
    feed = Feed(data or Fixed(rows, lengths or {}), model.task, fields, seed, batch, microbatch, device, dtype)
    executor = make(
        StepSettings(
            seed=seed, microbatches=count, samples_per_microbatch=microbatch,
            clip=None if train is None else train.clip, update="wait", timeout_s=10.0,
            autocast=autocast, device=device, by_layer=by_layer, side_stream=side_stream,
        ),
        modules, optimizers, model.task, feed,
        GradientSync(
            0, modules, schedule.placement, tied, groups or {}, by_layer=by_layer,
            tuner=None if first_k is None else partial(FirstKTuner, fixed=first_k),
        ),
        Shares(None) if train is None else DeviceShares(None),
        {}, {}, specs, {},
    )  # fmt: skip
    (program,), (evaluate,) = programs(schedule), programs(forwards_alone(schedule))
    return OneDevice(executor, program, stages, evaluate)


def run_step(
    model: LayeredModel, cut: Sequence[Sequence[int]], rows: Mapping[str, Tensor], dtype: torch.dtype,
    microbatch: int, *, step: int = 5, **variant: Any,
) -> Outcome:  # fmt: skip
    """One training step over all rows; gradients are read off a plain SGD update. ``variant``: as ``one_device``'s."""
    made = one_device(model, cut, rows, dtype, microbatch, **variant)
    stages = made.stages
    before = {(s, n): p.detach().clone() for s, stage in enumerate(stages) for n, p in stage.named.items()}
    result = made.executor.run(made.program, step, LR)
    gradients: dict[str, Tensor] = {}
    for (s, name), old in before.items():
        moved = (old - stages[s].named[name].detach()) / LR
        assert name not in gradients or torch.equal(gradients[name], moved), f"copies of {name} drifted apart"
        gradients[name] = moved
    return Outcome(result.loss_sum, gradients, stages)
