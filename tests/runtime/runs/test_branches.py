"""Stages of a graph of branches give the whole model's loss and gradients, however its layers are on devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.two_towers import pairs
from raypipe.graph.liveness import stage_graph, stages_of
from raypipe.models import LayeredModel, build_model
from raypipe.plan.plan import build_schedule
from raypipe.schedule.ir import StageGraph
from tests.capture.models import FAMILIES
from tests.exhaustive import crossed, exhaustive
from tests.runtime.runs.eager_reference import assert_step_of, eager_training, keyed
from tests.runtime.runs.one_device import run_step
from tests.runtime.runs.small_runs import drive, job_for
from tests.runtime.runs.test_any_model import BATCH, MICROBATCH, SEED, STEP, fields_of, tokens
from tests.runtime.runs.test_any_model_runs import WIDE, eager_losses, make_job

HERE = "tests.runtime.runs.test_branches"
BRANCHES = {"schedule": "auto", "placement": "branches", "stages": 2}
DRAW = torch.Generator().manual_seed(0)


class LongSkips(nn.Module):
    """Down and up again, each level with a skip, as in a U-Net, with dropout on the way."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.drop, self.classify = nn.Dropout(0.2), nn.Linear(width, 3)

    def forward(self, features: Tensor) -> Tensor:
        x, skips = features, []
        for layer in self.down:
            x = self.drop(torch.relu(layer(x)))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], 1)))
        return self.classify(x)


class Blocks(nn.Module):
    """Branches that fan out and are joined, twice, with batch norm: a small Inception."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()

        def branch(inside: int, outside: int) -> nn.Module:
            norm = nn.BatchNorm1d(outside) if batch_norm else nn.LayerNorm(outside)
            return nn.Sequential(nn.Linear(inside, outside), norm, nn.ReLU())

        self.stem = branch(12, 16)
        self.first = nn.ModuleList([branch(16, 8), nn.Sequential(branch(16, 12), branch(12, 8)), branch(16, 4)])
        self.second = nn.ModuleList([branch(20, 8), nn.Sequential(branch(20, 12), branch(12, 8))])
        self.classify = nn.Linear(16, 3)

    def forward(self, features: Tensor) -> Tensor:
        x = self.stem(features)
        x = torch.cat([b(x) for b in self.first], 1)
        return self.classify(torch.cat([b(x) for b in self.second], 1))


FEATURES = {
    "features": torch.randn(BATCH, 12, generator=DRAW, dtype=torch.float64),
    "labels": torch.randint(3, (BATCH,), generator=DRAW),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "long skips": ({"import": f"{HERE}:LongSkips"}, FEATURES),
    "blocks": ({"import": f"{HERE}:Blocks", "args": {"batch_norm": False}}, FEATURES),
    "batch norm": ({"import": f"{HERE}:Blocks"}, FEATURES),
    "t5": ({"hf": "t5", "config": FAMILIES["t5"]}, tokens()),
}
_models: dict[str, LayeredModel] = {}


def model_of(case: str) -> LayeredModel:
    if case not in _models:
        spec, rows = CASES[case]
        job = job_for(spec, "unused.npz", BRANCHES, steps=1, batch=BATCH)
        _models[case] = build_model(job, fields_of(rows))
    return _models[case]


def loss_of(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    with keyed(SEED, STEP, BATCH):
        own = "features" not in rows
        return module(**rows).loss if own else F.cross_entropy(module(rows["features"]), rows["labels"])


@pytest.mark.parametrize(
    ("case", "how"),
    crossed([name for name in CASES if name != "batch norm"], ["joint", "split", "recomputed in pairs"]),
)  # a micro-batch has its own
def test_loss_and_gradients_are_the_whole_models(case: str, how: str) -> None:
    """Layers are on four devices at random; all stages run here, with each edge's tensors alone as their inputs."""
    if case == "t5":
        pytest.importorskip("transformers")
    model, rows = model_of(case), CASES[case][1]
    variant: dict[str, bool] = {"joint": {}, "split": {"split": True}}.get(how, {"recompute": True, "pairs": True})
    for seed in range(3):
        draw = random.Random(seed)
        cut, devices = stages_of(model.results, [draw.randrange(4) for _ in range(model.count)])
        graph = stage_graph(model.results, cut, devices)
        assert len(graph.edges) > len(cut) - 1, "no chain"
        complete = model.task.complete(rows)
        outcome = run_step(
            model, cut, complete, torch.float64, MICROBATCH, seed=SEED, step=STEP, graph=graph, **variant
        )
        assert_step_of(outcome, model, lambda module: loss_of(module, rows))


def test_branches_are_pieces_of_their_own() -> None:
    """Each branch of a block can be on a device of its own; all that it counts is with it, and leads to the loss."""
    model = model_of("batch norm")
    joins = [one for one in model.results if len(one.read_by) > 1]
    assert [len(one.read_by) for one in joins] == [3, 2]
    assert {one.made_by for one in model.results} == set(range(model.count - 1))


# Jobs cut as graphs of branches, through real stage actors: loss curves of an eager loop.

pytest.importorskip("transformers")
TOWERS = {
    "text": {"width": 16, "layers": 3, "heads": 2, "vocabulary": 257, "length": 16},
    "image": {"width": 16, "layers": 2, "heads": 2, "side": 32, "patch": 8}, "shared": 8,
}  # fmt: skip


@pytest.mark.runs
def test_two_towers_begin_together(stage_pool, tmp_path) -> None:
    """CLIP-shaped: neither tower waits for the other, and the loss compares the pairs of a micro-batch."""
    file = tmp_path / "pairs.npz"
    np.savez(file, **pairs(40))
    model = {"import": "jobs.two_towers:build", "loss": "model", "args": TOWERS}
    job = make_job(model, {"type": "arrays", "path": str(file)}, {**BRANCHES, "microbatch": 4}, lr=0.001)
    done = drive(job, stage_pool, tmp_path / "run")
    schedule = build_schedule(done.driver.running.plan, job.train.batch)
    starts = [s for s, inputs in enumerate(schedule.graph.inputs()) if not inputs]
    assert {schedule.placement[0][s] for s in starts} == {0, 1}, "each device has something to begin with"
    assert schedule.graph != StageGraph.chain(schedule.stages)
    expected, _ = eager_training(job, tmp_path / "run" / "data", lambda module, rows: module(**rows)["loss"], 4)
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize("shard", [{}, {"shard": "zero3", "gather": "microbatch"}, *exhaustive({"shard": "zero1"})])
def test_encoder_and_decoder_on_two_copies_of_two_devices(shard, stage_pool, text_folder, tmp_path) -> None:
    """With dropout, whose draws have the numbers that the model's own order gives them, and tied embeddings; where the
    copies divide weights, a chain on one device goes on."""
    model = {"hf": "t5", "config": {**FAMILIES["t5"], **WIDE}, "sequence": 12}

    def job_of(parallel):
        text = {"type": "bytes", "path": str(text_folder)}
        return make_job(model, text, parallel, lr=0.001, checkpoint_every=2)

    job = job_of({**BRANCHES, "replicas": 2, **shard})
    done = drive(job, stage_pool, tmp_path)
    expected = eager_losses(job, tmp_path / "data")[0]
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    if shard:
        chain = job_of({"schedule": "1f1b", "stages": 1})
        rest = drive(chain, stage_pool, tmp_path / "rest", done.checkpoints[2], 2)
        assert rest.losses == pytest.approx(expected[2:], abs=1e-9, rel=0)
