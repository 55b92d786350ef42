"""Losses given as functions, against the eager model on the whole mini-batch; float64, 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import CaptureError, SpecError
from raypipe.job import JobSpec
from raypipe.models import build_model
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import assert_step_of, eager_training
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.small_runs import drive, job_for
from tests.runtime.runs.test_any_model import fields_of

HERE = "tests.runtime.runs.test_loss_functions"
BATCH, CLASSES, LENGTH = 6, 5, 8
Batch = Mapping[str, Tensor]


class Net(nn.Module):
    """A classifier of vectors, with what it knows of them beside its logits."""

    def __init__(self, teacher: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, CLASSES)
        if teacher:
            self.teacher = Net()
            draw = torch.Generator().manual_seed(5)
            self.teacher.load_state_dict(
                {name: torch.randn(p.shape, generator=draw) for name, p in self.teacher.state_dict().items()}
            )
            self.teacher.requires_grad_(False)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks(features)
        return {"logits": self.head(hidden), "hidden": hidden}


class Writer(nn.Module):
    """A small causal language model, with a frozen copy of another beside it."""

    def __init__(self, reference: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(12, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.project = nn.Linear(6, 12)
        if reference:
            self.reference = Writer().requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.project(self.blocks(self.token(input_ids).cumsum(1)))


class Judge(Writer):
    """One value for each text."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)[:, -1, :1]


class Towers(nn.Module):
    """Vectors of two kinds that belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = (F.normalize(tower(x), dim=-1) for tower, x in zip(self.towers, (left, right), strict=True))
        return 5 * a @ b.t()


def detector() -> nn.Module:
    """YOLOS, which finds a fixed number of boxes."""
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=[8, 8],
        patch_size=4, num_detection_tokens=3, num_labels=2,
    )  # fmt: skip
    return YolosForObjectDetection(config)


def boxes(model: Any, batch: Batch) -> Tensor:
    """Slot i is to find box i; there is no matching."""
    result = model(pixel_values=batch["pixel_values"])
    kinds = F.cross_entropy(result.logits.transpose(1, 2), batch["kinds"], reduction="none").mean(-1)
    return kinds + 5 * (result.pred_boxes - batch["boxes"]).abs().sum(-1).mean(-1)


def weighted(model: Any, batch: Batch, power: float = 1.0) -> Tensor:
    """One loss a sample, with a weight from the data and a term of the hidden values."""
    result = model(batch["features"])
    each = F.cross_entropy(result["logits"], batch["labels"], reduction="none")
    return batch["weight"] ** power * each + 0.1 * result["hidden"].square().mean(-1)


def focal(model: Any, batch: Batch) -> Tensor:
    """One loss a label."""
    each = F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    return (1 - torch.exp(-each)) ** 2 * each


def averaged(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["features"])["logits"], batch["labels"])


def normalised(model: Any, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(batch["features"])["logits"], batch["labels"], reduction="none")
    return each / each.detach().mean()


def by_hand(model: Any, batch: Batch, temperature: float = 3.0) -> Tensor:
    """Distillation as people write it, under no_grad."""
    with torch.no_grad():
        taught = model.teacher(batch["features"])["logits"]
    result = model(batch["features"])["logits"]
    return -((taught / temperature).softmax(-1) * (result / temperature).log_softmax(-1)).sum(-1)


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def vectors() -> dict[str, Tensor]:
    draw = _draw()
    return {
        "features": torch.randn(BATCH, 6, generator=draw, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (BATCH,), generator=draw),
        "weight": torch.rand(BATCH, generator=draw, dtype=torch.float64),
    }


def texts() -> dict[str, Tensor]:
    draw = _draw()
    ids = torch.randint(12, (BATCH, LENGTH), generator=draw)
    labels = torch.randint(12, (BATCH, LENGTH), generator=draw)
    labels[:3, 2:] = -100  # micro-batches have unequally many labels
    return {"input_ids": ids, "labels": labels}


def pairs(reference: bool) -> dict[str, Tensor]:
    draw = _draw()
    rows: dict[str, Tensor] = {}
    for kind in ("chosen", "rejected"):
        rows[f"{kind}_input_ids"] = torch.randint(12, (BATCH, LENGTH), generator=draw)
        rows[f"{kind}_labels"] = rows[f"{kind}_input_ids"].clone()
        rows[f"{kind}_labels"][:, :3] = -100
        if reference:
            rows[f"reference_{kind}_logps"] = -10 * torch.rand(BATCH, generator=draw, dtype=torch.float64)
    return rows


def _logps(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The log-probabilities of the labels, token by token."""
    return torch.stack(
        [
            sum(row[t].log_softmax(-1)[own[t + 1]] for t in range(LENGTH - 1) if own[t + 1] != -100)
            for row, own in zip(model(ids), labels, strict=True)
        ]
    )


def plain_dpo(model: Any, rows: Batch) -> Tensor:
    ratio = {}
    for kind in ("chosen", "rejected"):
        ids, labels = rows[f"{kind}_input_ids"], rows[f"{kind}_labels"]
        name = f"reference_{kind}_logps"
        reference = rows[name] if name in rows else _logps(model.reference, ids, labels).detach()
        ratio[kind] = _logps(model, ids, labels) - reference
    return -torch.log(torch.sigmoid(0.3 * (ratio["chosen"] - ratio["rejected"]))).mean()


def plain_reward(model: nn.Module, rows: Batch) -> Tensor:
    better = model(rows["chosen_input_ids"]) - model(rows["rejected_input_ids"])
    return torch.log1p(torch.exp(-better)).mean()


def plain_focal(model: nn.Module, rows: Batch) -> Tensor:
    p = model(rows["input_ids"]).softmax(-1)
    every = [
        -((1 - p[i, t, label]) ** 2) * p[i, t, label].log()
        for i, row in enumerate(rows["labels"]) for t, label in enumerate(row) if label != -100
    ]  # fmt: skip
    return torch.stack(every).mean()


def plain_distillation(model: Any, rows: Batch) -> Tensor:
    result, taught = model(rows["features"])["logits"], model.teacher(rows["features"])["logits"].detach()
    p = (taught / 4).softmax(-1)
    soft = (p * (p.log() - (result / 4).softmax(-1).log())).sum(-1).mean()
    return 0.7 * 16 * soft + 0.3 * F.cross_entropy(result, rows["labels"])


def pictures() -> dict[str, Tensor]:
    draw = _draw()
    return {
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=draw, dtype=torch.float64),
        "boxes": torch.rand(BATCH, 3, 4, generator=draw, dtype=torch.float64),
        "kinds": torch.randint(3, (BATCH, 3), generator=draw),
    }


def plain_contrastive(model: nn.Module, rows: Batch) -> Tensor:
    """The mean over micro-batches of two: each tells its own partner from the other's."""
    losses = []
    for i in range(0, BATCH, 2):
        s = model(rows["left"][i : i + 2], rows["right"][i : i + 2])
        for own, other in ((s[0, 0], s[0, 1]), (s[1, 1], s[1, 0]), (s[0, 0], s[1, 0]), (s[1, 1], s[0, 1])):
            losses.append(torch.log1p(torch.exp(other - own)))
    return torch.stack(losses).mean()


def _two(rows: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: values for name, values in rows.items() if name in names}


Plain = Callable[[Any, Batch], Tensor]
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], Plain]] = {
    "one loss a sample": (
        {"import": f"{HERE}:Net", "loss": f"{HERE}:weighted", "loss_args": {"power": 2.0}}, vectors(),
        lambda model, rows: weighted(model, rows, 2.0).mean(),
    ),
    "one loss a label": ({"import": f"{HERE}:Writer", "loss": f"{HERE}:focal"}, texts(), plain_focal),
    "one loss a micro-batch": (
        {"import": f"{HERE}:Net", "loss": f"{HERE}:normalised_sum", "loss_per": "microbatch"}, vectors(),
        lambda model, rows: sum(
            normalised_sum(model, {n: t[i : i + 2] for n, t in rows.items()}) / 3 for i in range(0, BATCH, 2)
        ),
    ),
    "contrastive": (
        {"import": f"{HERE}:Towers", "loss": "contrastive", "loss_per": "microbatch"},
        {"left": vectors()["features"], "right": vectors()["features"].flip(1)}, plain_contrastive,
    ),
    "object detection": (
        {"import": f"{HERE}:detector", "loss": f"{HERE}:boxes"}, pictures(),
        lambda model, rows: boxes(model, rows).mean(),
    ),
    "reward": (
        {"import": f"{HERE}:Judge", "loss": "reward"}, _two(pairs(False), "chosen_input_ids", "rejected_input_ids"),
        plain_reward,
    ),
    "dpo, log-probabilities in the data": (
        {"import": f"{HERE}:Writer", "loss": "dpo", "loss_args": {"beta": 0.3}}, pairs(True), plain_dpo,
    ),
    "dpo, a frozen reference beside": (
        {"import": f"{HERE}:Writer", "args": {"reference": True}, "loss": "dpo", "loss_args": {"beta": 0.3}},
        pairs(False), plain_dpo,
    ),
    "distillation": (
        {"import": f"{HERE}:Net", "args": {"teacher": True}, "loss": "distillation",
         "loss_args": {"temperature": 4.0, "alpha": 0.7}}, _two(vectors(), "features", "labels"), plain_distillation,
    ),
    "distillation under no_grad": (
        {"import": f"{HERE}:Net", "args": {"teacher": True}, "loss": f"{HERE}:by_hand"}, _two(vectors(), "features"),
        lambda model, rows: by_hand(model, rows).mean(),
    ),
}  # fmt: skip


SUITE = ("one loss a label", "contrastive", "dpo, a frozen reference beside", "distillation under no_grad")
"""One of each kind; ``make test-all`` takes all."""


def normalised_sum(model: Any, batch: Batch) -> Tensor:
    """A loss of a micro-batch as a whole."""
    return normalised(model, batch).sum() * model(batch["features"])["hidden"].std()


def job_of(model: dict[str, Any], file: str = "unused.npz", **parallel: Any) -> JobSpec:
    return job_for(model, file, parallel, steps=3, batch=BATCH, lr=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SUITE, *exhaustive(*(case for case in CASES if case not in SUITE))])
@pytest.mark.filterwarnings("error:.*copying from a non-meta parameter")
def test_loss_and_gradients_are_those_of_the_whole_mini_batch(case: str) -> None:
    if case == "object detection":
        pytest.importorskip("transformers")
    spec, rows, plain = CASES[case]
    model = build_model(job_of(spec), fields_of(rows))
    assert model.count >= 3
    for stages, split in ((2, False), (3, True)):
        outcome = run_step(model, even_cut(model, stages), rows, torch.float64, 2, split=split)
        module = assert_step_of(outcome, model, lambda whole: plain(whole, rows))
        trained = [name for name, p in module.named_parameters() if p.grad is not None]
        assert not any(name.startswith(("teacher", "reference")) for name in trained)
        if "teacher" in spec.get("args", {}):  # it has the values that its constructor loads, whatever the cut
            loaded = dict(Net(teacher=True).named_parameters())
            for name, p in module.named_parameters():
                if name.startswith("teacher."):
                    assert torch.equal(p, loaded[name].double()), name


REFUSED = {
    "contrastive, of the whole batch": ({"import": f"{HERE}:Towers", "loss": "contrastive"}, "set model.loss_per"),
    "a mean": ({"loss": f"{HERE}:averaged"}, "cannot be added up"),
    "normalised over the batch": ({"loss": f"{HERE}:normalised"}, "depends on other samples"),
    "no scalar": ({"loss": f"{HERE}:weighted", "loss_per": "microbatch"}, "no scalar"),
    "no such module": ({"loss": "no.such:loss"}, "can't be imported"),
    "no such function": ({"loss": f"{HERE}:weighed"}, "has no function weighed"),
    "no such argument": ({"loss": f"{HERE}:weighted", "loss_args": {"powr": 1.0}}, "unexpected keyword argument"),
    "a class": ({"loss": f"{HERE}:Net"}, "is a class"),
    "no teacher": ({"loss": "distillation"}, "needs a teacher"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sum_over_samples_is_refused_with_what_to_do(case: str) -> None:
    asked, why = REFUSED[case]
    rows = {"left": vectors()["features"], "right": vectors()["features"]} if "import" in asked else vectors()
    with pytest.raises(SpecError) as caught:
        build_model(job_of({"import": f"{HERE}:Net", **asked}), fields_of(rows))
    assert why in str(caught.value)
    assert caught.value.where == "model.loss"
    assert caught.value.fix


def test_a_model_that_runs_as_it_is_ends_with_no_function() -> None:
    rows = {"features": torch.zeros(BATCH, 4, 12, dtype=torch.float64), "labels": torch.zeros(BATCH, dtype=torch.int64)}
    spec = {"import": "tests.zoo.modules:AllBranches", "loss": f"{HERE}:averaged", "loss_per": "microbatch"}
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        build_model(job_of(spec), fields_of(rows))


def test_a_function_object_is_named_or_refused() -> None:
    assert job_of({"import": f"{HERE}:Net", "loss": weighted}).model.loss == f"{HERE}:weighted"
    with pytest.raises(SpecError, match="can't be imported by other processes"):
        job_of({"import": f"{HERE}:Net", "loss": lambda model, batch: model(batch["features"])})
    with pytest.raises(SpecError, match="is for a loss function"):
        job_of({"import": f"{HERE}:Net", "loss_args": {"beta": 1}})


def check_run(pool: Any, folder: Path, spec: dict[str, Any], rows: Batch, plain: Plain, **parallel: Any) -> None:
    """A run of stage actors has the losses of a plain loop."""
    file = folder / "rows.npz"
    np.savez(file, **{name: torch.cat([t] * 4).numpy() for name, t in rows.items()})
    job = job_of(spec, str(file), **parallel)
    done = drive(job, pool, folder / "run")
    losses, _ = eager_training(job, folder / "run" / "data", plain)
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)
    assert losses[0] != pytest.approx(losses[-1], abs=1e-9)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("case", "parallel"),
    [
        ("one loss a label", {"schedule": "1f1b", "stages": 2, "microbatch": 1, "replicas": 2}),
        *exhaustive(("dpo, a frozen reference beside", {"schedule": "zb-h1", "stages": 2})),
    ],
)
def test_runs_have_the_losses_of_a_plain_loop(case: str, parallel: dict[str, Any], stage_pool, tmp_path) -> None:
    check_run(stage_pool, tmp_path, *CASES[case], **parallel)
