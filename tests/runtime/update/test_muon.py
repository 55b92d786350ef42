"""Muon for matrices and AdamW for the rest: bit for bit torch's two optimizers; runs, resumed under another plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.checkpoint import open_checkpoint
from raypipe.cost.layer_work import newton_schulz_flops
from raypipe.errors import SpecError
from raypipe.job.train_spec import TrainSpec
from raypipe.launch.prepared import check_groups
from raypipe.models import build_model
from raypipe.models.gpt import GptLayers
from raypipe.runtime.update.flat_weights import FlatLayout
from raypipe.runtime.update.optimizer import OptimizerSnapshot, make_optimizer, set_rate
from raypipe.train import prepare_run
from tests.runtime.runs.small_runs import drive, small_job

MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "dtype": "float64"}
STEPS = 6


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 6), "mid": torch.nn.Linear(6, 4)}).double()


def gradients(model: torch.nn.Module, step: int) -> None:
    for n, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + n), dtype=p.dtype)


@pytest.mark.parametrize("more", [{}, {"momentum": 0.8, "muon_rate": "original"}, {"betas": (0.8, 0.9), "eps": 1e-5}])
def test_updates_are_those_of_torchs_two_optimizers(more: dict[str, Any]) -> None:
    train = TrainSpec(steps=1, batch=1, **MUON, **more)
    ours, theirs = net(), net()
    both = make_optimizer(train, dict(ours.named_parameters()))
    muon = torch.optim.Muon(
        [theirs["mid"].weight], weight_decay=0.1, momentum=more.get("momentum", 0.95),
        adjust_lr_fn=more.get("muon_rate", "match_rms_adamw"),
    )  # fmt: skip
    rest = torch.optim.AdamW(
        [theirs["embed"].weight, theirs["mid"].bias], weight_decay=0.1, betas=train.betas, eps=train.eps
    )
    for step in range(4):
        set_rate(both, 0.1 / (step + 1))
        for optimizer in (muon, rest):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
        gradients(ours, step)
        gradients(theirs, step)
        kept = OptimizerSnapshot(both)
        both.step()
        kept.restore()  # as an optimistic update that is taken back
        both.step()
        muon.step()
        rest.step()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    kinds = [sorted(both.state[p]) for p in ours.parameters()]
    assert kinds == [["exp_avg", "exp_avg_sq", "step"], ["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]]


def test_a_pattern_that_matches_nothing_is_an_error_and_what_adamw_has_is_said(text_folder: Path) -> None:
    model, said = GptLayers(small_job(text_folder, {"stages": 1}).model), []
    check_groups(TrainSpec(steps=1, batch=1, **MUON), model, said.append)
    assert said == [
        "note: AdamW updates what is no matrix, and of what train.muon_excludes matches: "
        "0.token.weight, 0.position.weight, 5.project.weight"
    ]
    with pytest.raises(SpecError, match=r'no parameter matches "\*experts\*"'):
        check_groups(TrainSpec(steps=1, batch=1, **MUON, muon_excludes=["*experts*"]), model, said.append)


def test_patterns_of_a_job_without_groups_are_checked_before_it_runs(text_folder: Path, tmp_path: Path) -> None:
    job = small_job(text_folder, {"stages": 1}, **MUON, muon_excludes=["*expert*"])
    with pytest.raises(SpecError, match=r'no parameter matches "\*expert\*"'):
        prepare_run(job, tmp_path / "run", resume=False)


def test_a_head_that_muon_updates_is_not_divided(text_folder: Path) -> None:
    split = {"schedule": "1f1b", "stages": 2, "vocabulary": "split"}
    job = small_job(text_folder, split, **MUON, muon_excludes=["*token*"])
    job = job.model_copy(update={"model": job.model.model_copy(update={"tie_embeddings": False})})
    with pytest.raises(SpecError, match=r"split divides 5\.project\.weight, which Muon reads whole") as refused:
        build_model(job, None, 0)
    assert '"5.project.weight" to train.muon_excludes' in refused.value.fix


@pytest.mark.runs
def test_one_curve_under_every_plan_and_from_a_checkpoint(stage_pool: Any, text_folder: Path, tmp_path: Path) -> None:
    def run(name: str, parallel: dict[str, Any], *start: Any) -> Any:
        job = small_job(text_folder, parallel, steps=STEPS, checkpoint_every=3, clip=1.0, **MUON)
        return drive(job, stage_pool, tmp_path / name, *start)

    one = run("one", {"schedule": "1f1b", "stages": 1, "microbatch": 4})
    two = run("two", {"schedule": "zb-h1", "stages": 2, "replicas": 1, "microbatch": 2})
    assert two.losses == pytest.approx(one.losses, abs=1e-9, rel=0)
    assert one.losses[-1] < one.losses[0]
    sharded = {"schedule": "1f1b", "stages": 1, "replicas": 2, "microbatch": 2}
    copies = run("copies", {**sharded, "shard": "zero1"}, two.checkpoints[3], 3)
    assert copies.losses == pytest.approx(one.losses[3:], abs=1e-9, rel=0)
    freed = run("freed", {**sharded, "shard": "zero3"})
    assert freed.losses == pytest.approx(one.losses, abs=1e-9, rel=0)
    split = {"schedule": "1f1b", "stages": 2, "microbatch": 2, "vocabulary": "split", "replicas": 2, "shard": "zero1"}
    divided = run("divided", split)
    assert divided.losses == pytest.approx(one.losses, abs=1e-9, rel=0)
    back = run("back", {"schedule": "1f1b", "stages": 2, "microbatch": 4}, freed.checkpoints[3], 3)
    assert back.losses == pytest.approx(one.losses[3:], abs=1e-9, rel=0)
    for written in (two, freed, divided):
        keys = [key for key in open_checkpoint(written.checkpoints[3]).keys if "1.qkv.weight" in key]
        assert sorted(keys) == ["optim/1.qkv.weight/momentum_buffer", "param/1.qkv.weight"]


@pytest.mark.parametrize("copies", [2, 3, 8])
def test_copies_share_the_iterations_about_evenly(copies: int) -> None:
    """Matrices of a GPT, whole; no copy has more than the best division by 4/3, or than its largest matrix."""
    shapes = {f"{i}.{name}": shape for i in range(3) for name, shape in
              {"qkv": (96, 32), "out": (32, 32), "in": (128, 32), "back": (32, 128)}.items()}  # fmt: skip
    costs = {name: newton_schulz_flops(*shape) for name, shape in shapes.items()}
    layout = FlatLayout({name: a * b for name, (a, b) in shapes.items()}, copies, costs)
    loads = [sum(costs[part.name] for part in layout.parts(i) if part.name is not None) for i in range(copies)]
    assert sum(loads) == sum(costs.values())
    assert max(loads) <= 4 / 3 * max(sum(loads) / copies, *costs.values())
    found = [part for i in range(copies) for part in layout.parts(i)]
    assert sorted(part.name for part in found if part.name is not None) == sorted(shapes)
    assert all(part.begin == 0 and part.size == layout.sizes[part.name] for part in found if part.name is not None)
