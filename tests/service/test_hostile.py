"""Wrong requests are answered with a 4xx and one sentence; nothing of them runs, nothing outside the run is read."""

from __future__ import annotations

import http.client
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raypipe.errors import SpecError
from raypipe.service.futures import AHEAD
from raypipe.service.server import MOST_BYTES, make_app
from raypipe.service.wire import _CLASSES
from tests.service.conftest import BASE, Serving

pytestmark = [pytest.mark.runs]

Request = tuple[str, str, bytes, dict[str, str]]
JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}


def ask(serving: Serving, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def asked(serving: Serving, verb: str, **body: Any) -> dict[str, Any]:
    status, answer = ask(serving, "POST", f"/api/v1/{verb}", json.dumps(body).encode(), JSON)
    assert status == 200, answer
    return json.loads(answer)


def message(model: str, number: int, **changed: Any) -> Any:
    """A ``forward_backward`` request that is right, but for what is changed."""
    request = _CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(changed.get("tokens", [1, 2]), np.int32).tobytes()
    for name, values, kind in (
        ("target_tokens", changed.get("targets", [2, 3]), 2), ("weights", changed.get("weights", [1.0, 1.0]), 1),
    ):  # fmt: skip
        tensor = datum.loss_fn_inputs[name]
        tensor.dense = np.array(values, np.int64 if kind == 2 else np.float32).tobytes()
        tensor.dtype = kind
        tensor.shape.append(len(values))
    return request


def wrong_calls(model: str) -> Iterator[Request]:
    rng = random.Random(0)
    number = itertools.count(1)  # a refused request has used its number

    def call(request: Any) -> Request:
        return ("POST", "/api/v1/forward_backward", request.SerializeToString(), PROTOBUF)

    for tokens in ([], [-1, 2], [256, 1], [2**31 - 1, 1], [1] * 25, [1] * 100_000, [1], [1, 2, 3]):
        yield call(message(model, next(number), tokens=tokens))
    for targets in ([], [1], [-1, 2], [2**62, 2], [-(2**63), 1], [1, 2, 3]):
        yield call(message(model, next(number), targets=targets))
    for weights in ([], [1.0], [float("nan"), 1.0], [float("inf"), 1.0], [1.0] * 3):
        yield call(message(model, next(number), weights=weights))
    for loss in ("", "cross-entropy", "custom", "../ppo", "ppo", "gspo", "stable_reinforce", "x" * 10_000):
        request = message(model, next(number))
        request.loss_fn = loss
        yield call(request)
    for option in ({"beta": 1.0}, {"clip_low_threshold": 0.1}, {"": float("nan")}):
        request = message(model, next(number))
        request.loss_fn_config.update(option)
        yield call(request)
    for spoil in range(8):
        request = message(model, next(number))
        datum = request.data[0]
        if spoil == 0:
            datum.model_input[0].image.SetInParent()
        elif spoil == 1:
            datum.loss_fn_inputs["weights"].sparse_csr.SetInParent()
        elif spoil == 2:
            datum.loss_fn_inputs["weights"].shape.append(2)
        elif spoil == 3:
            datum.loss_fn_inputs["weights"].dtype = 4
        elif spoil == 4:
            datum.loss_fn_inputs["weights"].dense += b"x"
        elif spoil == 5:
            datum.model_input[0].encoded_text.tokens += b"x"
        elif spoil == 6:
            datum.loss_fn_inputs["weights"].shape[0] = 2**40
        else:
            datum.loss_fn_inputs["../../etc/passwd"].CopyFrom(datum.loss_fn_inputs["weights"])
        yield call(request)
    for other in ("", "none", f"{model}x", "../../etc", model.upper(), "\0"):
        yield call(message(other, 1))
    for at in (0, -1, -(2**31), 2**31 - 1):
        yield call(message(model, at))
    yield ("POST", "/api/v1/forward_backward", message(model, 5).SerializeToString(), JSON)
    yield ("POST", "/api/v1/forward_backward", message(model, 5).SerializeToString(), {})
    yield ("POST", "/api/v1/forward_backward", b"no zstd", {**PROTOBUF, "content-encoding": "zstd"})
    yield ("POST", "/api/v1/forward_backward", b"", {**PROTOBUF, "content-encoding": "gzip"})
    whole = message(model, 5).SerializeToString()
    for _ in range(40):  # cut off, so that a length points behind the end
        yield ("POST", "/api/v1/forward_backward", whole[: rng.randrange(20, len(whole) - 1)], PROTOBUF)


def wrong_verbs(session: str, model: str) -> Iterator[Request]:
    def verb(name: str, body: Any, headers: dict[str, str] = JSON) -> Request:
        return ("POST", f"/api/v1/{name}", json.dumps(body).encode(), headers)

    adam = {"learning_rate": 0.1}
    for given in (
        {"learning_rate": -1.0}, {"learning_rate": "fast"}, {"learning_rate": None}, {"beta1": 1.0}, {"beta2": 2.0},
        {"eps": -1.0}, {"weight_decay": -0.1}, {"rate": 0.1}, [], None, 5, "adam",
    ):  # fmt: skip
        yield verb("optim_step", {"model_id": model, "seq_id": 60, "adam_params": given})
    for seq in (0, -5, "x", 1.5, None, 10**9, [1]):
        yield verb("optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})
    yield verb("optim_step", {"model_id": "nobody", "seq_id": 1, "adam_params": adam})
    yield verb("optim_step", {"model_id": model, "seq_id": 60, "optimizer_params": {"type": "dimuon"}})
    for path in (
        "..", ".", "", "../x", "a/b", "/etc/passwd", "a\\b", "x" * 101, "a\0b", ".hidden", "a b", "ü", "%2e%2e", "-",
        "~",
    ):  # fmt: skip
        yield verb("save_weights", {"model_id": model, "seq_id": 60, "path": path})
        yield verb("save_weights_for_sampler", {"model_id": model, "seq_id": 60, "path": path})
    yield verb("save_weights", {"model_id": model, "seq_id": 60, "path": "x", "ttl_seconds": 0})
    yield verb("save_weights_for_sampler", {"model_id": model, "seq_id": 60})
    yield verb("save_weights_for_sampler", {"model_id": model, "seq_id": 60, "sampling_session_seq_id": 0})
    yield verb("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE})
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    yield verb("asample", {"sampling_session_id": "x", "seq_id": 0, "prompt": prompt, "sampling_params": {}})
    for path in (
        "", "x", "/etc/passwd", "tinker://", "tinker://a/b/c", "tinker://../weights/x", "tinker://a/weights/../..",
        "tinker://a/weights/none", f"tinker://{model}/weights/..", f"tinker://{model}/weights/none", "file:///etc/passwd",
        f"tinker://{model}/start/x", f"tinker://{model}/weights/a/../../..", "tinker://start/weights/x",
        "tinker:// /weights/x",
    ):  # fmt: skip
        yield verb("load_weights", {"model_id": model, "seq_id": 60, "path": path, "optimizer": True})
    yield verb("load_weights", {"path": "tinker://a/weights/b", "optimizer": True})
    for name, value in (("base_model", "other"), ("lora_config", {"rank": 8}), ("lora_config", {"rank": -1}),
                        ("optimizer_config", {"type": "dimuon"}), ("model_seq_id", -1), ("model_seq_id", "x"),
                        ("session_id", "none"), ("session_id", None), ("type", "create_models")):  # fmt: skip
        right = {"session_id": session, "model_seq_id": 1, "base_model": BASE}
        yield verb("create_model", {**right, name: value})
    yield verb("session_heartbeat", {"session_id": "none"})
    yield verb("get_info", {"model_id": "none"})
    for request in ("", "none", f"{model}:999", "../..", None, 7):
        yield verb("retrieve_future", {"request_id": request})
    for name in ("create_session", "create_model", "optim_step", "save_weights", "load_weights", "retrieve_future"):
        for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000):
            yield ("POST", f"/api/v1/{name}", body, JSON)
        yield ("GET", f"/api/v1/{name}", b"", {})
        yield ("POST", f"/api/v1/{name}", b"{}", {"content-type": "text/plain"})  # as a form of the web would
    for path in ("/", "/api", "/api/v1/../../etc/passwd", "/api/v1/asample", "/docs", "/openapi.json"):
        yield ("GET", path, b"", {})
    yield verb("create_session", {}, {**JSON, "host": "attacker.example"})
    yield verb("create_session", {"tags": "x"})
    yield verb("create_session", {"sudo": True})


def test_two_hundred_wrong_requests(serving: Serving) -> None:
    session = asked(serving, "create_session")["session_id"]
    made = asked(serving, "create_model", session_id=session, model_seq_id=0, base_model=BASE)
    assert asked(serving, "retrieve_future", request_id=made["request_id"])["model_id"] == made["model_id"]
    model = made["model_id"]
    calls = serving.service.session._calls
    wrong = [*wrong_calls(model), *wrong_verbs(session, model)]
    assert len(wrong) >= 200
    bad = []
    for number, request in enumerate(wrong):
        status, answer = ask(serving, *request)
        if not 400 <= status < 500:
            bad.append((number, request, status, answer))
            continue
        said = json.loads(answer)["detail"]
        assert isinstance(said, str), (number, request, said)
        assert 0 < len(said) < 700, (number, request, said)
        assert "\n" not in said, (number, request, said)
        assert "Traceback" not in said, (number, request, said)
    assert not bad, bad
    assert serving.service.session._calls == calls
    assert not (serving.service.directory / "checkpoints").exists()
    # What is right is still answered, with the next number that no wrong request has used.
    number = serving.service.requests._lines[model].next
    status, answer = ask(
        serving, "POST", "/api/v1/forward_backward", message(model, number).SerializeToString(), PROTOBUF
    )
    assert status == 200, answer
    again = ask(serving, "POST", "/api/v1/forward_backward", message(model, number).SerializeToString(), PROTOBUF)
    assert json.loads(again[1]) == json.loads(answer)
    other = message(model, number, weights=[0.5, 0.5]).SerializeToString()
    status, refused = ask(serving, "POST", "/api/v1/forward_backward", other, PROTOBUF)
    assert status == 400
    assert "another request was sent with this number" in json.loads(refused)["detail"]
    request_id = json.loads(answer)["request_id"]
    status, _ = ask(serving, "POST", "/api/v1/retrieve_future", json.dumps({"request_id": request_id}).encode(), JSON)
    assert status == 200
    assert serving.service.session._calls == calls + 1  # the replayed one did not run again


def test_samples_that_a_killed_server_was_drawing_are_asked_for_anew(serving: Serving) -> None:
    for request, status in (("a:sample:0:1", 410), ("a:train:0:1", 404)):
        body = json.dumps({"request_id": request}).encode()
        assert ask(serving, "POST", "/api/v1/retrieve_future", body, JSON)[0] == status


def test_too_much_is_refused_and_comes_later(serving: Serving) -> None:
    session = asked(serving, "create_session")["session_id"]
    model = asked(serving, "create_model", session_id=session, model_seq_id=0, base_model=BASE)["model_id"]
    for number in range(2, AHEAD + 1):  # number 1 does not come, so none of them runs
        body = message(model, number).SerializeToString()
        assert ask(serving, "POST", "/api/v1/forward_backward", body, PROTOBUF)[0] == 200
    body = message(model, AHEAD + 1).SerializeToString()
    assert ask(serving, "POST", "/api/v1/forward_backward", body, PROTOBUF)[0] == 429
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=30)
    connection.putrequest("POST", "/api/v1/forward_backward")
    connection.putheader("Content-Length", str(MOST_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413


def test_a_server_that_others_can_reach_needs_a_token(serving: Serving) -> None:
    with pytest.raises(SpecError, match="can be reached from other machines, and no token is set"):
        make_app(serving.service, "0.0.0.0", None)
    guarded = Serving(serving.service, "tml-secret")
    try:
        for key in ({}, {"x-api-key": "tml-other"}, {"x-api-key": ""}):
            assert ask(guarded, "POST", "/api/v1/create_session", b"{}", {**JSON, **key})[0] == 401
        assert ask(guarded, "POST", "/api/v1/create_session", b"{}", {**JSON, "x-api-key": "tml-secret"})[0] == 200
    finally:
        guarded.stop()
