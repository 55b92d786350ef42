"""Given instances through ``PipelineTrainer.train``: the trained values come back into the script's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raypipe
from raypipe.observe.run_log import METRICS, read_rows
from tests.exhaustive import exhaustive
from tests.trainer.test_given import ROWS, Doubled, by_loss, head, of_logits, own, summed
from tests.trainer.three_steps import Outcome, arguments, assert_alike, bert, degrees, hugging_face, plain, rows_of

SCHEDULES = ["1f1b", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("zb-h1", "chimera"))]


def frozen_head() -> nn.Module:
    """A new head, and all before it frozen."""
    model = head()
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    return model


def trained(
    model: nn.Module, out: Path, schedule: str, kind: Any = raypipe.PipelineTrainer, rows: Any = ROWS, fields: Any = (),
    **more: Any,
) -> Any:  # fmt: skip
    with degrees(pp=2):
        made = kind(
            model=model, args=arguments(out, 4, 2, **dict(fields)), train_dataset=rows, eval_dataset=rows,
            job={"parallel": {"schedule": schedule}}, **more,
        )  # fmt: skip
        made.train()
    return made


def outcome(out: Path, model: nn.Module) -> Outcome:
    losses = [row["loss"] for row in read_rows(out / METRICS) if "loss" in row]
    return Outcome(losses, dict(model.named_parameters()))


@pytest.mark.runs
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trained_values_come_back_into_the_instance(schedule: str, driver: None, tmp_path: Path) -> None:
    model = frozen_head()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = trained(model, tmp_path / "run", schedule)
    assert_alike(outcome(tmp_path / "run", model), plain(frozen_head(), by_loss), 1e-9)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        assert made.evaluate()["eval_loss"] == pytest.approx(by_loss(model).item(), abs=1e-6)
    again = type(model.bert).from_pretrained(made.save_model(str(tmp_path / "saved")))
    assert again.config.hidden_size == 16


@pytest.mark.runs
@pytest.mark.exhaustive  # tests/trainer/test_given.py does the same steps without Ray
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("case", ["script", "compute_loss", "compute_loss_func"])
def test_the_scripts_own_train_under_every_schedule(case: str, schedule: str, driver: None, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    right: Any = by_loss
    if case == "compute_loss":
        more, right = {"kind": Doubled}, lambda model: 2 * by_loss(model)
    elif case == "compute_loss_func":
        more, right = {"compute_loss_func": summed}, of_logits(lambda o, labels: summed(o, labels, 8))
    make = own if case == "script" else bert
    model = make()
    made = trained(model, tmp_path / "run", schedule, **more)
    assert_alike(outcome(tmp_path / "run", model), plain(make(), right), 1e-9)
    assert (made.save_model(str(tmp_path / "saved")) / "model.safetensors").exists()


@pytest.mark.runs
@pytest.mark.exhaustive  # tests/trainer/test_packed.py does the same steps without Ray
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
def test_packed_rows_under_every_schedule(schedule: str, adapters: bool, driver: None, tmp_path: Path) -> None:
    from tests.trainer.test_packed import adapted, alone, llama, packed

    make = adapted if adapters else llama
    model = make()
    trained(model, tmp_path / "run", schedule, rows=packed())
    assert_alike(outcome(tmp_path / "run", model), plain(make(), alone), 1e-9)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("case", "stages", "shard"),
    [
        ("layerwise", 2, "zero3"),
        ("given", 1, "zero1"),
        *exhaustive(("layerwise", 1, "none"), ("head", 2, "zero2")),
    ],
)
def test_a_scripts_optimizer_over_copies_and_their_pieces(
    case: str, stages: int, shard: str, driver: None, tmp_path: Path
) -> None:
    """Against the Hugging Face Trainer; a piece of a divided parameter is updated as the parameter."""
    from tests.trainer.test_optimizers import both

    mine, theirs, more, fields = both(case)
    rows, one, two = rows_of(), bert(), bert()
    with degrees(pp=stages, dp=2):
        args = arguments(tmp_path / "mine", 4, 1, **fields)
        mine(model=one, args=args, train_dataset=rows, eval_dataset=rows, job={"parallel": {"shard": shard}},
             **more(one)).train()  # fmt: skip
    right = hugging_face(two, rows, tmp_path / "theirs", 8, trainer=theirs, fields=fields, **more(two))
    assert_alike(outcome(tmp_path / "mine", one), right, 1e-7)
