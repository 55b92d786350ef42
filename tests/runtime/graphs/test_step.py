"""A whole step of one device as one graph, on recorded graphs: the numbers of the same steps without a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers, keyed_random
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.graphs.step_executor import UNCAPTURED, StepExecutor, StepKeys
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.update.late_updates import SideUpdates
from raypipe.runtime.update.optimizer import learning_rate
from tests.exhaustive import exhaustive
from tests.runtime.graphs.recorded import FreedMemoryError, RecordedGraphs
from tests.runtime.host_waits import Noise, side_order
from tests.runtime.runs.one_device import OneDevice, even_cut, one_device

pytestmark = pytest.mark.slow
SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.1, tie_embeddings=True)
STEPS = 4
BATCH, MICROBATCH = 4, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "joint": {"clip": 0.5}, "split": {"split": True}, "recomputed": {"recompute": True},
    "side stream": {"split": True, "side_stream": {}, "stages": 4},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "clip": 0.1},
    "groups": {"groups": [{"parameters": list(GptLayers(SPEC).parameter_names(1)), "scale": 0.3}], "clip": 0.5},
    "autocast": {"dtype": "bfloat16", "clip": 0.5}, "master weights": {"dtype": "bfloat16-true"},
    "held": {"split": True, "side_stream": {1: 0}, "stages": 4},
}  # fmt: skip
DTYPES = {"bfloat16": torch.float32, "bfloat16-true": torch.bfloat16}


def train_of(name: str) -> TrainSpec:
    own = {key: value for key, value in VARIANTS[name].items() if key in TrainSpec.model_fields}
    return TrainSpec(
        steps=STEPS, batch=BATCH, lr=0.01, lr_schedule="cosine", warmup_steps=2, seed=3, **{"dtype": "float64", **own}
    )


def device(name: str, graphs: RecordedGraphs | None) -> tuple[OneDevice, TrainSpec]:
    train = train_of(name)
    how = {key: value for key, value in VARIANTS[name].items() if key not in TrainSpec.model_fields}
    dtype, stages = DTYPES.get(train.dtype, torch.float64), how.pop("stages", 2)
    model = GptLayers(SPEC, dtype)
    if "side_stream" in how:
        how["text"] = side_order(stages, BATCH // MICROBATCH, how["side_stream"])
    make = Executor if graphs is None else partial(StepExecutor, graphs)
    made = one_device(
        model, even_cut(model, stages), Noise(SPEC).batch("train", 0, 0, BATCH), dtype, MICROBATCH, make=make,
        data=Noise(SPEC), train=train, autocast=torch.bfloat16 if train.dtype == "bfloat16" else None, **how,
    )  # fmt: skip
    return made, train


def trained(made: OneDevice, train: TrainSpec, before: Callable[[int], None] = lambda step: None) -> Any:
    """Losses, norms and samples, asked for as the driver does of a GPU, a step later; parameters at the end."""
    result, last = [], None
    for step in range(STEPS):
        before(step)
        started = made.executor.start(made.program, step, learning_rate(train, step))
        if last is not None:
            result.append(last.result())
        last = started
    assert last is not None
    result.append(last.result())
    made.executor.updates.commit()
    values = {f"{s} {n}": p.detach().clone() for s, stage in enumerate(made.stages) for n, p in stage.named.items()}
    assert all((one.times[:, 1] >= one.times[:, 0]).all() for one in result)
    made.executor.close()
    return [(r.loss_sum, r.norm_squared, r.samples) for r in result], values


@cache
def plain(name: str) -> Any:
    """What steps without a graph do."""
    return trained(*device(name, None))


def assert_same(a: Any, b: Any, norms: float = 0.0) -> None:
    """Losses and parameters are the same; norms differ by no more than ``norms``, relatively."""
    for one, other in zip(a[0], b[0], strict=True):
        assert (one[0], one[2]) == (other[0], other[2])
        assert abs(one[1] - other[1]) <= norms * other[1]
    assert all(torch.equal(value, b[1][name]) for name, value in a[1].items())


@pytest.mark.parametrize(
    "name", ["joint", "groups", "side stream", "autocast", *exhaustive("split", "recomputed", "sgd", "master weights")]
)
def test_the_numbers_of_steps_without_a_graph(name: str) -> None:
    """The uncaptured second stream is a thread, which adds up the norm in any order."""
    graphs = RecordedGraphs()
    made, train = device(name, graphs)
    result = trained(made, train)
    assert (graphs.captures, graphs.replays) == (1, STEPS - UNCAPTURED)
    assert made.executor.notices() == ()
    assert_same(result, plain(name), norms=1e-12 if name == "side stream" else 0.0)


def test_what_comes_between_two_steps() -> None:
    """Counters leave their cache, a validation runs, parameters move, and the program is another: twice captured."""
    graphs = RecordedGraphs()
    made, train = device("joint", graphs)

    def before(step: int) -> None:
        keyed_random._finalised.cache_clear()
        if step == STEPS - 1:
            for stage in made.stages:
                for parameter in stage.parameters():
                    parameter.data = parameter.data.clone()

    assert_same(trained(made, train, before), plain("joint"))
    assert graphs.captures == 2


def test_another_program_runs_uncaptured_first() -> None:
    graphs = RecordedGraphs()
    made, train = device("joint", graphs)

    def before(step: int) -> None:
        if step == STEPS - 1:
            made.program = replace(made.program)

    assert_same(trained(made, train, before), plain("joint"))
    assert (graphs.captures, graphs.replays) == (1, STEPS - UNCAPTURED - 1)


@pytest.mark.parametrize("name", ["joint", "side stream"])
def test_a_step_that_cannot_be_captured_runs_without_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, train = device(name, RecordedGraphs())
    wrapped = GradientSync.norm_squared

    def reads(self: GradientSync, of: Any = None) -> torch.Tensor:
        result = wrapped(self, of)
        assert result.item() >= 0
        return result

    monkeypatch.setattr(GradientSync, "norm_squared", reads)
    result = trained(made, train)
    (note,) = made.executor.notices()
    assert note.startswith("steps do not run as a CUDA graph: operation not permitted when stream is capturing")
    assert_same(result, plain(name), norms=1e-12 if name == "side stream" else 0.0)


def test_samples_of_several_lengths_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made, train = device("joint", RecordedGraphs())
    feed = made.executor.feed
    inputs = feed.inputs

    def shorter(split: Any, step: int, mb: int) -> Any:
        cut = 6 if step == STEPS - 1 else 8
        return {name: x[:, :cut] for name, x in inputs(split, step, mb).items()}

    monkeypatch.setattr(feed, "inputs", shorter)
    trained(made, train)
    assert made.executor.notices() == ("steps do not run as a CUDA graph: samples differ in length",)


def test_held_weight_gradients_run_without_a_graph() -> None:
    graphs = RecordedGraphs()
    made, train = device("held", graphs)
    trained(made, train)
    assert graphs.captures == 0
    assert "holds gradients back" in made.executor.notices()[0]


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {}


def fault(variant: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Callable[[pytest.MonkeyPatch], None]]:
    def add(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
        FAULTS[plant.__name__.replace("_", " ")] = variant, plant
        return plant

    return add


@fault("joint")
def the_learning_rate_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Executor.begin

    def baked(self: Executor, program: Any, step: int, lr: Any, split: Any = "train") -> None:
        begin(
            self, program, step, learning_rate(train_of("joint"), step) if isinstance(lr, torch.Tensor) else lr, split
        )

    monkeypatch.setattr(Executor, "begin", baked)


@fault("joint")
def keys_are_those_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StepKeys.fill
    monkeypatch.setattr(StepKeys, "fill", lambda self, seed, step: None if self._tables else fill(self, seed, step))


@fault("joint")
def samples_are_those_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "inputs", stale(Feed.inputs))


@fault("joint")
def counters_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.runtime.graphs.step_executor.holding_counters", lambda read: nullcontext())


@fault("side stream")
def the_second_stream_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: SideUpdates, step: int) -> torch.Tensor:
        self._open.pop(step)
        return torch.zeros(())

    monkeypatch.setattr(SideUpdates, "join", forgets)


def stale(inputs: Any) -> Any:
    def last(self: Feed, split: Any, step: int, mb: int) -> Any:
        return inputs(self, split, min(step, UNCAPTURED), mb)

    return last


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, plant = FAULTS[name]
    expected = plain(variant)
    plant(monkeypatch)
    made, train = device(variant, RecordedGraphs())

    def before(step: int) -> None:
        if step > UNCAPTURED:
            keyed_random._finalised.cache_clear()

    def run() -> None:
        assert_same(trained(made, train, before), expected, norms=1e-12)
        assert made.executor.notices() == ()

    with pytest.raises((AssertionError, FreedMemoryError)):
        run()
