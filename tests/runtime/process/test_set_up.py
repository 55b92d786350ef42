"""What a worker's process imports, and its settings where it uses a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from raypipe.runtime.process import set_up
from raypipe.runtime.process.set_up import ALLOCATOR, CUBLAS_WORKSPACE, CUDA_SETTINGS, OLDER_ALLOCATOR, set_up_cuda


def test_cuda_settings_are_made_and_a_users_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_MODULE_LOADING" in CUDA_SETTINGS
    monkeypatch.setattr(os, "environ", {"CUDA_MODULE_LOADING": "EAGER"})
    set_up_cuda()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    assert CUBLAS_WORKSPACE not in os.environ


@pytest.mark.parametrize("name", [ALLOCATOR, OLDER_ALLOCATOR])
def test_a_users_settings_of_the_allocator_win_by_either_name(name, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    set_up_cuda()
    assert {n: os.environ[n] for n in (ALLOCATOR, OLDER_ALLOCATOR) if n in os.environ} == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_cublas_has_its_workspace_where_sums_are_to_be_the_same_each_time(own, monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {} if own is None else {CUBLAS_WORKSPACE: own})
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    set_up.compute_deterministically()
    assert (os.environ[CUBLAS_WORKSPACE], asked) == (own or ":4096:8", [True])


STEP = """
import sys
import torch
from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.update.optimizer import make_optimizer
ours = torch.nn.Linear(4, 4, dtype=torch.float64)
theirs = torch.nn.Linear(4, 4, dtype=torch.float64)
for name, kind, options in (
    ("adamw", torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    ("adam", torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "fused": True}),
    ("adagrad", torch.optim.Adagrad, {"weight_decay": 0.1, "eps": 1e-8}),
    ("rmsprop", torch.optim.RMSprop, {"weight_decay": 0.1, "momentum": 0.9}),
):
    theirs.load_state_dict(ours.state_dict())
    train = TrainSpec(steps=1, batch=1, optimizer=name, lr=0.1, weight_decay=0.1, momentum=0.9, decay="all")
    mine = make_optimizer(train, dict(ours.named_parameters()))
    for step in range(3):
        ours(torch.full((2, 4), step + 1.0, dtype=torch.float64)).square().sum().backward()
        mine.step()
        mine.zero_grad()
    mine.load_state_dict(mine.state_dict())
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), "the tracer was imported"
    after.append((name, kind, options, [p.detach().clone() for p in ours.parameters()]))
    starts.append([p.detach().clone() for p in theirs.parameters()])
for (name, kind, options, expected), start in zip(after, starts):
    with torch.no_grad():
        for p, value in zip(theirs.parameters(), start):
            p.copy_(value)
    plain = kind(theirs.parameters(), lr=0.1, **options)
    for step in range(3):
        theirs(torch.full((2, 4), step + 1.0, dtype=torch.float64)).square().sum().backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), expected)), name
"""


@pytest.mark.slow
def test_an_optimizer_updates_as_torchs_and_does_not_import_the_tracer() -> None:
    done = subprocess.run([sys.executable, "-c", "after, starts = [], []\n" + STEP], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


STAGE = """
import sys
import torch
from raypipe.job import GptSpec
from raypipe.models.gpt import GptLayers
from raypipe.tensor.divide import Division
model = GptSpec(type="gpt", layers=2, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.0)
division = DIVISION
stage = GptLayers(model, torch.float64, division).build_stage([0, 1, 2, 3], 0)
assert all(p.dtype == torch.float64 and p.device.type == "cpu" and p.isfinite().all() for p in stage.parameters())
assert not {"torch._dynamo", "sympy"} & set(sys.modules), "the tracer was imported"
"""


@pytest.mark.slow
@pytest.mark.parametrize("division", ["None", "Division(size=2, tensor_rank=1)"])
def test_a_stage_of_a_gpt_is_built_without_the_tracer(division: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAGE.replace("DIVISION", division)], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_worker_imports_nothing_that_only_a_capture_or_the_planner_needs() -> None:
    """SymPy and transformers take as long to import as all of raypipe, and workers read what the driver captured."""
    needless = {"sympy", "transformers", "raypipe.plan.plan"}
    code = f"import sys, raypipe.runtime.worker.worker; sys.exit(str({needless} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert not done.stderr.strip()
