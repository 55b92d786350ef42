"""A session in a named actor: other processes find it, and its calls run in the order in which they were made."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import numpy as np
import pytest
import ray

from raypipe.errors import SpecError
from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.session import Call, Session, arrays
from raypipe.runtime.session.session_worker import AdamW
from raypipe.service.actor import RemoteSession
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.plain_calls import PlainCalls
from tests.runtime.session.test_session import job_of, sampled

pytestmark = [pytest.mark.runs]


@ray.remote
def steps_elsewhere(name: str, data: list[list[Datum]], adam: AdamW, slot: int) -> list[tuple[float, float]]:
    """Train in another process; all calls are made before any result is asked for."""
    session = RemoteSession.find(name)
    made = [(session.forward_backward(one, slot=slot), session.optim_step(adam, slot)) for one in data]
    return [(ray.get(call).loss_sum, ray.get(update).grad_norm) for call, update in made]


def test_it_has_the_verbs_of_a_session() -> None:
    """All but ``note``, which a caller needs that keeps the requests itself."""
    for name, method in inspect.getmembers(Session, inspect.isfunction):
        if not name.startswith("_") and "PendingCall" in str(inspect.signature(method).return_annotation):
            wanted, has = (list(inspect.signature(getattr(of, name)).parameters) for of in (Session, RemoteSession))
            assert has == [parameter for parameter in wanted if parameter != "note"], name


def test_other_processes_train_on_it(local_ray: None, tmp_path: Path) -> None:
    job, rng, adam = job_of({}), random.Random(5), AdamW(lr=0.01, eps=1e-8, clip=1.0)
    session = RemoteSession.start(job, "trainer", tmp_path / "run")
    try:
        start = ray.get(session.save(tmp_path / "start"))
        ray.get(session.load(start, with_optimizer=False, slot=1))
        # Large data travels apart from the call, and could be overtaken by the update that follows it.
        long = arrays([1] * 24, target_tokens=[2] * 24, weights=np.ones(24))
        work = [[[*sampled(rng, "cross_entropy", 3), *[long] * (400 * (n == 1))] for n in range(4)] for _ in range(2)]
        for data, found in zip(
            work,
            ray.get([steps_elsewhere.remote("trainer", data, adam, n) for n, data in enumerate(work)]),
            strict=True,
        ):
            plain = PlainCalls(whole_gpt(job))
            for one, (loss, norm) in zip(data, found, strict=True):
                assert loss == pytest.approx(plain.forward_backward(one, "cross_entropy")[0], rel=1e-9)
                assert norm == pytest.approx(plain.optim_step(adam), rel=1e-9)
        plain = [PlainCalls(whole_gpt(job)) for _ in range(2)]
        made = [session.load(start, with_optimizer=False, slot=slot) for slot in range(2)]
        mixed = [Call(one[0][:2], slot=slot) for slot, one in enumerate(work)]
        for one, call, outputs in zip(plain, mixed, ray.get(session.together("backward", mixed)), strict=True):
            assert outputs.loss_sum == pytest.approx(one.forward_backward(call.data, call.loss)[0], rel=1e-9)
        for slot, one in enumerate(plain):
            assert ray.get(session.optim_step(adam, slot)).grad_norm == pytest.approx(one.optim_step(adam), rel=1e-9)
        assert ray.get([*made, *session.together("forward", mixed[:1])])[-1].loss_sum > 0
        with pytest.raises(SpecError, match="no forward_backward has come"):
            ray.get(session.optim_step(adam))
        assert ray.get(session.forward(work[0][0])).loss_sum > 0  # a refused call does not hold up the next
    finally:
        session.stop()
    with pytest.raises(ValueError, match="trainer"):
        RemoteSession.find("trainer")
