"""Faults of emulated devices, run with real processes and messages, are explained as what they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raypipe.runtime.worker.worker_group import WorkerGroup
from tests.bench.runtime.explain_faults import KINDS, judge, start
from tests.exhaustive import exhaustive


@pytest.fixture(scope="module")
def workers(local_ray: None) -> Iterator[WorkerGroup]:
    started = start()
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.parametrize(
    "kind",
    ["slow_link", *exhaustive("uneven_cut", "late_data", "noisy_neighbour", "exposed_sync", "host_delay")],
)
def test_the_fault_is_the_first_cause_and_mending_it_gains_what_is_predicted(workers: WorkerGroup, kind: str) -> None:
    """The benchmark (``tests/bench/runtime/explain_faults.py``) runs all kinds, with narrower limits."""
    judged = judge(next(iter(KINDS[kind]())), workers, steps=8)
    assert judged.right, judged.row()
    assert judged.predicted == pytest.approx(judged.gained, abs=0.1), judged.row()
