"""Bytes that the runtime's own sharded stages take on one of several copies, against the memory model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.memory import device_memory
from raypipe.job import GptSpec
from raypipe.runtime.update import collectives, flat_weights
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, shard
from raypipe.schedule.sharding import sum_groups
from tests.cost.test_memory_of_a_step import MACHINE, executor, most_at_once
from tests.exhaustive import ONLY
from tests.runtime.update.test_buckets import Done

SPEC = GptSpec(layers=4, hidden=128, heads=4, sequence=64, vocabulary=256, dropout=0.0, tie_embeddings=False)
MICROBATCH = 2
CUTS = {1: [range(6)], 2: [range(3), range(3, 6)]}
CASES = [
    pytest.param(name, chunks, level, policy, copies, dtype, marks=() if daily else ONLY)
    for name, chunks in (("1f1b", 1), ("bfs", 2), ("zeropp", 2))
    for level in (1, 2, 3)
    for policy in ("step", "unit", "microbatch")
    for copies in (2, 4)
    for dtype in ("float32", "bfloat16")
    # Where weights are not divided nothing is gathered for a task; every level has both numbers of copies.
    for usual in [(level == 3 or policy == "step") and copies == (4 if level == 2 or policy == "unit" else 2)]
    for daily in [usual and (dtype == "float32" or (level == 3 and policy != "unit"))]
]


class Copies:
    """A process group of which only the first member exists."""

    def __init__(self, members: int) -> None:
        self._members = members

    def size(self) -> int:
        return self._members

    def rank(self) -> int:
        return 0


def gather(whole: torch.Tensor, own: torch.Tensor, group: Copies) -> Done:
    for other in whole.view(group.size(), -1):
        if other.data_ptr() != own.data_ptr():
            other.copy_(own)
    return Done()


def scatter(own: torch.Tensor, whole: torch.Tensor, group: Copies) -> Done:
    own.copy_(whole.view(group.size(), -1)[0])
    return Done()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks", "level", "policy", "copies", "dtype"), CASES)
def test_a_copys_bytes_are_those_of_the_model(name, chunks, level, policy, copies, dtype, monkeypatch) -> None:
    monkeypatch.setattr(flat_weights, "start_all_gather", gather)
    monkeypatch.setattr(collectives, "start_reduce_scatter", scatter)
    one = generate(name, Shape(devices=1, microbatches=4, chunks=chunks))
    whole = shard(replicate(one, copies), level, gather=policy, copies=copies)
    schedule = add_updates(place_gradient_sync(whole, "lazy"))
    cut = CUTS[chunks]
    profile = analytic_profile(SPEC, MACHINE, dtype, [MICROBATCH])
    narrow = profile.model_copy(update={"gathers_narrow": dtype == "bfloat16" and hasattr(torch.Tensor, "grad_dtype")})
    predicted = device_memory(narrow, cut, schedule, MICROBATCH)[0]

    groups: Any = {n: Copies(copies) for n in sum_groups(schedule.placement, schedule.sharding)}
    runner = executor(SPEC, schedule, cut, MICROBATCH, dtype, groups=groups)
    most = most_at_once(runner, programs(schedule)[0])
    kept = [t for m in runner.modules.values() for t in m.named.values()]
    kept += [flat.shard for stage in runner.sync.shards.values() for flat in stage.flats]
    kept += [t for o in runner.updates.optimizers.values() for state in o.state.values() for t in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert predicted.total == pytest.approx(most + sum(storages.values()), rel=0.05), predicted.terms()
