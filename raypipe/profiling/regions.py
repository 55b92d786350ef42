"""Measure regions: layers alone, and every region with every weight gradient on two streams at the same time.

It runs in this process, on its GPU or else on two threads: the real stage modules, one micro-batch, the job's
optimizer. Layers of one kind take the same time, so one of them is measured for all (``profiled_steps.alike``).

Source: Oh et al. 2022 (OOO backprop), section 4.1, step 1.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from raypipe.cost.profile import TakenFor
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.models import Inputs, random_keys
from raypipe.models.host_copies import runs_behind
from raypipe.plan.cut.layers import cut_layers, line_of
from raypipe.plan.regions.profile import LayerCost, Region, RegionProfile, Together
from raypipe.profiling.epochs_to_target import OwnData
from raypipe.profiling.profiled_steps import alike
from raypipe.runtime.backward.waiting import WaitingOperands
from raypipe.runtime.process.memory import allocated_bytes
from raypipe.runtime.process.set_up import set_up_process
from raypipe.runtime.stage.stage import MicrobatchState, StageModule
from raypipe.runtime.transport.channel import Payload
from raypipe.runtime.update.optimizer import make_optimizer
from raypipe.runtime.update.side_stream import SideStream, prefer_main_stream, side_stream

Say = Callable[[str], None]


class Alone(NamedTuple):
    """One layer's seconds and bytes."""

    forward: float
    input_grad: float
    weight_grad: float
    kept: float
    waiting: float


def measure_regions(
    job: JobSpec, microbatch: int, regions: int, repeats: int, say: Say = lambda _: None
) -> RegionProfile:
    """Measure a job's layers and regions on this process's device.

    Args:
        job: the job; its ``parallel`` is not read.
        microbatch: samples of a micro-batch.
        regions: how many regions the forward is divided into, and the backward.
        repeats: measurements of each thing, of which the median counts.
        say: called with sentences about the progress.

    Raises:
        SpecError: the model has too few layers, or batch statistics, which one micro-batch cannot stand for.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    set_up_process(device)
    prefer_main_stream(device)
    with tempfile.TemporaryDirectory(prefix="raypipe-regions-") as folder:
        bench = _Bench(job, microbatch, repeats, device, Path(folder))
        stream = side_stream(device)
        try:
            return bench.profile(regions, stream, say)
        finally:
            stream.close()


class _Bench(OwnData):
    """The layers of a model, each a stage of its own, with one micro-batch that has been through all of them."""

    def __init__(self, job: JobSpec, microbatch: int, repeats: int, device: torch.device, folder: Path) -> None:
        super().__init__(job, folder)
        self.device, self.repeats, self.microbatch = device, repeats, microbatch
        if self.model.count < 2:
            raise SpecError("model", "has one layer: nothing runs beside it", "use a deeper model")
        self.read: Inputs = {name: t.to(device) for name, t in self.inputs("train", 0, 0, microbatch).items()}
        self.kinds = alike(self.model)
        self.stages = [StageModule(self.model, (n,), job.train.seed, device, True) for n in range(self.model.count)]
        self.optimizers: list[Any] = [
            make_optimizer(job.train, stage.trained) if stage.trained else None for stage in self.stages
        ]
        self._arrived: list[Payload] = [()]
        self._gradients: list[Payload] = []
        self._through()

    def _through(self) -> None:
        """Run a whole step, and remember what each layer receives."""
        states = []
        for n in range(len(self.stages)):
            states.append(self.forward(n))
            self._arrived.append(tuple(y.detach() for y in states[-1].outputs))
        back: Payload = (torch.ones_like(states[-1].outputs[0]) / len(next(iter(self.read.values()))),)
        for n, state in reversed([*enumerate(states)]):
            self._gradients.insert(0, back)
            back = self.stages[n].run_backward(state, back)
            self.weight_gradient(n, state)

    def forward(self, layer: int) -> MicrobatchState:
        """Run a layer's forward."""
        stage = self.stages[layer]
        arrived = tuple(x.detach() for x in self._arrived[layer])
        stage.track(arrived)
        drawn = random_keys(self.job.train.seed, 0, range(self.microbatch), training=True)
        with drawn, self.autocast(self.device.type):
            outputs = stage(arrived, self.read if stage.reads else {})
            if layer == len(self.stages) - 1:
                outputs = (self.model.task.loss(outputs[0], self.read),)
        return MicrobatchState(arrived, outputs)

    def backward(self, layer: int, state: MicrobatchState) -> None:
        """Run a layer's input gradient."""
        self.stages[layer].run_backward(state, self._gradients[layer])

    def weight_gradient(self, layer: int, state: MicrobatchState) -> None:
        """Run a layer's weight gradient and update."""
        self.stages[layer].run_weight_gradients(state)
        if self.optimizers[layer] is not None:
            self.optimizers[layer].step()
            self.optimizers[layer].zero_grad()

    def waiting(self, layer: int) -> MicrobatchState:
        """Return a micro-batch whose weight gradient is due."""
        state = self.forward(layer)
        self.backward(layer, state)
        return state

    def alone(self, layer: int) -> Alone:
        """Measure one layer."""
        stage, result = self.stages[layer], []
        for _ in range(self.repeats):
            stage.queue.waiting = noted = WaitingOperands()
            before = allocated_bytes(self.device)
            states: list[MicrobatchState] = []
            forward = self.seconds(lambda states=states: states.append(self.forward(layer)))  # type: ignore[misc]
            kept = max(0, allocated_bytes(self.device) - before)
            stage.queue.waiting = None
            (state,) = states
            back = self.seconds(lambda state=state: self.backward(layer, state))  # type: ignore[misc]
            weight = self.seconds(lambda state=state: self.weight_gradient(layer, state))  # type: ignore[misc]
            result.append(Alone(forward, back, weight, float(kept), float(noted.nbytes(noted.of))))
        return Alone(*(median(one[n] for one in result) for n in range(len(Alone._fields))))

    def profile(self, regions: int, stream: SideStream, say: Say) -> RegionProfile:
        """Measure everything."""
        count = len(self.stages)
        say(f"{len(set(self.kinds))} kinds of layers among {count}, on {self._device_name()}")
        known = {kind: self.alone(kind) for kind in sorted(set(self.kinds))}
        each = [known[kind] for kind in self.kinds]
        cuts = [
            [*cut_layers(costs, line_of(min(regions, count))).starts, count]
            for costs in ([one.input_grad for one in each], [one.forward for one in each])
        ]
        runs = [[range(a, b) for a, b in pairwise(cut)] for cut in cuts]
        result = [Region(kind="B", layers=tuple(reversed(run))) for run in reversed(runs[0])]
        result += [Region(kind="F", layers=tuple(run)) for run in runs[1]]
        together: list[Together] = []
        measured: dict[object, tuple[float, float]] = {}
        for number, region in enumerate(result):
            for layer in range(1, count):
                key = (region.kind, tuple(self.kinds[n] for n in region.layers), self.kinds[layer])
                if key not in measured:
                    pairs = [self.pair(region, layer, stream) for _ in range(self.repeats)]
                    measured[key] = median(p[0] for p in pairs), median(p[1] for p in pairs)
                main_s, sub_s = measured[key]
                together.append(Together(region=number, layer=layer, main_s=main_s, sub_s=sub_s))
            say(f"region {region.name}: beside each of {count - 1} weight gradients")
        tied = [tuple(sorted({n for n, _ in group.parameters})) for group in self.model.tied]
        return RegionProfile(
            device=self._device_name(),
            taken_for=TakenFor.job(self.job),
            microbatch=self.microbatch,
            layers=tuple(
                LayerCost(
                    name=name,
                    forward=one.forward,
                    input_grad=one.input_grad,
                    weight_grad=one.weight_grad,
                    kept_bytes=one.kept,
                    waiting_bytes=one.waiting,
                )
                for name, one in zip(self.model.names, each, strict=True)
            ),
            tied=tuple(layers for layers in tied if len(layers) > 1),
            regions=tuple(result),
            together=tuple(together),
        )

    def pair(self, region: Region, layer: int, stream: SideStream) -> tuple[float, float]:
        """Run a region and a weight gradient at the same time; returns when each ended, in seconds from the begin."""
        states = [self.forward(n) for n in region.layers] if region.kind == "B" else []
        late = self.waiting(layer)
        marks: list[Any] = [None, None, None]
        self._settle()
        marks[0] = self._mark()

        def second() -> None:
            self.weight_gradient(layer, late)
            marks[2] = self._mark()

        with torch.enable_grad():
            done = stream.run(second, keep=list(late.closures))
            if region.kind == "B":
                for n, state in zip(region.layers, states, strict=True):
                    self.backward(n, state)
            else:
                for n in region.layers:
                    self.forward(n)
            marks[1] = self._mark()
        done.synchronize()
        self._settle()
        return self._between(marks[0], marks[1]), self._between(marks[0], marks[2])

    def seconds(self, work: Callable[[], object]) -> float:
        """Measure work of the main stream alone."""
        self._settle()
        begin = self._mark()
        work()
        end = self._mark()
        self._settle()
        return self._between(begin, end)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _mark(self) -> Any:
        """A moment of the current stream."""
        if not runs_behind(self.device):
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) * 1e-3)

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU, one thread a stream"
