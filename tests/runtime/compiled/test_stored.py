"""Compiled stages on disk: what is read computes what was written, and whatever changes a stage changes its key."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.compiler import trace_stage
from raypipe.runtime.compiled.inductor.toolchain import missing_toolchain
from raypipe.runtime.compiled.needs import Needs
from raypipe.runtime.compiled.stage import swap_in
from raypipe.runtime.compiled.stored import stored_stages
from raypipe.runtime.compiled.stored.document import DOCUMENT, is_sound, read_stage, write_stage
from raypipe.runtime.compiled.stored.helper import compiled_parts
from raypipe.runtime.compiled.stored.request import Request
from raypipe.runtime.compiled.stored.stored_stages import stage_key
from raypipe.runtime.executor.compile_report import CutReport
from tests.runtime.compiled.pieces import assert_same, step_of
from tests.runtime.runs.one_device import OneDevice, even_cut, one_device

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
def test_what_is_read_computes_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    made, plain = device(split=False), device(split=False)
    key, module, folder = (1, 0), made.executor.modules[1, 0], tmp_path / "stored"
    traced = trace_stage(module, Needs(made.executor, [made.program]).of(key))
    write_stage(folder, compiled_parts(traced), traced.kept)
    found = read_stage(folder, module)
    assert found is not None
    assert is_sound(folder)
    assert found[1] == traced.kept
    swap_in(made.executor, {key: found[0]})
    assert_same(step_of(made), step_of(plain))

    code = next(folder.glob("*.py"))
    code.write_text(code.read_text() + "\n")
    assert read_stage(folder, module) is None, "a module is not what was written"
    assert not is_sound(folder)
    (folder / DOCUMENT).write_text('{"parts": [{"span": null}]}')
    assert read_stage(folder, module) is None
    assert read_stage(tmp_path / "missing", module) is None
    assert not is_sound(folder)
    assert not is_sound(tmp_path / "missing")


def test_whatever_changes_a_stage_changes_its_key() -> None:
    def key_of(made: OneDevice, spec: GptSpec = SPEC, budget: float = 1.0, dtype: str = "float64") -> str:
        job = SimpleNamespace(model=spec, train=SimpleNamespace(dtype=dtype))
        setup = cast(Any, SimpleNamespace(job=job, cut=((0, 1), (2, 3))))
        needs = Needs(made.executor, [made.program], budget=budget).of((0, 0))
        return stage_key(setup, 0, made.executor.modules[0, 0], needs)

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
        return stage_key(SETUP, 0, made.executor.modules[0, 0], needs)

    first = key()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert key() == first
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert key() != first


KEY_OF_A_LOSS = """
from raypipe.models.own_loss import OwnLoss
from raypipe.models.own_loss import GivenLoss
from raypipe.models.task import Labels
from raypipe.runtime.compiled.stored.stored_stages import _described
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
        stage_key(SETUP, 0, made.executor.modules[0, 0], replace(needs, examples=examples))
        for examples in (needs.examples, tuple(replace(one, samples=3) for one in needs.examples), needs.examples * 2)
    }
    assert len(keys) == 3


def test_a_damaged_stage_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored_stages, "HelperProcess", asked.append)
    made = device()
    job = SimpleNamespace(
        model=SPEC,
        train=SimpleNamespace(dtype="float64", compile_timeout_s=60.0, eval_every=0),
    )
    parallel, cut = SimpleNamespace(activation_memory_budget=1.0), ((0, 1), (2, 3))
    setup = cast(Any, SimpleNamespace(job=job, parallel=parallel, cut=cut, train={0: made.program}, done=0))

    def begin() -> None:
        assert stored_stages.StoredStages(setup, made.executor).begin([(0, 0)]) == []

    begin()
    (request,) = asked
    write_stage(request.folder, [], CutReport((), 0, 0))
    begin()
    assert len(asked) == 1, "it is stored"
    (request.folder / DOCUMENT).write_text("{")
    begin()
    assert [one.folder for one in asked] == [request.folder, request.folder]
