"""A checkpoint belongs to the model, not to the plan that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from raypipe.checkpoint import commit, open_checkpoint, write_shard
from raypipe.errors import CheckpointError
from raypipe.job import GptSpec, TrainSpec
from raypipe.models import DividedHead, GptLayers
from raypipe.runtime.recovery.failure import describe
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.state.state import joined, owned_keys, read_state, state_pieces
from raypipe.runtime.update.gradients import TiedHolders
from raypipe.runtime.update.optimizer import make_optimizer
from raypipe.tensor import SoloGroup
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import Done, drive, small_job

SETTINGS = {"steps": 8, "optimizer": "adamw", "clip": 0.5, "lr_schedule": "cosine", "warmup_steps": 2}
TWO = {"schedule": "1f1b", "stages": 2}


@pytest.fixture(scope="module")
def undisturbed(stage_pool, text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Eight steps on two stages, with a checkpoint after the fourth."""
    job = small_job(text_folder, TWO, checkpoint_every=4, **SETTINGS)
    return drive(job, stage_pool, tmp_path_factory.mktemp("undisturbed"))


OTHER_PLANS = [
    {"schedule": "1f1b", "stages": 1},
    {"schedule": "chimera", "stages": 4},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2},
    {"schedule": "1f1b", "stages": 2, "replicas": 2},
    *exhaustive({"schedule": "gpipe", "stages": 4}),
]


@pytest.mark.runs
@pytest.mark.parametrize("parallel", OTHER_PLANS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_another_plan_goes_on_with_the_same_losses(parallel, undisturbed, stage_pool, text_folder, tmp_path) -> None:
    job = small_job(text_folder, parallel, **SETTINGS)
    rest = drive(job, stage_pool, tmp_path, undisturbed.checkpoints[4], 4)
    assert [row["step"] for row in rest.rows] == [5, 6, 7, 8]
    assert rest.losses == pytest.approx(undisturbed.losses[4:], abs=1e-9, rel=0)
    assert rest.val_losses == pytest.approx(undisturbed.val_losses, abs=1e-9, rel=0)
    # What is saved in the end is the same again, by name and by value.
    old, new = (open_checkpoint(done.checkpoints[8]) for done in (undisturbed, rest))
    assert new.keys == old.keys
    before, after = old.read(old.keys), new.read(new.keys)
    # Adam divides by roots of tiny second moments, which spreads rounding; its state itself agrees closely.
    worst = max(float((before[key] - after[key]).abs().max()) for key in old.keys)
    assert worst < 1e-8


@pytest.mark.runs
def test_the_same_plan_goes_on_to_the_last_bit(undisturbed, stage_pool, text_folder, tmp_path) -> None:
    rest = drive(small_job(text_folder, TWO, **SETTINGS), stage_pool, tmp_path, undisturbed.checkpoints[4], 4)
    assert rest.losses == undisturbed.losses[4:]
    old, new = (open_checkpoint(done.checkpoints[8]) for done in (undisturbed, rest))
    before, after = old.read(old.keys), new.read(new.keys)
    assert all(torch.equal(before[key], after[key]) for key in old.keys)


@pytest.mark.runs
def test_a_checkpoint_holds_every_parameter_once_with_its_optimizer_state(undisturbed, text_folder) -> None:
    job = small_job(text_folder, TWO)
    plan = GptLayers(job.model)
    tied_away = {name for group in plan.tied for _, name in group.parameters[1:]}
    names = {
        f"{i}.{path}" for i in range(plan.count) for path, _ in plan.build(i, 0).named_parameters()
        if f"{i}.{path}" not in tied_away
    }  # fmt: skip
    keys = open_checkpoint(undisturbed.checkpoints[4]).keys
    assert {k.removeprefix("param/") for k in keys if k.startswith("param/")} == names
    assert {k for k in keys if k.startswith("optim/")} == {
        f"optim/{name}/{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")
    }


@pytest.mark.runs
def test_a_checkpoint_of_another_model_is_one_error_and_the_actors_live_on(
    undisturbed, stage_pool, text_folder, tmp_path
) -> None:
    wider = small_job(text_folder, TWO, {"hidden": 32}, **SETTINGS)
    with pytest.raises(CheckpointError) as caught:
        drive(wider, stage_pool, tmp_path / "wider", undisturbed.checkpoints[4], 4)
    said = describe(caught.value)
    assert said.startswith(f"{undisturbed.checkpoints[4]}: ")
    assert "the model's has" in said
    assert "Traceback" not in said
    again = drive(small_job(text_folder, TWO, **SETTINGS), stage_pool, tmp_path, undisturbed.checkpoints[4], 4)
    assert again.losses == undisturbed.losses[4:]


# Without actors: what a stage writes and reads.

TRAIN = TrainSpec(steps=1, batch=1)


def stage(
    layers: range, hidden: int = 16, depth: int = 2, train: TrainSpec = TRAIN
) -> tuple[StageModule, torch.optim.Optimizer]:
    model = GptSpec(layers=depth, hidden=hidden, heads=2, sequence=8)
    module = StageModule(GptLayers(model), layers, 0, torch.device("cpu"), split=False)
    return module, make_optimizer(train, module.named)


TIED = (TiedHolders("0.token.weight", ("0.token.weight", "3.project.weight"), (0, 1), 0),)


def write(directory: Path, layers: range) -> Path:
    module, optimizer = stage(layers)
    for parameter in module.named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = joined(state_pieces(module, optimizer, TIED), {"tensor": SoloGroup()})
    return commit(directory, 1, [write_shard(directory, "rank-00000", tensors)], {})


def test_a_model_of_another_width_is_refused_in_one_message(tmp_path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "step-1", range(4)))
    module, optimizer = stage(range(2), hidden=32)
    with pytest.raises(
        CheckpointError, match=r"has shape \(\d+(, \d+)?\), but the model's has \(\d+(, \d+)?\)"
    ) as caught:
        read_state(checkpoint, module, optimizer, TIED)
    assert caught.value.where == str(tmp_path / "step-1")
    assert caught.value.fix


def test_a_deeper_model_is_refused_naming_what_is_missing(tmp_path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "step-1", range(4)))
    module, optimizer = stage(range(3, 5), depth=4)
    with pytest.raises(CheckpointError, match=r"holds no param/[34]\."):
        read_state(checkpoint, module, optimizer, ())


def test_a_tied_parameter_is_saved_by_its_first_member_and_read_by_all(tmp_path) -> None:
    path = write(tmp_path / "step-1", range(4))
    keys = open_checkpoint(path).keys
    assert "param/0.token.weight" in keys
    assert "param/3.project.weight" not in keys
    head, optimizer = stage(range(3, 4))
    with torch.no_grad():
        head.named["3.project.weight"].zero_()
    read_state(open_checkpoint(path), head, optimizer, TIED)
    saved = open_checkpoint(path).read(["param/0.token.weight", "optim/0.token.weight/exp_avg"])
    assert torch.equal(head.named["3.project.weight"], saved["param/0.token.weight"])
    state = optimizer.state[head.named["3.project.weight"]]
    assert torch.equal(state["exp_avg"], saved["optim/0.token.weight/exp_avg"])


@pytest.mark.parametrize("optimizer", get_args(TrainSpec.model_fields["optimizer"].annotation))
def test_every_optimizer_goes_on_from_what_it_saved(optimizer: str, tmp_path: Path) -> None:
    train = TrainSpec(steps=4, batch=1, optimizer=optimizer, lr=0.01, weight_decay=0.1)

    def update(module: StageModule, made: torch.optim.Optimizer, step: int) -> None:
        for k, parameter in enumerate(module.named.values()):
            generator = torch.Generator().manual_seed(100 * step + k)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.step()

    module, made = stage(range(4), train=train)
    for step in range(2):
        update(module, made, step)
    tensors = joined(state_pieces(module, made, ()), {"tensor": SoloGroup()})
    path = commit(tmp_path / "step-2", 2, [write_shard(tmp_path / "step-2", "rank-00000", tensors)], {})
    again, other = stage(range(4), train=train)
    read_state(open_checkpoint(path), again, other, ())
    for step in range(2, 4):
        update(module, made, step)
        update(again, other, step)
    assert all(torch.equal(p, again.named[name]) for name, p in module.named.items())


def test_each_stage_is_saved_once_by_its_first_holder() -> None:
    placement = ((0, 1, 2, 3), (3, 2, 1, 0))  # Chimera: both directions
    owners = {rank: owned_keys(rank, {(rank, 0): None, (3 - rank, 1): None}, placement) for rank in range(4)}
    saved = [key for keys in owners.values() for key in keys]
    assert sorted(stage for stage, _ in saved) == [0, 1, 2, 3]
    assert owners[0] == [(0, 0), (3, 1)]  # device 0 is the lower of the two holders of stage 0 and of stage 3
    assert owners[3] == []


def test_a_head_is_stored_as_its_rows_and_read_whole_and_as_other_rows(tmp_path: Path) -> None:
    """With the optimizer's state, of 257 rows that two devices or three hold, tied to no embedding."""
    model = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=257, tie_embeddings=False)

    def held(shares: int) -> list[tuple[StageModule, torch.optim.Optimizer]]:
        divided = DividedHead(GptLayers(model), shares)
        modules = [StageModule(divided, own, 0, torch.device("cpu"), split=True) for own in divided.own_stages[:-1]]
        return [(module, make_optimizer(TRAIN, module.named)) for module in modules]

    infos = []
    for number, (module, optimizer) in enumerate(held(2)):
        (parameter,) = module.named.values()
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
        tensors = joined(state_pieces(module, optimizer, ()), {"tensor": SoloGroup()})
        infos.append(write_shard(tmp_path / "step-1", f"rank-{number}", tensors))
    checkpoint = open_checkpoint(commit(tmp_path / "step-1", 1, infos, {}))
    name = "3.project.weight"
    states = [f"optim/{name}/{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert checkpoint.keys == (*states, f"param/{name}")
    whole = checkpoint.read(checkpoint.keys)
    assert whole[f"param/{name}"].shape == whole[states[0]].shape == (257, 16)
    again = held(3)
    for module, optimizer in again:
        read_state(checkpoint, module, optimizer, ())
    rows = [module.named[name] for module, _ in again]
    assert torch.equal(torch.cat(rows), whole[f"param/{name}"])
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [optimizer.state[p][key] for (_, optimizer), p in zip(again, rows, strict=True)]
        assert torch.equal(torch.cat(parts), whole[f"optim/{name}/{key}"])
