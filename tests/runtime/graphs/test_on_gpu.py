"""The CUDA graphs of a GPU: the numbers of the same work without them. None of this has run yet."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.compiler import compile_graph
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.graphs.device_graphs import CudaGraphs, GraphError
from raypipe.runtime.graphs.step_executor import StepExecutor
from raypipe.runtime.graphs.tasks import TaskGraphs
from raypipe.runtime.update.optimizer import learning_rate
from tests.runtime.compiled.pieces import compiled_device
from tests.runtime.host_waits import Noise, side_order
from tests.runtime.runs.one_device import even_cut, one_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SPEC = GptSpec(layers=4, hidden=32, heads=2, sequence=16, vocabulary=64, dropout=0.1, tie_embeddings=True)
TRAIN = TrainSpec(steps=6, batch=8, lr=0.01, lr_schedule="cosine", warmup_steps=2, seed=3, dtype="float64", clip=0.5)
LOOSE_NORM = 1e-7
"""A captured update has its learning rate in float32."""


def gpu() -> torch.device:
    return torch.device("cuda", 0)


def rows() -> dict[str, torch.Tensor]:
    return Noise(SPEC).batch("train", 0, 0, TRAIN.batch)


def trained(made: Any, train: TrainSpec = TRAIN) -> list[tuple[float, float]]:
    results = [made.executor.run(made.program, step, learning_rate(train, step)) for step in range(train.steps)]
    made.executor.close()
    return [(r.loss_sum, r.norm_squared) for r in results]


def test_a_failed_capture_leaves_the_gpu_as_it_was() -> None:
    graphs, x = CudaGraphs(gpu()), torch.ones(3, device=gpu())
    stream = torch.cuda.current_stream()
    with pytest.raises(GraphError):
        graphs.capture(lambda: x.sum().item(), graphs.new_pool())
    assert torch.cuda.current_stream() == stream
    graphs.warm_up(lambda: x * 2)
    graph, y = graphs.capture(lambda: x * 2, graphs.new_pool())
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value] * 3


@pytest.mark.parametrize("split", [False, True])
def test_tasks(split: bool) -> None:
    result = []
    for captures in (False, True):
        model = GptLayers(SPEC, torch.float64)
        made, _, reports = compiled_device(
            model, even_cut(model, 2), rows(), torch.float64, 2, build=compile_graph, split=split, device=gpu(),
            data=Noise(SPEC), train=TRAIN,
        )  # fmt: skip
        assert [report.reason for report in reports] == [None, None]
        tasks = TaskGraphs(CudaGraphs(gpu()))
        if captures:
            ready: Any = made.executor.computation.compiled
            made.executor.computation.compiled = dict(tasks.captured(made.executor, ready))
        result.append(trained(made))
        assert tasks.take_notes() == ()
    for one, other in zip(*result, strict=True):
        assert one == pytest.approx(other, abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("side", [False, True])
def test_whole_steps(side: bool) -> None:
    train = TRAIN.model_copy(update={"clip": None}) if side else TRAIN
    how: dict[str, Any] = {}
    if side:
        how = {"text": side_order(4, train.batch // 2, {}), "side_stream": {}}
    result = []
    for make in (Executor, partial(StepExecutor, CudaGraphs(gpu()))):
        model = GptLayers(SPEC, torch.float64)
        made = one_device(
            model, even_cut(model, 4 if side else 2), rows(), torch.float64, 2, split=side, device=gpu(), make=make,
            data=Noise(SPEC), train=train, **how,
        )  # fmt: skip
        result.append(trained(made, train))
        assert made.executor.notices() == ()
    for one, other in zip(*result, strict=True):
        assert one == pytest.approx(other, abs=LOOSE_NORM, rel=LOOSE_NORM)
