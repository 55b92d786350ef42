"""The HTTP of the Tinker API (client 0.38) on a ``Service``: requests are checked here, and run by it.

FastAPI has the routes, the checks of bodies and their errors; uvicorn serves them. Ray Serve would add replicas and a
proxy in front of what is one session of one pipeline.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from raypipe.errors import CheckpointError, RaypipeError, SpecError
from raypipe.service import run_files
from raypipe.service.futures import RESTORED_S, BusyError, GoneError
from raypipe.service.sampling import SampleRequest
from raypipe.service.service import Service, TrainedModel
from raypipe.service.wire import PROTOBUF

MOST_BYTES = 64 << 20
"""Largest body of a request, as it comes and unpacked."""
POLL_S = 20.0
"""How long a client that asks for a result waits in one request; it asks again after that."""
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names under which a server on loopback is asked for; a page of the web that has its name point there has another."""
LONGEST = 600
"""Characters of an error: it may quote what was sent."""
RETRY_S = 2
"""When a client is told to come again."""
BUSY_S = 0.1
"""Between two tries of what returns to a server that is full."""


class Body(BaseModel):
    """The body of a request; a field that is not known is refused, and not ignored."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CreateSession(Body):  # noqa: D101
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(Body):  # noqa: D101
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class LoraConfig(Body):  # noqa: D101
    rank: Annotated[int, Field(ge=0)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):  # noqa: D101
    session_id: str
    model_seq_id: Annotated[int, Field(ge=0, lt=1 << 31)]
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class OfModel(Body):  # noqa: D101
    model_id: str
    type: str = ""


class AdamParams(Body):  # noqa: D101
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):  # noqa: D101
    model_id: str
    adam_params: AdamParams
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body):  # noqa: D101
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Body):  # noqa: D101
    model_id: str
    path: str | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    kind: Literal["snapshot"] = "snapshot"
    seq_id: int | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(Body):  # noqa: D101
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSampler(Body):  # noqa: D101
    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=1 << 31)]
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class TextChunk(Body):  # noqa: D101
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):  # noqa: D101
    chunks: list[TextChunk]


class SamplingParams(Body):  # noqa: D101
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Body):  # noqa: D101
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0)]
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False
    type: Literal["sample"] = "sample"


class Retrieve(Body):  # noqa: D101
    request_id: str
    allow_metadata_only: bool = False


Method = Callable[[Service, Any, bytes], tuple[str, str]]
VERBS: Mapping[str, tuple[type[Body], Method]] = {
    "create_model": (CreateModel, Service.create_model),
    "optim_step": (OptimStep, Service.optim_step),
    "save_weights": (SaveWeights, lambda service, asked, body: service.save(asked, body, "weights")),
    "save_weights_for_sampler": (
        SaveForSampler,
        lambda service, asked, body: service.save(asked, body, "sampler_weights"),
    ),
    "load_weights": (LoadWeights, Service.load),
}
"""What asks for a model's calls in JSON, by verb."""


def come_back(service: Service, say: Callable[[str], None]) -> None:
    """Bring back the sessions of a server that was killed: accept again what its models' snapshots do not have."""
    count = again = 0
    service.returning = True
    for session in run_files.sessions(service.directory):
        for model in service.restore(session):
            count += 1
            for written in model.journal.requests(model.kept):
                again += 1
                while not _accepted_again(service, model, written):
                    time.sleep(BUSY_S)
    service.returning = False
    if count:
        say(f"{count} models are back, with {again} requests since their snapshots, which run again")


def _accepted_again(service: Service, model: TrainedModel, written: run_files.WrittenRequest) -> bool:
    """Accept a request that was accepted before; return False if there is no room for it now."""
    number, verb, body = written
    try:
        if verb == run_files.REFUSED:
            service.requests.refuse(model.id, number, lambda: None)
        elif verb == "forward_backward":
            service.forward_backward(body)
        else:
            form, method = VERBS[verb]
            method(service, form.model_validate_json(body), body)
    except BusyError:
        return False
    if verb != run_files.REFUSED:
        service.requests.keep_for(f"{model.id}:{number}", RESTORED_S)
    return True


def make_app(service: Service, host: str, token: str | None, tokenizer: str | None = None) -> FastAPI:
    """Make the application.

    Args:
        service: what it serves.
        host: the address that it listens on.
        token: what clients must send as their API key; None, on loopback only, for any.
        tokenizer: name or directory of the tokenizer that clients are told.

    Raises:
        SpecError: there is no token, and others can reach the address.
    """
    local = is_loopback(host)
    if not local and not token:
        why = f"{host} can be reached from other machines, and no token is set"
        raise SpecError("--host", why, "give one, or use 127.0.0.1")
    app = FastAPI(title="raypipe serve", openapi_url=None)
    app.add_middleware(RequestGuard, token=token, local=local)
    app.exception_handler(RaypipeError)(_answer)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http)
    _add_session_routes(app, service, tokenizer)
    _add_model_routes(app, service)
    _add_sampling_routes(app, service)
    return app


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RequestGuard:
    """The check that every request passes first: who may ask, and how much.

    It is no ``app.middleware("http")``, whose streams between two tasks cost as much as all else that a request costs.
    """

    def __init__(self, app: ASGIApp, token: str | None, local: bool) -> None:
        self._app, self._token, self._local = app, token, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it pass."""
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (self._app if refused is None else refused)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        if self._local and (request.url.hostname or "") not in LOCAL:
            return _error(403, f"this server does not answer for the host {(request.url.hostname or '')[:100]!r}")
        if self._token is not None and request.url.path != "/api/v1/healthz":
            given = request.headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return _error(401, "the API key is not this server's token: set TINKER_API_KEY to it")
        length = request.headers.get("content-length", "")
        if request.method == "POST" and not length.isdigit():
            return _error(411, "a request says how long it is, with Content-Length")
        if length.isdigit() and int(length) > MOST_BYTES:
            return _error(413, f"the request has {length} bytes; this server takes {MOST_BYTES}")
        return None


def _error(status: int, text: str, **headers: str) -> JSONResponse:
    return JSONResponse({"detail": text}, status, headers)


async def _answer(_: Request, error: Exception) -> Response:
    text = " ".join(str(error).split())[:LONGEST]
    if isinstance(error, BusyError):
        return _error(429, text, **{"retry-after": str(RETRY_S)})
    return _error(404 if isinstance(error, GoneError) else 400, text)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")[:100]
    return _error(422, f"{where or 'body'}: {first['msg'][:200]}")


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path", 405: "this path takes another method"}
    return _error(error.status_code, known.get(error.status_code, str(error.detail)[:200]))


async def _body(request: Request) -> bytes:
    """Return the body, unpacked where it is packed."""
    body = await request.body()
    packing = request.headers.get("content-encoding", "identity").lower()
    if packing == "identity":
        return body
    if packing != "zstd":
        raise HTTPException(415, "content encodings are zstd and identity")
    try:
        import zstandard
    except ImportError:
        raise HTTPException(415, "zstd needs a package that is not there: pip install 'raypipe[serve]'") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            found: bytes = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError:
        raise HTTPException(400, "the body is not packed with zstd") from None
    if len(found) > MOST_BYTES:
        raise HTTPException(413, f"the body unpacks to more than {MOST_BYTES} bytes")
    return found


Raw = Annotated[bytes, Depends(_body)]


def _future(accepted: tuple[str, str]) -> dict[str, str]:
    request, model = accepted
    return {"request_id": request, "model_id": model}


def _add_session_routes(app: FastAPI, service: Service, tokenizer: str | None) -> None:
    @app.get("/api/v1/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities")
    def capabilities() -> dict[str, Any]:
        longest = service.session.limits.longest
        about = {"model_name": service.base, "max_context_length": longest, "trainable": True}
        about["sampleable"] = service.sampler is not None
        return {"supported_models": [about]}

    @app.post("/api/v1/client/config")
    def config(_: dict[str, Any]) -> dict[str, Any]:
        return {"parallel_fwdbwd_chunks": False}

    @app.post("/api/v1/client/dynamic_config")
    def dynamic_config(_: dict[str, Any]) -> dict[str, Any]:
        return {}

    @app.post("/api/v1/telemetry")
    def telemetry(_: dict[str, Any]) -> dict[str, str]:
        """Take a client's telemetry, and keep nothing of it: else it would complain."""
        return {"status": "accepted"}

    @app.post("/api/v1/create_session")
    def create_session(asked: CreateSession) -> dict[str, Any]:
        return {"type": "create_session", "session_id": service.create_session()}

    @app.post("/api/v1/session_heartbeat")
    def heartbeat(asked: Heartbeat) -> dict[str, str]:
        service.heard(asked.session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish")
    def finish(session: str) -> dict[str, str]:
        service.end_session(session)
        return {}

    @app.post("/api/v1/get_info")
    def info(asked: OfModel) -> dict[str, Any]:
        model = service.model(asked.model_id)
        data = {"arch": "causal-lm", "model_name": service.base, "tokenizer_id": tokenizer}
        about = {"model_data": data, "model_id": model.id, "model_name": service.base}
        return {"type": "get_info", **about, "is_lora": service.rank > 0, "lora_rank": model.adapters.rank or None}

    @app.post("/api/v1/retrieve_future")
    async def retrieve(asked: Retrieve) -> Response:
        try:
            found = service.requests.find(asked.request_id)
        except GoneError as error:
            if ":sample:" not in asked.request_id:
                raise
            return _error(410, " ".join(str(error).split())[:LONGEST])  # for which clients ask anew
        try:
            result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(found.future)), POLL_S)
        except asyncio.TimeoutError:  # Python 3.10 has two of this name
            again = {"type": "try_again", "request_id": found.id, "queue_state": "active"}
            return JSONResponse(again)
        except RaypipeError as error:
            found.fetched_at = time.monotonic()
            category = "user" if isinstance(error, SpecError | CheckpointError) else "server"
            return JSONResponse({"error": str(error), "category": category})
        found.fetched_at = time.monotonic()
        if result.json is not None:
            return JSONResponse(result.json)
        return Response(result.protobuf, media_type=PROTOBUF)


def _add_sampling_routes(app: FastAPI, service: Service) -> None:
    @app.post("/api/v1/create_sampling_session")
    def create_sampler(asked: CreateSampler) -> dict[str, str]:
        return {"type": "create_sampling_session", "sampling_session_id": service.create_sampler(asked)}

    @app.get("/api/v1/samplers/{sampler}")
    def sampler(sampler: str) -> dict[str, Any]:
        found = service.sampled(sampler)
        return {"sampler_id": found.id, "base_model": service.base, "model_path": found.path}

    @app.post("/api/v1/asample")
    def sample(asked: Sample, body: Raw) -> dict[str, Any]:
        given = asked.sampling_params
        prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
        wanted = SampleRequest(
            prompt,
            asked.num_samples,
            given.max_tokens,
            given.temperature,
            given.top_k,
            given.top_p,
            given.seed,
            given.stop,
            asked.prompt_logprobs,
        )
        request = service.sample(asked.sampling_session_id, asked.seq_id, wanted, body)
        return {"request_id": request, "sample_sequence_ids": [f"{request}:{i}" for i in range(asked.num_samples)]}


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.post("/api/v1/forward_backward")
    def forward_backward(request: Request, body: Raw) -> dict[str, str]:
        if request.headers.get("content-type", "") != PROTOBUF:
            raise HTTPException(415, f"forward_backward takes {PROTOBUF}")
        return _future(service.forward_backward(body))

    for verb, (form, method) in VERBS.items():
        _add_verb(app, service, verb, form, method)


def _add_verb(app: FastAPI, service: Service, verb: str, form: type[Body], method: Method) -> None:
    def accept(asked: Any, body: Any) -> dict[str, str]:
        return _future(method(service, asked, body))

    accept.__annotations__.update(asked=form, body=Raw)  # which FastAPI reads
    app.post(f"/api/v1/{verb}")(accept)
