"""Stages of a graph of branches give the whole model's loss and gradients, however its layers are on devices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.graph.stages.links import stage_graph, stages_of
from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from tests.capture.models import FAMILIES
from tests.runtime.runs.eager_reference import keyed, with_values
from tests.runtime.runs.one_device import run_step
from tests.runtime.runs.test_any_model import BATCH, MICROBATCH, SEED, STEP, fields_of, tokens

HERE = "tests.runtime.runs.test_branches"
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
        job = job_from(
            {
                "name": "any", "model": spec, "data": {"type": "arrays", "path": "unused.npz"},
                "train": {"steps": 1, "batch": BATCH, "dtype": "float64"},
                "parallel": {"schedule": "auto", "placement": "branches", "stages": 2},
            }
        )  # fmt: skip
        _models[case] = build_model(job, fields_of(rows))
    return _models[case]


def whole(model: LayeredModel, values: dict[str, Tensor], rows: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    module = with_values(model.values.build(), values)
    with keyed(SEED, STEP, BATCH):
        own = "features" not in rows
        loss = module(**rows).loss if own else F.cross_entropy(module(rows["features"]), rows["labels"])
    loss.backward()
    return loss.item(), {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


@pytest.mark.parametrize("case", [name for name in CASES if name != "batch norm"])  # a micro-batch has its own
@pytest.mark.parametrize("how", ["joint", "split", "recomputed in pairs"])
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
        values = {n: v.detach() + outcome.gradients[n] for stage in outcome.stages for n, v in stage.named.items()}
        loss, gradients = whole(model, values, rows)
        assert outcome.loss == pytest.approx(loss, abs=1e-9, rel=0)
        for name, mine in outcome.gradients.items():
            torch.testing.assert_close(mine, gradients[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_branches_are_pieces_of_their_own() -> None:
    """Each branch of a block can be on a device of its own; all that it counts is with it, and leads to the loss."""
    model = model_of("batch norm")
    joins = [one for one in model.results if len(one.read_by) > 1]
    assert [len(one.read_by) for one in joins] == [3, 2]
    assert {one.made_by for one in model.results} == set(range(model.count - 1))
