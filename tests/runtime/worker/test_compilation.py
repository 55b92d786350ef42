"""``train.compile: auto``: eager steps while a thread compiles, then whatever is faster, swapped between two steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

from raypipe.job import GptSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.compiler import InProcess, compile_graph
from raypipe.runtime.compiled.program import CompiledStage, Outcome
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.runtime.executor.step import StageReport
from raypipe.runtime.worker.compilation import MEASURED, Compilation, refusal
from raypipe.schedule.sharding import StageKey
from tests.runtime.compiled.pieces import compiled_device, interpreted
from tests.runtime.runs.one_device import LR, OneDevice, even_cut, one_device
from tests.runtime.runs.test_any_model import CASES, model_of
from tests.tensor.threads import run_tensor_ranks

SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.1, tie_embeddings=True)


def device() -> OneDevice:
    model = GptLayers(SPEC, torch.float64)
    ids = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    return one_device(model, even_cut(model, 2), rows, torch.float64, 2, split=True)


def parallel(**keys: Any) -> ParallelSpec:
    return ParallelSpec(schedule="1f1b", stages=2, microbatch=1, **keys)


@pytest.mark.slow
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
@pytest.mark.parametrize("compiled_s", [0.5, 2.0], ids=["faster", "slower"])
def test_the_faster_way_is_kept_and_losses_do_not_change(compiled_s: float) -> None:
    made, plain = device(), device()
    train = SimpleNamespace(compile="auto", compile_first=False, deterministic=False, cuda_graphs="none", eval_every=0)
    setup = cast(
        Any,
        SimpleNamespace(job=SimpleNamespace(train=train), parallel=parallel(), train={0: made.program}, done=0),
    )
    compilation = Compilation(setup, made.executor, InProcess.of_run(setup, made.executor, interpreted))
    assert compilation.begin() == []
    assert compilation.state == "compiling"
    assert compilation._pending is not None
    compilation._pending.result()
    reports, ran = [], []
    for step in range(2 * MEASURED + 4):
        reports += compilation.before_step(step)
        if compilation.state == "ready":  # the driver would wait for the other devices
            compilation.swap(step)
        ran.append(bool(made.executor.computation.compiled))
        compilation.after_step(step, compiled_s if ran[-1] else 1.0)
        losses = [one.executor.run(one.program, step, LR * 1e-3).loss_sum for one in (made, plain)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12, rel=0)
    stays = compiled_s < 1.0
    after = [stays] * 3
    assert ran == [False] * MEASURED + [True] * (MEASURED + 1) + after[: len(ran) - 2 * MEASURED - 1]
    assert [report.reason is None for report in reports] == [True, True] + [False, False] * (not stays)


@pytest.mark.slow
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
def test_a_second_compilation_finds_every_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = model_of("mlp")
    rows = model.task.complete(CASES["mlp"][1])
    result = []
    for _ in range(2):
        counters["inductor"].clear()
        _, _, reports = compiled_device(model, even_cut(model, 1), rows, torch.float64, 2, build=compile_graph)
        assert [report.reason for report in reports] == [None]
        result.append({what: counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit", "bypass")})
    graphs = result[0]["miss"]
    assert graphs
    assert result == [{"miss": graphs, "hit": 0, "bypass": 0}, {"miss": 0, "hit": graphs, "bypass": 0}]


class Begun:
    """A source whose stages are stored, or are compiled by somebody."""

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.waited = compiles, threading.Event()

    def begin(self, keys: Sequence[StageKey]) -> list[StageReport]:
        return []

    def find(self) -> Outcome:
        self.waited.set()
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("stored", "replaces", "bits_matter", "beside"),
    [(False, True, False, True), (True, True, False, False), (False, True, True, False), (False, False, False, False)],
    ids=["begins eagerly", "loads what is stored", "must not run eagerly", "a fresh start"],
)
def test_others_do_not_wait_for_a_replacement_to_compile(
    stored: bool, replaces: bool, bits_matter: bool, beside: bool
) -> None:
    made, source = device(), Begun(not stored)
    train = SimpleNamespace(compile="inductor", compile_first=True, deterministic=bits_matter, cuda_graphs="none")
    setup = cast(Any, SimpleNamespace(job=SimpleNamespace(train=train), parallel=parallel()))
    compilation = Compilation(setup, made.executor, cast(Any, source), replaces=replaces)
    compilation._refused = None  # whatever this host has of a compiler
    compilation.begin()
    assert (compilation.state == "compiling") == beside
    assert source.waited.wait(10.0)


@pytest.mark.parametrize("other", [{"a"}, {"b"}, set()], ids=["alike", "other collectives", "eager"])
def test_tensor_ranks_run_a_stage_compiled_on_all_or_on_none(other: set[str]) -> None:
    def work(rank: int, group: object) -> tuple[list[StageReport], bool, bool]:
        made, source = device(), Begun(compiles=False)
        train = SimpleNamespace(compile="inductor", compile_first=True, deterministic=False, cuda_graphs="none")
        setup = cast(Any, SimpleNamespace(job=SimpleNamespace(train=train), parallel=parallel(tensor=2)))
        compilation = Compilation(setup, made.executor, cast(Any, source))
        compilation._refused = None
        stages = {"a": CompiledStage(), "b": CompiledStage({(0, 1): []})}
        found = [((0, 0), stages[name], StageReport(0, 0, 0.0)) for name in (other if rank else {"a"})]
        source.find = lambda: found  # type: ignore[assignment, method-assign, return-value]
        compilation.begin()
        assert not made.executor.computation.compiled, "all ranks swap together"
        slower = compilation._slower(*((3.0, 2.0) if rank else (1.0, 2.5)))
        return compilation.swap(0), bool(made.executor.computation.compiled), slower

    alike = other == {"a"}
    first, second = run_tensor_ranks(2, work)
    assert [first[1], second[1]] == [alike] * 2
    assert [first[2], second[2]] == [False] * 2, "they take 4.0 s and 4.5 s together"
    assert [len(first[0]), len(second[0])] == [not alike, other == {"b"}]
    assert all("another tensor rank" in str(report.reason) for report in (*first[0], *second[0]))


def test_what_no_stage_can_be_compiled_for() -> None:
    assert "take turns" in str(refusal(parallel(tensor=2, sub_pipelined=True)))
    assert refusal(parallel(tensor=2)) == missing_toolchain()
    assert "layer by layer" in str(refusal(parallel(sync="reverse-first-k")))
    assert refusal(parallel()) == missing_toolchain()
