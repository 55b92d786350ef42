"""Seconds of a step with and without CUDA graphs: where launching kernels is all there is, and of GPT-2 medium's shape.

Three ways on one device: compiled stages, the same with a graph per task, and eager layers with a graph per step. On a
CPU, recorded graphs of a tiny model rehearse the code; their times mean nothing.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from raypipe.job import GptSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.compiler import compile_graph
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.graphs.device_graphs import CudaGraphs, DeviceGraphs
from raypipe.runtime.graphs.step_executor import UNCAPTURED, StepExecutor
from raypipe.runtime.graphs.tasks import TaskGraphs
from raypipe.schedule.lowering.programs import Program
from tests.runtime.compiled.pieces import compiled_device, interpreted
from tests.runtime.graphs.recorded import RecordedGraphs
from tests.runtime.host_waits import Noise
from tests.runtime.runs.one_device import OneDevice, even_cut, one_device

SHAPES = {
    "overhead": GptSpec(layers=4, hidden=128, heads=4, sequence=64, vocabulary=256, dropout=0.1, tie_embeddings=True),
    "gpt2-medium": GptSpec(
        layers=24, hidden=1024, heads=16, sequence=1024, vocabulary=50257, dropout=0.1, tie_embeddings=True
    ),
}
TINY = GptSpec(layers=1, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.1, tie_embeddings=True)
BATCH, MICROBATCH = 8, 2
WARM = UNCAPTURED + 3
ROUNDS, EACH = 7, 5
WAYS = ("compiled", "compiled_tasks", "eager", "eager_step")


def cuda_graphs(device: torch.device) -> dict[str, Any]:
    """Step times of all ways, interleaved, medians; losses agree."""
    shapes = SHAPES if device.type == "cuda" else {"tiny": TINY}
    return {name: _of_shape(spec, device) for name, spec in shapes.items()}


def losses_of_steps(executor: Executor, program: Program, steps: range, lr: float) -> list[float]:
    """Run the steps, each read when the next is queued."""
    losses, before = [], None
    for step in steps:
        started = executor.start(program, step, lr)
        if before is not None:
            losses.append(before.result().loss_sum)
        before = started
    assert before is not None
    return [*losses, before.result().loss_sum]


def _graphs(device: torch.device) -> DeviceGraphs:
    return CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()


def _of_shape(spec: GptSpec, device: torch.device) -> dict[str, Any]:
    ways: dict[str, OneDevice] = {}
    notes: list[str] = []
    tasks = TaskGraphs(_graphs(device))
    for way in WAYS:
        ways[way] = _device(way, spec, device, tasks)
    times = {way: list[float]() for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}

    def run(way: str, count: int) -> float:
        made, began = ways[way], time.perf_counter()
        first = len(losses[way])
        losses[way] += losses_of_steps(made.executor, made.program, range(first, first + count), 1e-4)
        return (time.perf_counter() - began) / count

    rounds = ROUNDS if device.type == "cuda" else 1
    for way in WAYS:
        run(way, WARM)
    for _ in range(rounds):
        for way in WAYS:
            times[way].append(run(way, EACH))
    notes += [*tasks.take_notes(), *ways["eager_step"].executor.notices()]
    worst = max(abs(a - b) for way in WAYS for a, b in zip(losses[way], losses["eager"], strict=True))
    result = {f"{way}_s": median(times[way]) for way in WAYS}
    return {
        **result, "tasks_over_compiled": result["compiled_tasks_s"] / result["compiled_s"],
        "step_over_eager": result["eager_step_s"] / result["eager_s"], "largest_loss_difference": worst, "notes": notes,
    }  # fmt: skip


def _device(way: str, spec: GptSpec, device: torch.device, tasks: TaskGraphs) -> OneDevice:
    dtype = torch.float32
    model = GptLayers(spec, dtype)
    train = TrainSpec(steps=1000, batch=BATCH, lr=1e-4, dtype="bfloat16", clip=1.0)
    data = Noise(spec)
    rows = data.batch("train", 0, 0, BATCH)
    shared: dict[str, Any] = {
        "autocast": torch.bfloat16 if device.type == "cuda" else None, "device": device, "data": data, "train": train
    }  # fmt: skip
    if way.startswith("eager"):
        make = partial(StepExecutor, _graphs(device)) if way == "eager_step" else Executor
        return one_device(model, even_cut(model, 1), rows, dtype, MICROBATCH, make=make, **shared)
    build = compile_graph if device.type == "cuda" else interpreted
    made, _, reports = compiled_device(model, even_cut(model, 1), rows, dtype, MICROBATCH, build=build, **shared)
    assert [report.reason for report in reports] == [None]
    if way == "compiled_tasks":
        ready: Any = made.executor.computation.compiled
        made.executor.computation.compiled = dict(tasks.captured(made.executor, ready))
    return made
