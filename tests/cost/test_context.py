"""What copies that divide sequences hold: the bytes that the runtime allocates on one of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.memory import device_memory
from raypipe.cost.sizes import divided_sequences
from raypipe.job import GptSpec
from raypipe.models.current_slice import own_chunks
from raypipe.runtime.stage.inputs import Copies
from raypipe.schedule import Shape, generate
from raypipe.schedule.passes import add_recompute
from raypipe.tensor import SoloGroup, set_group
from tests.cost.test_memory_of_a_step import MACHINE, ONE, executor, measured


class FirstCopy(SoloGroup):
    """The first of several copies, without the others: it gets as much as they would send."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone() for _ in range(self.size)]

    def start_all_to_all(self, x: torch.Tensor, sends: Any, receives: Any) -> Any:
        return x.clone(), lambda: None


def first_copy(copies: int, *of: Any) -> Any:
    runner = executor(*of)
    length = runner.io_specs.model.positions // (2 * copies)
    lengths = dict.fromkeys(("input_ids", "shift_labels"), length)
    runner.feed.hold(own_chunks(0, copies), lengths, Copies(4, 1))
    return runner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "copies", "recompute"),
    [("1f1b", "float32", 2, False), ("zb-h1", "float32", 4, False), ("gpipe", "bfloat16", 2, True)],
)
def test_a_copy_keeps_its_share_of_a_sequence(name: str, dtype: str, copies: int, recompute: bool) -> None:
    spec = GptSpec(layers=4, hidden=128, heads=4, sequence=256, vocabulary=256, dropout=0.1)
    schedule = generate(name, Shape(devices=1, microbatches=4))
    if recompute:
        schedule = add_recompute(schedule, "early")
    whole = analytic_profile(spec, MACHINE, dtype, [2])
    (predicted,) = device_memory(divided_sequences(whole, copies), ONE, schedule, 2)
    (alone,) = device_memory(whole, ONE, schedule, 2)
    set_group(FirstCopy(copies), "context")
    try:
        result = measured(partial(first_copy, copies, spec, schedule, ONE, 2, dtype), schedule)
    finally:
        set_group(SoloGroup(), "context")
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()
    assert predicted.activations == pytest.approx(alone.activations / copies, rel=0.02)
