"""Validations run compiled: the losses, figures and predictions of the eager forwards in which nothing is dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raypipe.job import GptSpec
from raypipe.models import GptLayers, LayeredModel, build_model
from raypipe.runtime.compiled import compiler
from raypipe.runtime.compiled.needs import Example
from raypipe.runtime.compiled.program import CompiledStage
from raypipe.runtime.compiled.trace import JointGraph
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.stage.stage import StageModule
from tests.exhaustive import ONLY, exhaustive
from tests.runtime.compiled.pieces import compiled_device, step_of
from tests.runtime.runs.one_device import OneDevice, even_cut, one_device
from tests.runtime.runs.test_any_model import CASES, LENGTHS, MICROBATCH, fields_of, job_of, model_of

pytest.importorskip("transformers")
SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.1, tie_embeddings=True)


def validated(made: OneDevice) -> tuple[StepResult, list[Tensor]]:
    """A validation of the whole batch, and its predictions."""
    executor = made.executor
    with executor.computation.keeping(None) as kept:
        result = executor.run(made.evaluate, 0, 0.0, split="val")
    return result, [torch.from_numpy(one.predictions) for one in sorted(kept)]


def count_programs(made: OneDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stages whose validation forward ran compiled, in order, from now on."""
    ran: list[int] = []
    found = CompiledStage.find_validation

    def find(self: CompiledStage, *given: Any) -> Any:
        program = found(self, *given)
        stages: Any = list(made.executor.computation.compiled.values())
        ran.extend([stages.index(self)] * (program is not None))
        return program

    monkeypatch.setattr(CompiledStage, "find_validation", find)
    return ran


def assert_validates_alike(made: OneDevice, eager: OneDevice) -> None:
    (a, ours), (b, theirs) = validated(made), validated(eager)
    assert a.loss_sum == pytest.approx(b.loss_sum, abs=1e-12, rel=0)
    assert a.samples == b.samples
    assert a.figures == [(name, pytest.approx(value, abs=1e-12)) for name, value in b.figures] or not b.figures
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).abs().max() <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", *exhaustive("t5", "frozen batch norm")])
def test_losses_and_predictions_without_dropout(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(case)
    rows = model.task.complete(CASES[case][1])
    cut = even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, validates=True)
    assert [(report.reason, report.eager_validation) for report in reports] == [(None, None)] * 2
    ran = count_programs(made, monkeypatch)
    assert_validates_alike(made, one_device(model, cut, rows, torch.float64, 2))
    assert sorted(ran) == [0, 0, 0, 1, 1, 1]


@pytest.mark.slow
def test_running_statistics_move_as_in_eager_steps_and_validations_read_them() -> None:
    spec = {name: value for name, value in CASES["frozen batch norm"][0].items() if name != "batch_norm"}
    rows = CASES["frozen batch norm"][1]
    model = build_model(job_of(spec), fields_of(rows))
    rows, cut = model.task.complete(rows), even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, validates=True, split=True)
    eager = one_device(model, cut, rows, torch.float64, 2, split=True)
    assert [(one.reason, one.eager_validation) for one in reports] == [(None, None)] * 2
    for step in range(2):
        for one in (made, eager):
            one.executor.run(one.program, step, 0.01)
        assert_validates_alike(made, eager)
    for ours, theirs in zip(made.stages, eager.stages, strict=True):
        assert bool(ours.statistics)
        for name, held in theirs.named_buffers():
            assert (dict(ours.named_buffers())[name] - held).abs().max() <= 1e-12, name


def gpt() -> tuple[LayeredModel, dict[str, Tensor]]:
    ids = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    return GptLayers(SPEC, torch.float64), rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [{"pairs": True, "recompute": True},
     *exhaustive({"recompute": True, "recomputed": {1}, "finest": True, "split": True})],
    ids=["pairs", "segments"],
)  # fmt: skip
def test_pairs_and_stages_in_segments_validate_whole(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in between moves the weights; it is what it would have been without the validation before it."""
    model, rows = gpt()
    cut = even_cut(model, 2)
    made, _, _ = compiled_device(model, cut, rows, torch.float64, 2, validates=True, **variant)
    eager = one_device(model, cut, rows, torch.float64, 2, **variant)
    ran = count_programs(made, monkeypatch)
    assert_validates_alike(made, eager)
    assert step_of(made).loss == pytest.approx(step_of(eager).loss, abs=1e-12, rel=0)
    assert_validates_alike(made, eager)
    assert len(ran) == 2 * 2 * (2 if "pairs" in variant else 4)


@ONLY
@pytest.mark.slow
def test_under_autocast_weights_are_cast_as_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    model = GptLayers(SPEC, torch.float32)
    cut = even_cut(model, 2)
    variant: dict[str, Any] = {"autocast": torch.bfloat16}
    made, traced, _ = compiled_device(model, cut, rows, torch.float32, 2, validates=True, **variant)
    assert all(joint.casts for stage in traced for _, joint, _ in stage.validation)
    ran = count_programs(made, monkeypatch)
    results = [validated(one)[0].loss_sum for one in (made, one_device(model, cut, rows, torch.float32, 2, **variant))]
    assert results[0] == pytest.approx(results[1], rel=2.0**-8)
    assert len(ran) == 8


@ONLY
@pytest.mark.slow
def test_samples_of_their_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert")
    rows = model.task.complete(CASES["bert"][1])
    own = {name: np.array(LENGTHS) for name in rows}
    cut = even_cut(model, 2)
    made, _, _ = compiled_device(model, cut, rows, torch.float64, MICROBATCH, validates=True, lengths=own)
    ran = count_programs(made, monkeypatch)
    assert_validates_alike(made, one_device(model, cut, rows, torch.float64, MICROBATCH, lengths=own))
    assert len(ran) == 2 * len(LENGTHS) // MICROBATCH


@pytest.mark.slow
def test_where_it_cannot_be_traced_validation_alone_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = compiler.trace

    def fails(module: StageModule, example: Example, device: torch.device | None) -> JointGraph:
        if not example.training:
            raise RuntimeError("no such operation\nin validation")
        return trace(module, example, device)

    monkeypatch.setattr(compiler, "trace", fails)
    model, rows = gpt()
    cut = even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, validates=True)
    assert [(report.reason, report.eager_validation) for report in reports] == [
        (None, "RuntimeError: no such operation")
    ] * 2
    ran = count_programs(made, monkeypatch)
    assert_validates_alike(made, one_device(model, cut, rows, torch.float64, 2))
    assert ran == []
