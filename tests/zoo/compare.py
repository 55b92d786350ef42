"""Train one step of a family three ways in this process, and compare with the eager model.

One stage, two stages with joint and two with split backward: the real executor and programs, without actors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from raypipe.capture.meta import build_without_memory
from raypipe.capture.opaque import TARGET
from raypipe.errors import RequestError
from raypipe.graph.operation_costs import split_flops
from raypipe.models import build_model
from raypipe.models.captured import CapturedModel
from raypipe.models.task import FirstRows
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import fields_of, job_of
from tests.zoo.eager import SEED, STEP, loss_and_gradients
from tests.zoo.families import MICROBATCH, Family

WAYS = {"1": (1, False), "2": (2, False), "2 split": (2, True)}
"""Stages, and whether backwards are split."""


@dataclass
class Row:
    """How far a family is from the eager model."""

    loss: float = 0.0
    """Largest difference of a loss."""
    gradient: float = 0.0
    """Largest difference of a value of a gradient, beside 1 or the gradient's largest value."""
    left: float = 0.0
    """Share of the weight gradients' FLOPs that B computes."""
    capture_s: float = 0.0
    refused: str = ""


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    return values[:count]


def compare(family: Family) -> Row:
    """Compare all ways with the eager model; what is refused before a run begins is told.

    Raises:
        AssertionError: a parameter has a gradient in one and none in the other.
    """
    row = Row()
    rows = family.rows()
    begun = time.monotonic()
    try:
        fields = {
            name: field._replace(rows=FirstRows(partial(_first, rows[name]))) for name, field in fields_of(rows).items()
        }
        model = build_model(job_of(dict(family.model)), fields)
    except RequestError as error:
        return Row(refused=str(error))
    row.capture_s = time.monotonic() - begun
    assert isinstance(model, CapturedModel)
    total, left = split_flops(model.graph, range(len(model.graph.operations)), model.sizes(1))
    row.left = left / total if total else 0.0
    rows = model.task.complete(rows)
    wanted = None
    constants = {"return_loss": True} if family.model.get("task") == "contrastive" else {}
    for stages, split in WAYS.values():
        cut = even_cut(model, min(stages, model.count))
        mine = run_step(model, cut, rows, torch.float64, MICROBATCH, split=split, seed=SEED, step=STEP)
        if wanted is None:
            values = {n: v.detach() + mine.gradients[n] for stage in mine.stages for n, v in stage.named.items()}
            module = with_values(model.values.build(), values)
            with torch.no_grad():  # a constructor may draw buffers, which are the run's
                for name, buffer in build_without_memory(model.build).named_buffers():
                    module.get_buffer(name).copy_(buffer)
            assert module.training
            if hasattr(module, "set_experts_implementation"):
                module.set_experts_implementation("eager")  # torch's grouped product has no float64
            wanted = loss_and_gradients(
                module,
                model.task,
                model.fields,
                rows,
                MICROBATCH,
                [site.batch_dim for site in model.sites.values()],
                constants,
                [
                    str(operation.args[0])
                    for operation in model.graph.operations
                    if operation.target == TARGET and operation.random
                ],
            )
        loss, gradients = wanted
        row.loss = max(row.loss, abs(mine.loss - loss))
        for name, result in mine.gradients.items():
            if name in gradients:
                other = gradients[name]
                scale = max(1.0, float(other.abs().max()))
                row.gradient = max(row.gradient, float((result - other).abs().max()) / scale)
            else:
                assert not result.any(), f"{name} has a gradient, and none in the eager model"
    return row
