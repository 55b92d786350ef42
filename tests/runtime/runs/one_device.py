"""All stages of a model on one device, in this process: the real executor and programs, no actors and no messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from raypipe.runtime.update.gradients import GradientSync, TiedHolders, tied_over_devices
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.update.optimizer import make_optimizer
from raypipe.runtime.update.shards import divide, updated
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.lowering.programs import Program, programs
from raypipe.schedule.passes import add_updates, forwards_alone, place_gradient_sync
from raypipe.schedule.verify import verify

LR = 1.0
CPU = torch.device("cpu")


class TwoMembers:
    """A process group of this device and another one, which contributes what the test says."""

    def size(self) -> int:
        return 2


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


def executor_of(
    model: LayeredModel, cut: Sequence[Sequence[int]], schedule: Schedule, data: Any, train: TrainSpec | None, *,
    batch: int, microbatch: int, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU, copy: int = 0,
    split: bool | None = None, recomputed: Collection[int] | None = None, finest: bool = False, tied: bool = True,
    groups: Mapping[str, Any] | None = None, tuner: Any = None, shares: Any = None,
    make: Callable[..., Executor] = Executor, **settings: Any,
) -> Executor:  # fmt: skip
    """Make an executor with all stages of one copy, as a stage actor would; of plain SGD where ``train`` is None.

    ``microbatch``: samples of one; ``tied``: sum gradients of parameters in several stages; ``settings``: of a step.
    """
    split = any(task.kind == "W" for task in schedule.tasks()) if split is None else split
    specs = StageIOSpecs(model, cut, microbatch, schedule.graph)
    modules = {
        (s, copy): StageModule(model, list(part), seed, device, split, recomputed, finest, specs.ends_of(s))
        for s, part in enumerate(cut)
    }
    holders = tuple(
        TiedHolders(g.name, tuple(dict.fromkeys(name for _, name in g.parameters)), tuple(range(schedule.devices)),
                    g.parameters[0][0])
        for g in (model.tied if tied else ())
    )  # fmt: skip
    whole = tied_over_devices(holders)
    shards = divide(modules, schedule.sharding, schedule.placement, whole, groups or {}, train=train)
    optimizers: dict[Any, torch.optim.Optimizer] = {
        key: torch.optim.SGD([{"params": list(m.trained.values())}], lr=LR)
        if train is None
        else make_optimizer(train, *updated(m, shards.get(key)))
        for key, m in modules.items()
    }
    fields = {name for stage in modules.values() for name in stage.reads}
    feed = Feed(data, model.task, fields, seed, batch, microbatch, device, dtype)
    slices = schedule.rules.slices
    if slices > 1:
        feed.cut(slices, model.slice_lengths(slices))
    given = {"clip": None if train is None else train.clip, "update": "wait", "autocast": None, **settings}
    return make(
        StepSettings(
            seed=seed, microbatches=schedule.microbatches, samples_per_microbatch=microbatch, timeout_s=10.0,
            device=device, slices=slices, **given,
        ),
        modules, optimizers, model.task, feed,
        GradientSync(
            copy, modules, schedule.placement, holders, groups or {}, by_layer=given.get("by_layer", False),
            tuner=tuner, sharded=shards,
        ),
        Shares(None) if shares is None else shares, {}, {}, specs,
        {k: WeightVersions(m, schedule.versions) for k, m in modules.items()} if schedule.versions != "flush" else {},
    )  # fmt: skip


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
    batch = len(next(iter(rows.values())))
    count = batch // microbatch
    schedule = from_text(order(len(cut), count, split, recompute, pairs) if text is None else text)
    if graph is not None:
        schedule = replace(schedule, graph=graph)
    if groups is not None:
        schedule = place_gradient_sync(schedule, "eager", copies=2)
    schedule = add_updates(schedule)
    verify(schedule)
    executor = executor_of(
        model, cut, schedule, data or Fixed(rows, lengths or {}), train, batch=batch, microbatch=microbatch,
        dtype=dtype, seed=seed, device=device or CPU, split=split or first_k is not None, recomputed=recomputed,
        finest=finest, groups=groups, tuner=None if first_k is None else partial(FirstKTuner, fixed=first_k), make=make,
        shares=None if train is None else DeviceShares(None), autocast=autocast, by_layer=by_layer,
        side_stream=side_stream,
    )  # fmt: skip
    stages = [executor.modules[s, 0] for s in range(len(cut))]
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
