"""Compiled stages in the store: what is read computes what was written; whatever changes a stage changes its key."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled import stored
from raypipe.runtime.compiled.compiler import CHECKS, compile_parts, source_of, trace_stage
from raypipe.runtime.compiled.needs import Needs
from raypipe.runtime.compiled.program import CompiledStage, swap_in
from raypipe.runtime.compiled.stored import StoredStages, function_of, read_stage, stage_key, write_stage
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.runtime.executor.step import CutReport
from tests.exhaustive import exhaustive
from tests.runtime.compiled.pieces import assert_same, step_of
from tests.runtime.runs.one_device import CPU, OneDevice, even_cut, one_device

SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.1, tie_embeddings=True)

SETUP = cast(Any, SimpleNamespace(
    job=SimpleNamespace(model=SPEC, train=SimpleNamespace(dtype="float64")), cut=((0, 1), (2, 3))))  # fmt: skip


def device(spec: GptSpec = SPEC, split: bool = True, dtype: torch.dtype = torch.float64) -> OneDevice:
    model = GptLayers(spec, dtype)
    ids = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    return one_device(model, even_cut(model, 2), rows, dtype, 2, split=split)


@pytest.mark.slow
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
@pytest.mark.parametrize("split", [*exhaustive(False), True], ids=["joint", "B and W"])
def test_what_is_read_computes_what_was_written(split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, strides and alignment are those that it was compiled for, which is checked here in every call."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv(CHECKS, "1")
    made, plain = device(split=split), device(split=split)
    needs, ready = Needs(made.executor, [made.program]), {}
    for key, module in made.executor.modules.items():
        traced, path = trace_stage(module, needs.of(key)), tmp_path / str(key)
        parts = compile_parts(traced, source_of)
        assert all("assert_size_stride(" in part.pieces["forward"][1] for part in parts)
        write_stage(path, (parts, traced.kept))
        result = read_stage(path)
        assert result is not None
        assert result[1] == traced.kept
        ready[key] = CompiledStage.of(module, result[0], function_of)
    swap_in(made.executor, ready)
    for step in (5, 6):
        assert_same(step_of(made, step), step_of(plain, step))


def test_what_is_damaged_or_missing_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "stage"
    assert read_stage(path) is None
    write_stage(path, ([], CutReport(("a",), 1, 2)))
    assert read_stage(path) == ([], CutReport(("a",), 1, 2))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-12] + bytes([whole[-12] ^ 1]) + whole[-11:], b"", b"not a stage"):
        path.write_bytes(damaged)
        assert read_stage(path) is None


def test_whatever_changes_a_stage_changes_its_key() -> None:
    def key_of(made: OneDevice, spec: GptSpec = SPEC, budget: float = 1.0, dtype: str = "float64") -> str:
        job = SimpleNamespace(model=spec, train=SimpleNamespace(dtype=dtype))
        setup = cast(Any, SimpleNamespace(job=job, cut=((0, 1), (2, 3))))
        needs = Needs(made.executor, [made.program], budget=budget).of((0, 0))
        return stage_key(setup, 0, made.executor.modules[0, 0], needs, CPU)

    first = key_of(device())
    assert first == key_of(device())
    other = SPEC.model_copy(update={"dropout": 0.2})
    heads = SPEC.model_copy(update={"heads": 4})
    changed = [
        key_of(device(other), other),
        key_of(device(heads), heads),
        key_of(device(split=False)),
        key_of(device(), budget=0.5),
        key_of(device(dtype=torch.float32), dtype="float32"),
    ]
    frozen = device()
    next(frozen.executor.modules[0, 0].parameters()).requires_grad_(False)
    changed.append(key_of(frozen))
    assert len({first, *changed}) == 1 + len(changed)


def test_settings_of_inductor_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device()
    needs = Needs(made.executor, [made.program]).of((0, 0))

    def key() -> str:
        return stage_key(SETUP, 0, made.executor.modules[0, 0], needs, CPU)

    first = key()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert key() == first
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert key() != first


KEY_OF_A_LOSS = """
from raypipe.models.losses import OwnLoss
from raypipe.models.losses import GivenLoss
from raypipe.models.task import Labels
from raypipe.runtime.compiled.stored import _described
loss = GivenLoss(Labels(), ["labels", "pixel_values", "weights"])
loss.reads = frozenset(["labels", "weights", "pixel_values", "mask"])
print(_described(loss))
"""


def test_a_loss_is_described_alike_in_every_process() -> None:
    said = {
        subprocess.run([sys.executable, "-c", KEY_OF_A_LOSS], check=True, capture_output=True, text=True,
                       env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
    assert "Labels" in said.pop()


def test_another_length_has_another_key() -> None:
    made = device()
    needs = Needs(made.executor, [made.program]).of((0, 0))
    keys = {
        stage_key(SETUP, 0, made.executor.modules[0, 0], replace(needs, examples=examples), CPU)
        for examples in (
            needs.examples,
            tuple(replace(example, samples=3) for example in needs.examples),
            needs.examples * 2,
        )
    }
    assert len(keys) == 3


@dataclass
class RunSetup:
    """What ``Setup`` says of a run's compilation."""

    job: Any
    parallel: Any
    train: Any
    cut: Any = ((0, 1), (2, 3))
    done: int = 0
    samples: Any = None


def stages_of(made: OneDevice, begin: Callable[..., Any], limit_s: float = 60.0) -> StoredStages:
    """The stages of a device as its worker has them compiled; ``begin`` begins a task."""
    train = SimpleNamespace(dtype="float64", compile_timeout_s=limit_s, eval_every=0)
    job, parallel = SimpleNamespace(model=SPEC, train=train), SimpleNamespace(activation_memory_budget=1.0)
    setup = RunSetup(job, parallel, {0: made.program})
    return StoredStages(cast(Any, setup), made.executor, begin)


def test_a_damaged_stage_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = device()

    def begin() -> None:
        source = stages_of(made, lambda *request: asked.append(request[-1]))
        assert source.begin([(0, 0)]) == []
        assert source.compiles == (path is None or read_stage(path) is None)

    path: Path | None = None
    begin()
    (path,) = asked
    assert path is not None
    path.parent.mkdir()
    write_stage(path, ([], CutReport((), 0, 0)))
    begin()
    assert len(asked) == 1, "it is stored"
    path.write_text("{")
    begin()
    assert asked == [path, path]


def refuses(*request: Any) -> str:
    return "InductorError: no kernel"


def dies(*request: Any) -> str:
    os._exit(3)


def takes_long(*request: Any) -> str:
    time.sleep(60)
    return "too late"


@pytest.mark.runs
@pytest.mark.parametrize(
    ("compiler", "limit_s", "reason"),
    [
        (dies, 60.0, "the task that compiles it has failed"),
        (takes_long, 1.0, "train.compile_timeout_s"),
        *exhaustive((refuses, 60.0, "InductorError: no kernel")),
    ],
)
def test_a_task_that_fails_or_takes_too_long_leaves_the_stage_eager(
    compiler: Callable[..., str], limit_s: float, reason: str,
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored, "compile_stage", compiler)
    source = stages_of(device(), stored.begin_task, limit_s)
    began = time.monotonic()
    assert source.begin([(0, 0)]) == []
    ((_, stage, report),) = source.find()
    assert stage is None
    assert reason in str(report.reason)
    assert time.monotonic() - began < 50
    (task,) = source._tasks.values()
    if compiler is takes_long:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(task, timeout=30)
    monkeypatch.setattr(ray, "cancel", lambda *_, **__: pytest.fail("it has ended: Ray may fail a check of its own"))
    source.close()


@pytest.mark.runs
def test_a_task_that_still_compiles_ends_with_the_run(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored, "compile_stage", takes_long)
    source = stages_of(device(), stored.begin_task, 60.0)
    assert source.begin([(0, 0)]) == []
    (task,) = source._tasks.values()
    source.close()
    with pytest.raises(ray.exceptions.RayError):
        ray.get(task, timeout=30)
