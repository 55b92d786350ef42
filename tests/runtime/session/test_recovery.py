"""Workers that are killed: no update that a caller knows of is lost, and none is made twice."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from raypipe.runtime.session import session as session_module
from raypipe.runtime.session.session import QUEUED, Call, Session
from raypipe.runtime.session.session_worker import AdamW, StageSession
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.train import make_plan
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.plain_calls import PlainCalls
from tests.runtime.session.test_session import job_of, sampled

pytestmark = [pytest.mark.runs]


class Anywhere:
    """Starts workers on no reserved devices."""

    place = SimpleNamespace(is_broken=lambda: False)

    def of_ranks(self) -> list[Any]:
        return [None] * 2

    def start(self, rank: int, title: str, again: int = 0) -> Any:
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        return ray.remote(StageSession).options(num_cpus=0, runtime_env=environment).remote(rank, title)


@pytest.fixture
def session(local_ray: None, tmp_path: Path) -> Iterator[Session]:
    places, job = Anywhere(), job_of({})
    titles = [f"mortal {rank}" for rank in range(2)]
    run_id = f"mortal-{os.getpid()}"  # names sockets of this host
    workers = WorkerGroup([places.start(r, t) for r, t in enumerate(titles)], titles, [], run_id, places=places)
    workers.locate()
    made = Session(job, make_plan(job), tmp_path / "session", workers)
    made.set_up()
    yield made
    for actor in workers.actors:
        ray.kill(actor)


RATE = 0.002
"""Learning rate. One rounding of the weights is 1e-6 of a norm after fifty steps at 0.01, and at 0.003 1e-9 on some
processors."""


def called(session: Session, rounds: int, kills: bool, plain: list[PlainCalls] | None = None) -> list[float]:
    """Train two models in turn, and return all losses and norms; compare them with ``plain`` ones where given.

    ``kills``: whether in each round a random worker is killed at a random moment.
    """
    rng, chance = random.Random(4), random.Random(5)
    result: list[float] = []
    for done in range(rounds):
        queued = []
        for step in range(4):
            slot, loss = rng.randrange(2), "ppo"
            calls = [sampled(rng, loss, rng.randint(1, 6)) for _ in range(rng.randint(1, 2))]
            adam = AdamW(lr=RATE, eps=1e-8, weight_decay=0.1, clip=1.0)
            made = [session.forward_backward(c, loss, slot=slot) for c in calls]
            other = [sampled(rng, loss, 2)]  # in one pass with a call of the other model, which is done alone again
            calls.append(sampled(rng, loss, 2))
            pair = session.together("backward", [Call(calls[-1], loss, {}, slot), Call(*other, loss, {}, 1 - slot)])
            queued.append((slot, calls, [*made, pair[0]], adam, session.optim_step(adam, slot)))
            queued.append((1 - slot, other, pair[1:], adam, session.optim_step(adam, 1 - slot)))
            if kills and step == 1:
                pid = session.workers.locations[chance.randrange(2)].pid
                threading.Timer(chance.uniform(0.0, 0.02), os.kill, (pid, signal.SIGKILL)).start()
        for slot, calls, outcomes, adam, updated in queued:
            found = [call.result().loss_sum for call in outcomes] + [updated.result().grad_norm]
            if plain is not None:
                expected = [plain[slot].forward_backward(data, "ppo")[0] for data in calls]
                assert found == pytest.approx([*expected, plain[slot].optim_step(adam)], abs=1e-9), done
            result += found
    # A kill may come when all of these calls have ended; then the next one finds the worker gone.
    return result + [
        session.forward(sampled(rng, "cross_entropy", 3), slot=slot).result().loss_sum for slot in range(2)
    ]


def killed_while_called(session: Session, kills: int, tmp_path: Path) -> None:
    """Workers that are killed at random moments change nothing, bit for bit, and all is as plain PyTorch has it."""
    session.save(tmp_path / "start").result()
    found = []
    for killed in (False, True):
        for slot in range(2):
            session.load(tmp_path / "start", with_optimizer=False, slot=slot)
        plain = None if killed else [PlainCalls(whole_gpt(session.job)) for _ in range(2)]
        found.append(called(session, kills, killed, plain))
    assert found[0] == found[1]
    assert session.lives == kills


def test_a_killed_worker_costs_no_update(session: Session, tmp_path: Path) -> None:
    killed_while_called(session, 1, tmp_path)


def test_a_worker_that_is_stopped_is_replaced(session: Session) -> None:
    """Nothing else waits for it: the others have answered, and the caller queues no more calls."""
    rng, plain = random.Random(7), PlainCalls(whole_gpt(session.job))
    train = session.job.train.model_copy(update={"message_timeout_s": 1.0})
    session.job = session.job.model_copy(update={"train": train})
    data = sampled(rng, "cross_entropy", 3)
    os.kill(session.workers.locations[1].pid, signal.SIGSTOP)
    found = session.forward(data).result().loss_sum
    assert session.lives == 1
    assert found == pytest.approx(plain.forward_backward(data, "cross_entropy")[0], abs=1e-9)


def test_a_full_disk_is_the_callers_error_and_no_workers(session: Session, tmp_path: Path) -> None:
    """A worker that may write 1000 bytes a file: what a full disk looks like from inside."""
    worker = psutil.Process(session.workers.locations[1].pid)
    usual = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (1000, usual[1]))
    try:
        with pytest.raises(Exception, match="File too large"):
            session.save(tmp_path / "state").result()
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, usual)
    assert (session.lives, (tmp_path / "state").exists()) == (0, False)
    assert session.save(tmp_path / "state").result().is_dir()


def test_one_thread_waits_for_results_while_another_queues_calls(session: Session) -> None:
    """As the server has it: neither waits for the other where workers are started anew."""
    rng, plain, queued = random.Random(6), PlainCalls(whole_gpt(session.job)), SimpleQueue[Any]()
    result: list[float] = []

    def collect() -> None:
        while (call := queued.get()) is not None:
            result.append(call.result().loss_sum)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    expected = []
    for step in range(3 * QUEUED):
        data = sampled(rng, "cross_entropy", 3)
        expected.append(plain.forward_backward(data, "cross_entropy")[0])
        queued.put(session.forward_backward(data))
        if step == QUEUED:
            os.kill(session.workers.locations[0].pid, signal.SIGKILL)
    queued.put(None)
    thread.join(60)
    assert not thread.is_alive()
    assert result == pytest.approx(expected, abs=1e-9)
    assert session.lives == 1


@pytest.mark.exhaustive
def test_twenty_kills_cost_no_update(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SNAPSHOT", 8)
    killed_while_called(session, 20, tmp_path)
    assert all(len(log.calls) < 40 for log in session._logs.values())
