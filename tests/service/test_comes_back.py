"""A server that was killed comes back: what it has promised is done, once, and comes to the same numbers."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.session import session as session_module
from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.session_worker import AdamW
from raypipe.service import run_files
from raypipe.service.futures import GoneError
from raypipe.service.server import CreateModel, LoadWeights, OptimStep, SaveWeights, come_back
from raypipe.service.service import Service
from raypipe.service.wire import _CLASSES
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.conftest import Opened, session_of  # noqa: F401  # the fixture
from tests.runtime.session.plain_calls import PlainCalls
from tests.runtime.session.test_session import job_of, sampled

pytestmark = [pytest.mark.runs]

BASE = "session"


class Client:
    """A client's requests as the server gets them; they are numbered, and can be sent again."""

    def __init__(self, service: Service, session: str, number: int = 0) -> None:
        self.session, self.number, self.sent = session, 0, dict[str, Any]()
        asked = CreateModel(session_id=session, model_seq_id=number, base_model=BASE)
        self.created = lambda service: service.create_model(asked, asked.model_dump_json().encode())
        self.request, self.model = self.created(service)

    def send(self, service: Service, form: Any, verb: Any, **own: Any) -> str:
        self.number += 1
        asked = form(model_id=self.model, seq_id=self.number, **own)
        again = lambda service: verb(service, asked, asked.model_dump_json().encode())[0]  # noqa: E731
        request = again(service)
        self.sent[request] = again
        return request

    def call(self, service: Service, data: list[Datum], loss: str) -> str:
        self.number += 1
        request = _CLASSES["ForwardBackwardRequest"](model_id=self.model, seq_id=self.number, loss_fn=loss)
        for one in data:
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = one.tokens.astype("<i4").tobytes()
            for name, values in one.inputs.items():
                whole = name == "target_tokens"
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = values.astype("<i8" if whole else "<f4").tobytes(), 2 if whole else 1
                tensor.shape.append(len(values))
        body = request.SerializeToString()
        again = lambda service: service.forward_backward(body)[0]  # noqa: E731
        self.sent[again(service)] = again
        return f"{self.model}:{self.number}"

    def update(self, service: Service, rate: float) -> str:
        adam = {"learning_rate": rate, "eps": 1e-8, "grad_clip_norm": 1.0}
        return self.send(service, OptimStep, Service.optim_step, adam_params=adam)


def given_up(service: Service) -> None:
    """Let a server do nothing any more, as if its process were dead."""
    parked, never = threading.Event(), threading.Event()

    def park(*_: Any) -> Any:
        parked.set()
        never.wait()

    service.rows.add = lambda *_: never.wait()
    service.requests._wait = park
    service.requests.then(park)
    parked.wait(3)  # or it waits for an answer that does not come any more


def result(service: Service, request: str) -> Any:
    answer = service.requests.find(request).future.result(60)
    if answer.json is not None:
        return answer.json
    output = _CLASSES["ForwardBackwardOutput"]()
    output.ParseFromString(answer.protobuf)
    return output.metrics["loss:sum"]


def rounded(data: list[Datum]) -> list[Datum]:
    return [
        one._replace(
            inputs={k: v if k == "target_tokens" else v.astype("f4").astype(float) for k, v in one.inputs.items()}
        )
        for one in data
    ]


@pytest.mark.parametrize("every", [3, 64], ids=["from snapshots", "from the beginning"])
def test_all_that_was_promised_is_done_once(
    session_of: Opened,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
) -> None:
    """Two models train; the server is given up with requests that have just been accepted, and another comes back."""
    monkeypatch.setattr(session_module, "SNAPSHOT", every)
    job, rng = job_of({}), random.Random(3)

    def served(again: bool) -> Service:
        service = Service(session_of(job, tmp_path / "session"), BASE, tmp_path, most=2)
        service.begin(again)
        if again:
            come_back(service, print)
        return service

    service = served(False)
    name = service.create_session()
    clients = [Client(service, name, number) for number in range(2)]
    plain = [PlainCalls(whole_gpt(job)) for _ in clients]
    for life in range(3):
        expected: dict[str, float] = {}
        for step in range(4):
            for which, (client, model) in enumerate(zip(clients, plain, strict=True)):
                data = rounded(sampled(rng, "ppo", 3))
                expected[client.call(service, data, "ppo")], _ = model.forward_backward(data, "ppo")
                rate = 0.01 * (which + 1)
                expected[client.update(service, rate)] = model.optim_step(AdamW(lr=rate, eps=1e-8, clip=1.0))
                if step == 1:
                    result(service, f"{client.model}:{client.number}")
        data = rounded(sampled(rng, "ppo", 2))  # gradients that no update has yet
        expected[clients[life % 2].call(service, data, "ppo")], _ = plain[life % 2].forward_backward(data, "ppo")
        given_up(service)
        service = served(True)
        for client in clients:
            assert client.created(service)[0] == client.request
            assert result(service, client.request)["model_id"] == client.model
        for client in clients:
            sent, client.sent = client.sent, {}
            for request, again in sent.items():  # as of a client whose answer was lost
                assert again(service) == request
        for request, value in expected.items():
            found = result(service, request)
            found = found["metrics"]["grad_norm"] if isinstance(found, dict) else found
            assert found == pytest.approx(value, abs=1e-9), (life, request)
    rows = read_rows(tmp_path / METRICS)
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert service.model(clients[0].model).steps == 12
    for client in clients:
        if every == 3:
            assert service.model(client.model).kept > 12
    service.end_session(name)
    assert run_files.sessions(tmp_path) == []


def test_checkpoints_are_loaded_as_they_were(session_of: Opened, tmp_path: Path) -> None:  # noqa: F811
    """One that was overwritten, or has expired, after the load was accepted; a refused number stays used."""
    job, rng = job_of({}), random.Random(4)
    service = Service(session_of(job, tmp_path / "session"), BASE, tmp_path, most=2)
    service.begin()
    name = service.create_session()
    one, other = Client(service, name, 0), Client(service, name, 1)
    save = lambda asked_of, asked, body: asked_of.save(asked, body, "weights")  # noqa: E731

    def train(client: Client) -> float:
        data = sampled(rng, "cross_entropy", 3)
        client.call(service, data, "cross_entropy")
        return result(service, client.update(service, 0.01))["metrics"]["grad_norm"]

    train(one)
    path = result(service, one.send(service, SaveWeights, save, path="x"))["path"]
    load = {"path": path, "optimizer": True}
    with pytest.raises(SpecError, match="there is no checkpoint"):
        other.send(service, LoadWeights, Service.load, path=path.replace("/x", "/y"), optimizer=True)
    result(service, other.send(service, LoadWeights, Service.load, **load))
    train(one)
    result(service, one.send(service, SaveWeights, save, path="x", overwrite=True))
    data = sampled(rng, "cross_entropy", 3)
    before = result(service, other.call(service, data, "cross_entropy"))
    given_up(service)

    service = Service(session_of(job, tmp_path / "session"), BASE, tmp_path, most=2)
    service.begin(again=True)
    come_back(service, print)
    assert result(service, f"{other.model}:{other.number}") == before
    assert result(service, other.call(service, data, "cross_entropy")) == before
    service.end_session(name)
    with pytest.raises(GoneError):
        service.model(other.model)


def test_another_job_does_not_come_back(tmp_path: Path) -> None:
    job = job_of({})
    with pytest.raises(SpecError, match="holds no run of raypipe serve"):
        run_files.check_served(job, tmp_path, print)
    run_files.begin_session(tmp_path, "s")
    (tmp_path / "job.json").write_text(json.dumps(job.model_dump(mode="json")))
    assert run_files.check_served(job, tmp_path, print) == []
    for changed, said in ({"seed": 4}, "train.seed: is 4, and was 3"), ({"dtype": "float32"}, "train.dtype"):
        with pytest.raises(SpecError, match=said):
            run_files.check_served(job_of({}, **changed), tmp_path, print)
