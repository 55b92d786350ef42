"""A device that waits too long fails with an error that says who waits, for what, from whom."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from raypipe.errors import TransportError
from raypipe.runtime.calls import Ticket
from raypipe.runtime.recovery.flight_recorder import places_of, stuck_message
from tests.exhaustive import crossed
from tests.runtime.runs.small_runs import drive, new_driver, small_job
from tests.runtime.transport.kinds import BETWEEN_CPUS

pytestmark = pytest.mark.runs

TIMEOUT_S = 1.0
PLAN = {"schedule": "1f1b", "stages": 2}

WAITS = {
    # The rank that runs its step alone, and what it ends up waiting for: its peer was never told to run.
    "activation": (1, "1F0 of step 1", "stage actor 0 (rank 0)", "activation of micro-batch 0, stage 0 -> 1"),
    "gradient": (0, "0BW0 of step 1", "stage actor 1 (rank 1)", "gradient of micro-batch 0, stage 1 -> 0"),
}


@pytest.mark.parametrize(("transport", "waits_for"), crossed(BETWEEN_CPUS, list(WAITS)))
def test_a_peer_that_never_sends(waits_for, transport, stage_pool, text_folder, tmp_path) -> None:
    rank, task, peer, message = WAITS[waits_for]
    job = small_job(text_folder, PLAN | {"transport": transport}, message_timeout_s=TIMEOUT_S)
    workers = stage_pool(2)
    new_driver(job, tmp_path)._setup(workers, None, 0)
    begun = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(workers.actors[rank].run_step.remote(0), timeout=60)
    waited = time.monotonic() - begun
    error = caught.value.cause
    assert type(error) is TransportError
    assert error.where == f"{task}, {peer}"
    assert error.why.startswith(f"{message}, step 0 did not come within {TIMEOUT_S:g} s")
    assert error.fix
    assert TIMEOUT_S <= waited < TIMEOUT_S + 10  # the rest is what a busy machine may take


def test_a_device_that_stands_still_ends_the_run_and_its_name_is_told(stage_pool, text_folder, tmp_path) -> None:
    """The whole way up: the driver raises what the waiting device reports, though the other one says nothing."""
    job = small_job(text_folder, PLAN, message_timeout_s=TIMEOUT_S, steps=3)
    driver = new_driver(job, tmp_path)
    workers = stage_pool(2)
    driver._setup(workers, None, 0)
    stuck = workers.locations[0].pid
    os.kill(stuck, signal.SIGSTOP)
    try:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            driver._loop(workers, 0)
        assert caught.value.cause.where == "1F0 of step 1, stage actor 0 (rank 0)"
        assert caught.value.cause.why.startswith("activation of micro-batch 0, stage 0 -> 1")
        first, *others = stuck_message(places_of(tmp_path, workers.locations, {})).split("\n  ")
        assert first.startswith("first stuck: stage actor 0 · device 0 has not begun a step")
        assert first.endswith("its process is stopped")
        waits = (
            "stage actor 1 · device 1 waits with 1F0 of step 1 for device 0 (activation of micro-batch 0, stage 0 -> 1)"
        )
        assert [one.startswith(waits) for one in others] == [True]
    finally:
        os.kill(stuck, signal.SIGCONT)
    # Once it goes on, the same actors serve the next plan.
    losses = drive(small_job(text_folder, PLAN), stage_pool, tmp_path / "after").losses
    assert losses == drive(small_job(text_folder, PLAN), stage_pool, tmp_path / "again").losses


def test_a_process_that_is_stopped_before_it_answers_is_noticed(stage_pool, text_folder, tmp_path) -> None:
    """Its step may be done, so that others answer, and wait for it in the next one, if there is any."""
    driver = new_driver(small_job(text_folder, PLAN, message_timeout_s=TIMEOUT_S, steps=3), tmp_path)
    workers = stage_pool(2)
    driver._setup(workers, None, 0)
    stuck = workers.locations[0].pid
    os.kill(stuck, signal.SIGSTOP)
    try:
        ticket = Ticket("step", 1, workers.call("clock"), driver.clock)
        behind = Ticket("step", 2, workers.call("run_step", 0), driver.clock)
        driver._pending.extend([ticket, behind])
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            driver._collect_oldest(workers)
        assert caught.value.cause.where == "1F0 of step 1, stage actor 0 (rank 0)"
        with pytest.raises(TransportError, match="1 of 2 answers have come, and no more within 1 s") as late:
            workers.answers(workers.call("clock"), TIMEOUT_S)
        assert late.value.where == workers.titles[0]
        with pytest.raises(TransportError, match="2 of 4 answers have come") as late:
            workers.answers([*workers.call("clock"), *workers.call("clock")], TIMEOUT_S)
        assert late.value.where == workers.titles[0]
    finally:
        os.kill(stuck, signal.SIGCONT)
    assert len(workers.answers(ticket.refs, TIMEOUT_S)) == 2  # it answers late


def test_the_end_of_a_write_is_waited_for_and_a_stopped_process_is_not(stage_pool, text_folder, tmp_path) -> None:
    driver = new_driver(small_job(text_folder, PLAN, steps=3), tmp_path)
    workers = stage_pool(2)
    driver._setup(workers, None, 0)
    save, refs = driver.saves.call(workers, 3)
    driver.saves.begun(save, ray.get(refs), {})
    stuck = workers.locations[1].pid
    os.kill(stuck, signal.SIGSTOP)
    try:
        with pytest.raises(TransportError, match="1 of 2 answers have come") as late:
            driver.saves.finish(workers, TIMEOUT_S)
        assert late.value.where == workers.titles[1]
        assert driver.checkpoints.newest[0] == 0
    finally:
        os.kill(stuck, signal.SIGCONT)
    driver.saves.finish(workers, TIMEOUT_S)
    assert driver.checkpoints.newest[0] == 3
