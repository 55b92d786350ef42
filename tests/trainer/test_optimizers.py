"""Which optimizer a script gets: the Trainer's, or an error that names what is not carried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.errors import SpecError
from raypipe.trainer.optimizers import check_decay
from tests.trainer import three_steps
from tests.trainer.test_epochs import model
from tests.trainer.test_rates import prepared

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_momentum_of_optim_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_arguments = three_steps.arguments

    def with_momentum(*given: Any) -> Any:
        made = plain_arguments(*given)
        made.optim_args = "momentum=0.9"
        return made

    monkeypatch.setattr(three_steps, "arguments", with_momentum)
    rows, more = three_steps.rows_of(), {"job": {"train": {"dtype": "float64"}}}
    mine = three_steps.pipelined(model().double(), rows, tmp_path / "mine", 8, **more)
    theirs = three_steps.hugging_face(model().double(), rows, tmp_path / "theirs", 8)
    three_steps.assert_alike(mine, theirs, 1e-7)

    trained = model().double().train()
    velocity, losses = [torch.zeros_like(p) for p in trained.parameters()], []
    for _ in range(three_steps.STEPS):
        loss = trained(**{name: torch.tensor([row[name] for row in rows]) for name in rows[0]}).loss
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(trained.parameters()))
        with torch.no_grad():
            for p, v, grad in zip(trained.parameters(), velocity, grads, strict=True):
                p -= three_steps.LR * v.mul_(0.9).add_(grad)
    three_steps.assert_alike(mine, three_steps.Outcome(losses, dict(trained.named_parameters())), 1e-9)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"optim": "adafactor"}, "args.optim: adafactor is not available"),
        ({"optim_args": "nesterov=true"}, "args.optim_args: nesterov=true is not available for"),
        ({"optim": "adamw_torch", "optim_args": "momentum=0.9"}, "args.optim_args: momentum=0.9 is not available"),
    ],
)
def test_other_optimizers_are_refused(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=why):
        prepared(tmp_path / "run", **more)


class Scaled(nn.Module):
    def __init__(self, size: tuple[int, ...], name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        setattr(self, name, nn.Parameter(torch.ones(size)))


def test_what_decays_otherwise_in_the_trainer_is_refused() -> None:
    check_decay(model(), 0.1)
    check_decay(Scaled((2,), "scale"), 0.0)
    with pytest.raises(SpecError, match="scale of \\[2\\] decays in the Trainer"):
        check_decay(Scaled((2,), "scale"), 0.1)
    with pytest.raises(SpecError, match="pair_bias of \\[2, 2\\] does not decay in the Trainer"):
        check_decay(Scaled((2, 2), "pair_bias"), 0.1)
