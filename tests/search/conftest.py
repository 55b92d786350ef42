"""Random small steps of every placement, and their cost tables."""

import random
from typing import Any, NamedTuple

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.search import Found, search


class Case(NamedTuple):
    placement: tuple[tuple[int, ...], ...]
    count: int
    forward: list[int]
    input_grad: list[int]
    weight_grad: list[int]
    latency: int | tuple[int, ...]
    """Of all links, or one per stage."""
    memory: int | None
    split: bool

    @property
    def costs(self) -> CostTable:
        return CostTable(
            forward=tuple(self.forward), input_grad=tuple(self.input_grad), weight_grad=tuple(self.weight_grad),
            comm=self.latency,
        )  # fmt: skip

    def search(self, **options: Any) -> Found:
        return search(
            self.placement, self.count, self.costs, memory_limit=self.memory, split=self.split, **options
        )  # fmt: skip


def random_case(seed: int) -> Case:
    """At most 4 devices and 8 micro-batches; 6 where a device has two stages."""
    rng = random.Random(seed)
    kind = rng.choice(("line", "line", "v", "ring", "bidirectional"))
    depth = rng.choice((2, 4)) if kind == "bidirectional" else rng.randint(2, 4)
    count = rng.randint(2, 6 if kind in ("v", "ring") else 8)
    down = tuple(range(depth))
    placement = {
        "line": (down,), "v": ((*down, *reversed(down)),), "ring": (down * 2,), "bidirectional": (down, down[::-1]),
    }[kind]  # fmt: skip
    stages = len(placement[0])
    times = [[rng.randint(1, 12) for _ in range(stages)] for _ in range(3)]
    least = 2 if stages > depth else 1
    memory = rng.choice((None, rng.randint(least, stages + 1), rng.randint(least, stages + 1)))
    latency, split = rng.randint(0, 4), rng.random() < 0.8
    links = tuple(rng.randint(0, 6) for _ in range(stages)) if rng.random() < 0.5 else latency
    return Case(placement, count, *times, links, memory, split)


@pytest.fixture(scope="session")
def make_case():
    return random_case
