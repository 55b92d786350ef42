"""A denoising U-Net with any class of output trains exactly as eager PyTorch does; float64, 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.models import build_model, random_keys
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import fields_of
from tests.runtime.runs.test_loss_functions import job_of
from tests.zoo.diffusion import noise_prediction, pictures
from tests.zoo.eager import SEED, STEP, Keyed

BATCH = 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "drawn"),
    [
        ({"kind": "ordered"}, True),
        ({"kind": "frozen", "branches": True}, False),
        *exhaustive(({"kind": "plain"}, False), ({"kind": "named"}, False),
                    ({"kind": "ordered", "branches": True}, False), ({"kind": "named", "branches": True}, False)),
    ],
)  # fmt: skip
def test_noise_is_predicted_as_by_the_eager_model(args: dict[str, Any], drawn: bool, capsys) -> None:
    rows = pictures(BATCH)
    if drawn:
        del rows["noise"]
    spec = {"import": "tests.zoo.diffusion:UNet", "args": args, "loss_args": {"drawn": drawn},
            "loss": "tests.zoo.diffusion:noise_prediction"}  # fmt: skip
    model = build_model(job_of(spec), fields_of(rows))
    assert ("module across runs as it is" in capsys.readouterr().err) == args.get("branches", False)
    for stages, split in ((2, False), (3, True)):
        outcome = run_step(model, even_cut(model, stages), rows, torch.float64, 2, split=split, seed=SEED, step=STEP)
        values = {n: v.detach() + outcome.gradients[n] for stage in outcome.stages for n, v in stage.named.items()}
        module = with_values(model.values.build(), values)
        layout = [site.batch_dim for site in model.sites.values()]
        with random_keys(SEED, STEP, range(BATCH), training=True), Keyed(layout):
            loss = noise_prediction(module, rows, drawn).mean()
        loss.backward()
        assert outcome.loss == pytest.approx(loss.item(), abs=1e-9, rel=0)
        for name, p in module.named_parameters():
            torch.testing.assert_close(outcome.gradients[name], p.grad, rtol=0, atol=1e-9, msg=name)
