"""Steps of the runtime's own executor on slices: the losses, norms and parameters of whole micro-batches."""

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.asynchronous import WHOLE, parts
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import add_recompute, add_updates
from tests.cost.test_memory_of_a_step import executor

SPEC = GptSpec(layers=2, hidden=32, heads=4, sequence=24, vocabulary=256, dropout=0.1, tie_embeddings=True)


class Fixed:
    """The same random tokens in every run."""

    def batch(self, split, seed, step, batch):
        tokens = torch.randint(256, (batch, 25), generator=torch.Generator().manual_seed(step))
        return {"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:]}

    def lengths(self, split, seed, step, batch):
        return {}


def trained(name: str, slices: int, chunks: int = 1, recompute: bool = False) -> tuple[list[float], dict]:
    schedule = generate(name, Shape(devices=1, microbatches=3, slices=slices, chunks=chunks))
    if recompute:
        schedule = add_recompute(schedule, "early")
    cut = [range(4)] if chunks == 1 else [range(2), range(2, 4)]
    runner = executor(SPEC, schedule, cut, 2, "float64")
    runner.feed.data = Fixed()
    (program,) = programs(parts(add_updates(schedule))[WHOLE])
    found = []
    for step in range(3):
        result = runner.run(program, step, 1e-2)
        runner.updates.commit()
        assert result.samples == 6
        found += [result.loss_sum, result.norm_squared]
    assert not runner.computation.pieces
    return found, {name: p.detach() for m in runner.modules.values() for name, p in m.named.items()}


CASES = [
    ("1f1b", 2, 1, False), ("1f1b", 3, 1, True), ("1f1b", 8, 1, False), ("gpipe", 4, 1, True), ("zb-h1", 4, 1, False),
    ("interleaved-1f1b", 3, 2, False), ("zb-h1", 2, 1, True),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> tuple[list[float], dict]:
    return trained("1f1b", 1)


@pytest.mark.parametrize(("name", "slices", "chunks", "recompute"), CASES)
def test_slices_train_like_whole_micro_batches(name, slices, chunks, recompute, whole) -> None:
    losses, weights = whole
    sliced, theirs = trained(name, slices, chunks, recompute)
    assert sliced == pytest.approx(losses, abs=1e-10, rel=0)
    for key, value in weights.items():
        assert torch.allclose(theirs[key], value, rtol=0, atol=1e-10), key
