"""The comparison with other systems (``tests/bench/planners``), on a case that can be worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.planners import systems
from tests.bench.planners.cases import Cluster, case
from tests.bench.planners.judge import Choice, judge
from tests.bench.planners.rows import row_of, shown, summary
from tests.bench.search.joint_models import RATE, TOKENS, LayerKind

WORK = 0.1
"""Seconds of a layer's forward of one sample, and of each of its gradients."""
BLOCK = LayerKind(flops=WORK * RATE / TOKENS, parameters=1e6, kept=100.0)


def two_devices(memory: float):
    model = [(name, BLOCK, 1.0) for name in "abcdef"]
    return case("even", model, Cluster("2, one host", 2, 2, memory, 1e9, 1e9))


def test_two_copies_take_their_work_and_their_sum() -> None:
    """Four samples: two of 1.1 x 0.1 s x 6 layers x 3 for each copy, then half of 24 MB each way at 1 GB/s."""
    choice = Choice("", "device 0: 0F0 0BW0 0F1 0BW1", [list(range(6))], copies=2, microbatch=1)
    verdict = judge(two_devices(1e9), choice)
    assert verdict.seconds == pytest.approx(2 * 1.1 * WORK * 6 * 3 + 2 * (1e-5 + 12e6 / 1e9), rel=1e-12)
    assert verdict.fullest == 16 * 6e6 + 6 * 2 * 100 * TOKENS
    assert not judge(two_devices(verdict.fullest - 1), choice).fits


def test_every_system_has_a_row_and_the_best_has_no_regret(monkeypatch) -> None:
    monkeypatch.setattr(systems, "SEARCH_S", 0.1)
    row = row_of(two_devices(1e9))
    regrets = {name: o["regret"] for name, o in row["systems"].items() if o is not None}
    assert set(regrets) == set(systems.SYSTEMS)
    assert min(regrets.values()) == 0.0
    raypipe = row["systems"]["raypipe"]
    assert raypipe["seconds"] == pytest.approx(raypipe["predicted_s"], rel=1e-6)
    assert "raypipe" in summary([row])[-1]
    assert shown(row).count("%") == len(systems.SYSTEMS)
    none = row_of(two_devices(1e6))  # less than a device's share of the weights
    assert not any(o is not None and o["fits"] for o in none["systems"].values())
