"""Parameters with a learning rate and a weight decay of their own, in whichever pieces a plan updates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.errors import SpecError
from raypipe.job.train_spec import TrainSpec
from raypipe.launch.prepared import check_groups
from raypipe.models import GptLayers
from raypipe.runtime.update.optimizer import SCALE, ParameterPiece, make_optimizer, set_rate
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import losses_alone, plain_losses
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 4
TOKENS = ["0.token.weight", "5.project.weight"]
"""One parameter of two stages."""
PLANS: list[dict[str, Any]] = [
    {"schedule": "zb-h1", "stages": 2},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero1"},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero3"},
    {"schedule": "1f1b", "stages": 1, "replicas": 2, "sync": "prioritised"},
    {"schedule": "chimera", "stages": 2, "replicas": 2},
]


def names() -> list[str]:
    model = small_job(Path("text"), {"stages": 1}).model
    layers = GptLayers(model)
    return [name for i in range(layers.count) for name in layers.parameter_names(i)]


def grouped() -> list[dict[str, Any]]:
    """Deeper layers learn faster, biases do not decay, one block is frozen, and the rest is as the job says."""
    every = [name for name in names() if name not in TOKENS]
    deep = [name for name in every if name.startswith(("3.", "4."))]
    return [
        {"parameters": TOKENS, "scale": 0.25, "weight_decay": 0.3},
        {"parameters": [name for name in deep if name.endswith("bias")], "scale": 1.7, "weight_decay": 0.0},
        {"parameters": [name for name in deep if not name.endswith("bias")], "scale": 1.7},
        {"parameters": [name for name in every if name.startswith("1.")], "scale": 0.0, "weight_decay": 0.5},
    ]


def job(text: Path, parallel: dict[str, Any], **train: Any) -> Any:
    clip = None if parallel.get("sync") == "prioritised" else 1.0
    options = {"steps": STEPS, "batch": 8, "clip": clip, "weight_decay": 0.1, "decay": "matrices", "warmup_steps": 2}
    return small_job(text, {"microbatch": 2, **parallel}, **{**options, "groups": grouped(), **train})


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_loss_curve_is_that_of_plain_pytorch(parallel, stage_pool, text_folder, tmp_path) -> None:
    wanted = job(text_folder, parallel)
    expected = losses_alone(wanted, tmp_path / "plain")
    done = drive(wanted, stage_pool, tmp_path)
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    without = plain_losses(job(text_folder, parallel, groups=[]), tmp_path / "plain", STEPS)
    assert abs(without[-1] - expected[-1]) > 1e-3


@pytest.mark.runs
@pytest.mark.parametrize(
    ("optimizer", "more"), [("rmsprop", {"momentum": 0.5, "alpha": 0.9}), *exhaustive(("adagrad", {}))]
)
def test_other_optimizers_in_pieces_and_from_a_checkpoint(optimizer, more, stage_pool, text_folder, tmp_path) -> None:
    train = {"optimizer": optimizer, **more, "checkpoint_every": 2}
    sharded = job(text_folder, {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero3"}, **train)
    expected = losses_alone(sharded, tmp_path / "plain")
    done = drive(sharded, stage_pool, tmp_path / "a")
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    other = job(text_folder, {"schedule": "zb-h1", "stages": 2}, **train)
    again = drive(other, stage_pool, tmp_path / "b", done.checkpoints[2], 2)
    assert again.losses == pytest.approx(expected[2:], abs=1e-9, rel=0)


@pytest.mark.parametrize("key", [{"on_nonfinite": "skip"}, {"cuda_graphs": "step"}])
def test_an_optimizer_without_fused_kernels_cannot_do_all(key) -> None:
    TrainSpec(steps=1, batch=1, **key)
    with pytest.raises(ValueError, match="with rmsprop, which has no fused kernels"):
        TrainSpec(steps=1, batch=1, optimizer="rmsprop", **key)


def test_pieces_are_updated_as_their_parameters() -> None:
    groups = [{"parameters": ["b"], "scale": 2.0, "weight_decay": 0.5}]
    train = TrainSpec(steps=1, batch=1, optimizer="sgd", lr=0.1, weight_decay=0.25, decay="matrices", groups=groups)
    whole, *parts = (torch.nn.Parameter(torch.ones(size)) for size in (1, 2, 3, 4))
    made = make_optimizer(
        train,
        {"b": whole},
        [ParameterPiece(parts[0], "b", 2), ParameterPiece(parts[1], "a", 2), ParameterPiece(parts[2], "", 1)],
    )
    set_rate(made, 0.5)
    result = {id(p): (group["lr"], group["weight_decay"]) for group in made.param_groups for p in group["params"]}
    assert [result[id(p)] for p in (whole, *parts)] == [(1.0, 0.5), (1.0, 0.5), (0.5, 0.25), (0.5, 0.0)]
    assert {group[SCALE] for group in made.param_groups} == {1.0, 2.0}


def test_what_no_layer_has_is_said_and_a_tied_parameter_is_in_one_group(text_folder) -> None:
    said: list[str] = []
    model = GptLayers(small_job(text_folder, {"stages": 1}).model)
    train = TrainSpec(steps=1, batch=1, groups=[{"parameters": [*TOKENS, "2.no.weight", "7.bias"], "scale": 0.5}])
    check_groups(train, model, said.append)
    assert said == ["note: train.groups: no layer of the model has a parameter 2.no.weight and 1 more"]
    train = TrainSpec(steps=1, batch=1, groups=[{"parameters": TOKENS[:1], "scale": 0.5}])
    with pytest.raises(SpecError, match=r"0\.token\.weight and 5\.project\.weight are one parameter"):
        check_groups(train, model, said.append)


def test_a_parameter_is_in_one_group() -> None:
    with pytest.raises(ValueError, match=r"names a\.weight twice"):
        TrainSpec(steps=1, batch=1, groups=[{"parameters": ["a.weight"]}, {"parameters": ["b", "a.weight"]}])
