"""Faults of emulated devices, run with real processes and messages, are explained as what they are."""

from __future__ import annotations

import pytest

from tests.bench.runtime.explain_faults import KINDS, judge, start


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.parametrize(
    "kinds", [("uneven_cut", "noisy_neighbour", "slow_link"), ("exposed_sync", "late_data", "host_delay")]
)
def test_the_fault_is_the_first_cause_and_mending_it_gains_what_is_predicted(
    local_ray: None, kinds: tuple[str, ...]
) -> None:
    """The benchmark (``tests/bench/runtime/explain_faults.py``) runs all kinds, with narrower limits."""
    workers = start()
    try:
        for kind in kinds:
            judged = judge(next(iter(KINDS[kind]())), workers, steps=8)
            assert judged.right, judged.row()
            assert judged.predicted == pytest.approx(judged.gained, abs=0.1), judged.row()
    finally:
        workers.stop()
