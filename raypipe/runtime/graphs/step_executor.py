"""A whole training step of one device without a pipeline as one graph: all tasks on both streams, and the updates.

The first steps run uncaptured, which makes the optimizers' state and shows where dropout draws. The next one is
captured, and all from then on are replays. Before each, the host fills what changes from step to step: samples, random
keys, the gradient of the loss, the learning rate. After it, loss and norm are copied to the host as ever.

On a GPU the learning rate of a captured update is float32, as its fused kernels want it; elsewhere float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data.sample_order import Split
from raypipe.models.keyed_random import Keys, RandomKeys, holding_counters
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.compiled.layout import RandomPlaces
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StartedStep
from raypipe.runtime.graphs.device_graphs import CudaGraphs, DeviceGraphs, Graph, GraphError
from raypipe.runtime.process.clock import Mark, Spans
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.update.late_updates import LayerUpdates, SideUpdates
from raypipe.runtime.update.optimizer import set_rate
from raypipe.schedule.lowering.programs import Program

UNCAPTURED = 2
"""Steps that run before the capture."""


class _NoClock:
    """The times of tasks in a graph are not known."""

    def begin(self) -> None:
        """See Clock.begin."""

    def mark(self) -> Mark:
        """See Clock.mark."""
        return 0.0

    def end(self, marks: NDArray[np.float64]) -> Spans:
        """See Clock.end."""
        raise AssertionError("a capture has no times")


@dataclass
class _Captured:
    """A captured step."""

    graph: Graph
    where: list[int]
    """Addresses of what it reads and writes beside its inputs."""
    losses: list[Tensor]
    squares: list[Tensor]
    counted: int
    read: list[Tensor]
    """What it reads beside all that, and so must live."""


class StepExecutor(Executor):
    """Runs the training steps of the only device, without messages, as graphs as soon as it can.

    Args:
        graphs: captures.
        given: the arguments of ``Executor``.
    """

    def __init__(self, graphs: DeviceGraphs, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._graphs, self._pool = graphs, graphs.new_pool()
        device = self.settings.device
        self._keys = StepKeys(device)
        self._fixed_scale = torch.zeros((), dtype=torch.float64, device=device)
        self._fixed_lr = torch.zeros((), dtype=torch.float32 if device.type == "cuda" else torch.float64, device=device)
        self._fixed_inputs: list[dict[str, Tensor]] = []
        self._captured: _Captured | None = None
        self._of: tuple[Program, object] | None = None
        """The program that is to be captured, and the compiled stages that it runs."""
        self._ran = 0
        """Steps of these that ran uncaptured."""
        self._parts: NDArray[np.float64] | None = None
        """Which parts of the last such step its tasks took."""
        self._notes: list[str] = []
        self._refused = self._refusal()
        if self._refused is not None:
            self._note(self._refused)

    def _refusal(self) -> str | None:
        """Return why no step can be captured."""
        if self.versions or self.sync.shards:
            return "weights move in memory"
        if any(module.statistics for module in self.modules.values()):
            return "running statistics (batch norm) are moved by the host"
        if isinstance(self.updates, SideUpdates) and self.settings.side_stream:
            return "parallel.side_stream holds gradients back for the next step"
        if self.senders or self.settings.slices > 1:
            return "they exchange messages, or run slices of micro-batches"
        if isinstance(self.updates, LayerUpdates):
            return "layers are updated one by one, as their sums come in"
        return None

    def start(self, program: Program, step: int, lr: float, split: Split = "train") -> StartedStep:
        """See Executor.start."""
        if split != "train" or self._refused is not None or self.measures or self.updates.ledger is not None:
            return super().start(program, step, lr, split)
        of = program, self.computation.compiled
        if self._of is None or any(a is not b for a, b in zip(of, self._of, strict=True)):
            self._of, self._captured, self._ran = of, None, 0
        if self._ran < UNCAPTURED:
            return self._uncaptured(program, step, lr)
        try:
            self._fill(step, lr)
            if not self._still_fits():
                self._captured = self._capture(program, step)
        except GraphError as error:
            self._refused = str(error).strip().partition("\n")[0] or type(error.__cause__).__name__
            self._note(self._refused)
            return super().start(program, step, lr, split)
        return self._replay(program, step, lr)

    def notices(self) -> tuple[str, ...]:
        """See Executor.notices."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def _note(self, why: str) -> None:
        self._notes.append(f"steps do not run as a CUDA graph: {why}")

    def _uncaptured(self, program: Program, step: int, lr: float) -> StartedStep:
        """Run a step uncaptured, as it will be captured."""
        self._ran += 1
        result: list[StartedStep] = []

        def run() -> None:
            with self._drawing(self._keys.noting):
                result.append(super(StepExecutor, self).start(program, step, lr))

        self._graphs.warm_up(run)
        return replace(result[0], times_of=self._seen)

    def _seen(self, spans: Spans) -> NDArray[np.float64]:
        """Note which parts of a step its tasks take."""
        times = self.times_of(spans)
        begin, end = float(times.min()), float(times.max())
        self._parts = (times - begin) / max(end - begin, 1e-12)
        return times

    def _estimated(self, spans: Spans) -> NDArray[np.float64]:
        """Return times of the tasks of a replay: its own, divided as those of the last step that was not captured."""
        times = self.times_of(spans)
        begin, end = float(times[0, 0]), float(times[0, 1])
        return times if self._parts is None else begin + (end - begin) * self._parts

    @contextmanager
    def _drawing(self, draws: Any) -> Iterator[None]:
        before, self.computation.draws = self.computation.draws, draws
        try:
            yield
        finally:
            self.computation.draws = before

    def _fill(self, step: int, lr: float) -> None:
        """Fill what changes from step to step.

        Raises:
            CaptureError: the samples have another shape than those of the capture.
        """
        targets = self.feed.targets("train", step)
        result = [self.feed.inputs("train", step, mb) for mb in range(self.microbatches)]
        if not self._fixed_inputs:
            self._fixed_inputs = [{name: torch.empty_like(x) for name, x in one.items()} for one in result]
        for fixed, one in zip(self._fixed_inputs, result, strict=True):
            if {name: x.shape for name, x in fixed.items()} != {name: x.shape for name, x in one.items()}:
                raise GraphError("samples differ in length")
            for name, x in one.items():
                fixed[name].copy_(x)
        self._keys.fill(self.settings.seed, step)
        self._fixed_scale.fill_(1.0 / targets)
        self._fixed_lr.fill_(lr)

    def _still_fits(self) -> bool:
        known = self._captured
        return known is not None and known.where == self._where()

    def _where(self) -> list[int]:
        """Return the addresses of parameters, buffers and optimizer state."""
        held: list[Tensor] = []
        for key, module in self.modules.items():
            held += [*module.parameters(), *module.buffers()]
            for state in self.updates.optimizers[key].state.values():
                held += [x for x in state.values() if isinstance(x, Tensor)]
        return [x.data_ptr() for x in held]

    def _capture(self, program: Program, step: int) -> _Captured:
        read: list[Tensor] = []
        self.updates.commit()

        def work() -> tuple[list[Tensor], list[Tensor]]:
            self.begin(program, step, self._fixed_lr)  # type: ignore[arg-type]
            self._fed = {step * self.microbatches + mb: one for mb, one in enumerate(self._fixed_inputs)}
            self._scales = {(step, torch.float64): self._fixed_scale}
            with torch.enable_grad(), self.casts.step():
                self.issue(program, step)
            if isinstance(self.updates, SideUpdates):
                self.updates.squares = [self.updates.join(step)]
            return self._losses.pop(step), self.updates.squares

        clock, self.clock = self.clock, _NoClock()
        try:
            with self._drawing(self._keys.fixed), holding_counters(read), self._second_stream(), self._capturable():
                graph, (losses, squares) = self._graphs.capture(work, self._pool)
            counted = self._counted.pop(step)
        except GraphError:
            self.forget()
            self.p2p_buffers.clear()
            if isinstance(self.updates, SideUpdates):
                self.updates.abandon(step)
            for key in self.modules:
                self.sync.drop(key)
            raise
        finally:
            self.clock = clock
            self._fed, self._scales = {}, {}
        return _Captured(graph, self._where(), losses, squares, counted, read)

    @contextmanager
    def _second_stream(self) -> Iterator[None]:
        """Let weight gradients and updates run on a second stream that can be captured."""
        late = self.updates
        if not isinstance(late, SideUpdates):
            yield
            return
        before, late.stream, late.reads = late.stream, self._graphs.side_stream(), False
        try:
            yield
        finally:
            late.stream, late.reads = before, True

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """Let torch's optimizers know that their state may be captured: their fused kernels keep it on the device."""
        groups = [group for one in self.updates.optimizers.values() for group in one.param_groups]
        groups = [group for group in groups if "capturable" in group]
        for group in groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in groups:
                group["capturable"] = False

    def _replay(self, program: Program, step: int, lr: float) -> StartedStep:
        known = self._captured
        assert known is not None
        self.split, self.training = "train", True
        self.step, self.base, self.program = step, step * self.microbatches, program
        for optimizer in self.updates.optimizers.values():
            set_rate(optimizer, lr)  # what a checkpoint, or a step without a graph, reads
        marks = np.empty((len(program.actions), 2))
        marks[:, 0] = self.clock.mark()
        known.graph.replay()
        marks[:, 1] = self.clock.mark()
        self._losses[step], self.updates.squares, self._counted[step] = list(known.losses), known.squares, known.counted
        started = self.end(marks, StepMemory(0, {}))
        return replace(started, times_of=self._estimated)


def executor_for(setup: Setup, device: torch.device, plain: type[Executor]) -> Callable[..., Executor]:
    """Return what makes the executor of a device: one that captures steps where ``train.cuda_graphs`` wants that."""
    wanted = setup.job.train.cuda_graphs in ("step", "auto") and setup.parallel.devices == 1
    return partial(StepExecutor, CudaGraphs(device)) if wanted and device.type == "cuda" else plain


# Random keys in fixed memory: a captured step draws from tables, which the host fills anew before every replay.
#
# While steps still run uncaptured, it is noted at which places each micro-batch draws.

Samples = tuple[int, ...]
"""Numbers of a micro-batch's samples in their step."""


class StepKeys:
    """The keys of all micro-batches of a step; ``noting`` and ``fixed`` take the place of ``RandomKeys``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[Samples, RandomPlaces] = {}
        self._tables: dict[Samples, list[Tensor]] = {}

    def noting(self, seed: int, step: int, samples: Sequence[int], training: bool) -> RandomKeys:
        """Return keys that note where they are drawn from."""
        places = self._places.setdefault(tuple(samples), RandomPlaces())
        return _Noting(places, seed, step, samples, training)

    def fixed(self, seed: int, step: int, samples: Sequence[int], training: bool) -> RandomKeys:
        """Return keys in the tables.

        Raises:
            LookupError: no such micro-batch has been noted.
        """
        at = tuple(samples)
        return _Fixed(self._places[at], self._tables[at], seed, step, samples, training)

    def fill(self, seed: int, step: int) -> None:
        """Fill the tables with the keys of a step; what is captured reads these very tensors."""
        for samples, places in self._places.items():
            made = places.tables(RandomKeys(seed, step, samples, True), self._device)
            known = self._tables.get(samples)
            if known is None or [x.shape for x in known] != [x.shape for x in made]:  # more places were noted
                self._tables[samples] = made
                continue
            for table, values in zip(known, made, strict=True):
                table.copy_(values)


class _Noting(RandomKeys):
    """Notes the places that draw."""

    def __init__(self, places: RandomPlaces, *args: Any) -> None:
        super().__init__(*args)
        self._places = places
        self._inside = False

    def _note(self, sites: Sequence[int], per_sample: bool) -> None:
        known = self._places.own if per_sample else self._places.shared
        known += [site for site in sites if site not in known]

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """See RandomKeys.seeds."""
        self._note([site], per_sample)
        self._inside = True
        try:
            return super().seeds(site, per_sample, device)
        finally:
            self._inside = False

    def table(self, sites: Sequence[int], per_sample: bool, device: torch.device) -> Tensor:
        """See RandomKeys.table; compiled stages ask for one."""
        if not self._inside:
            self._note(sites, per_sample)
        return super().table(sites, per_sample, device)


class _Fixed(RandomKeys):
    """Draws from tables."""

    def __init__(self, places: RandomPlaces, tables: Sequence[Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._sites: Callable[[bool], list[int]] = lambda own: places.own if own else places.shared
        self._fixed = {own: table for own, table in zip(_kinds(places), tables, strict=True)}

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """See RandomKeys.seeds."""
        return self._fixed[per_sample][self._sites(per_sample).index(site)]

    def table(self, sites: Sequence[int], per_sample: bool, device: torch.device) -> Tensor:
        """See RandomKeys.table."""
        own = self._sites(per_sample)
        return torch.stack([self._fixed[per_sample][own.index(site)] for site in sites])


def _kinds(places: RandomPlaces) -> list[bool]:
    """Return of which kinds ``RandomPlaces.tables`` returns a table."""
    return [kind for kind, sites in ((True, places.own), (False, places.shared)) if sites]
