"""How a process of its own compiles for a worker's GPU: what it sees, whose turn it is, and what it traces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from raypipe.runtime.compiled import stored
from raypipe.runtime.compiled.compiler import trace_stage
from raypipe.runtime.compiled.needs import Needs
from raypipe.runtime.compiled.stored import VISIBLE, SeenGpu, compile_stage, stage_key
from raypipe.runtime.compiled.trace import aim
from raypipe.runtime.executor.step import CutReport
from tests.exhaustive import exhaustive
from tests.runtime.compiled.test_stored import SETUP, device, stages_of
from tests.runtime.runs.one_device import CPU, even_cut, one_device
from tests.runtime.runs.test_any_model import CASES, MICROBATCH, model_of

ELSEWHERE = torch.device("meta")
"""A device without memory, as a GPU is for who compiles; only a CUDA build of torch can trace for a GPU."""
GPU = SeenGpu("cuda:0", "GPU-one", "one")


@pytest.mark.parametrize("case", ["gpt", *exhaustive("gpt2", "bert")])
def test_a_stage_on_the_host_is_traced_as_if_it_were_on_the_device(case: str) -> None:
    """Every tensor of the graph is there, also those that it makes; what goes in and out is the same."""
    if case == "gpt":
        made = device()
    else:
        pytest.importorskip("transformers")
        model = model_of(case)
        made = one_device(model, even_cut(model, 2), model.task.complete(CASES[case][1]), torch.float64, MICROBATCH)
    needs = Needs(made.executor, [made.program])
    for key, module in made.executor.modules.items():
        here = trace_stage(module, needs.of(key))
        aim(module, ELSEWHERE)
        there = trace_stage(module, needs.of(key), ELSEWHERE)
        assert all(parameter.device == CPU for parameter in module.parameters())
        for (_, before, _), (_, joint, _) in zip(here.parts, there.parts, strict=True):
            assert (joint.parameters, joint.inputs, joint.casts) == (before.parameters, before.inputs, before.casts)
            assert (joint.differentiable, joint.places) == (before.differentiable, before.places)
            nodes = joint.graph.graph.nodes
            values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
            assert {value.device for value in values} == {ELSEWHERE}


def test_the_process_sees_the_gpu_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows it none, or another: it has reserved none."""
    seen: list[tuple[str | None, torch.device]] = []

    def compiled(setup: Any, stage: int, needs: Any, of: torch.device) -> stored.Stored:
        seen.append((os.environ.get(VISIBLE), of))
        return [], CutReport((), 0, 0)

    monkeypatch.setattr(stored, "_compiled", compiled)
    monkeypatch.setattr(os, "nice", lambda n: n)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(VISIBLE, "")
    setup = cast(Any, type(SETUP)(job=type(SETUP)(train=type(SETUP)(deterministic=False))))
    for n, gpu in enumerate((GPU, SeenGpu("cuda:1", None, "two"), None)):
        compile_stage(setup, 0, cast(Any, None), tmp_path / "stages" / str(n), gpu)
    assert seen == [("GPU-one", torch.device("cuda:0")), (None, torch.device("cuda:1")), (None, CPU)]
    assert [path.name for path in sorted((tmp_path / "stages").glob("*.turn"))] == ["one.turn", "two.turn"]
    while stored._TURNS:
        os.close(stored._TURNS.pop())


TURN = """
import os, sys, time
from pathlib import Path
from raypipe.runtime.compiled.stored import _take_turns
_take_turns(Path(sys.argv[1]))
print(time.monotonic(), flush=True)
time.sleep(1)
print(time.monotonic(), flush=True)
os._exit(0)
"""


def test_those_that_compile_for_one_gpu_take_turns_until_they_end(tmp_path: Path) -> None:
    """So that the GPU has one more CUDA context at a time, however many stages and workers it has."""
    words = [sys.executable, "-c", TURN, str(tmp_path / "one.turn")]
    began = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    spans = sorted([float(line) for line in one.communicate(timeout=120)[0].split()] for one in began)
    assert spans[0][1] <= spans[1][0] < time.monotonic()


def test_a_worker_on_a_gpu_asks_for_programs_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(SeenGpu, "of", lambda device: GPU)
    made = device()
    source = stages_of(made, lambda *request: asked.append(request))
    assert source.begin([(0, 0)]) == []
    assert asked[0][-1] == GPU
    needs = source._needs.of((0, 0))
    assert len({stage_key(SETUP, 0, made.executor.modules[0, 0], needs, one) for one in (CPU, ELSEWHERE)}) == 2
