"""The verbs of the Tinker API on one session of the runtime; ``server`` has their HTTP."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import CheckpointError, RaypipeError, RunError, SpecError
from raypipe.files import write_whole
from raypipe.observe.run_log import RunLog
from raypipe.observe.run_record import model_name
from raypipe.runtime.recovery.failure import describe, own_error
from raypipe.runtime.session.call_data import check
from raypipe.runtime.session.session import Outputs, Session, Updated, check_adam
from raypipe.runtime.session.session_worker import AdamW
from raypipe.service.futures import Accepted, Answer, GoneError, Requests, digest_of
from raypipe.service.sampling import Sampler, SampleRequest
from raypipe.service.wire import data_of, options_of, output_bytes, read_request, samples_bytes

SESSION_S = 60.0
"""A session whose client has not been heard of for so long ends; clients send a heartbeat every 10 s."""
MOST_SESSIONS = 256
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of checkpoints."""
SCHEME = "tinker://"
KINDS = ("weights", "sampler_weights")
"""Folders of a model's checkpoints, as they are called in its paths."""
ABOUT = "about.json"


@dataclass(slots=True)
class TrainedModel:
    """A model that a client trains."""

    id: str
    session: str
    slot: int
    """Of the runtime's session."""
    steps: int = 0
    since: float = field(default_factory=time.monotonic)
    """The time of its last update."""
    calls: int = 0
    """Since then, as are the others."""
    tokens: int = 0
    loss_sum: float = 0.0


class Sampled(NamedTuple):
    """Weights that a client samples from."""

    id: str
    folder: Path
    path: str | None
    """Of the checkpoint; None for the base model, and for weights that were saved for this alone."""


@dataclass(slots=True)
class Client:
    """A session of a client."""

    heard_at: float
    models: list[str] = field(default_factory=list)
    samplers: dict[str, Sampled] = field(default_factory=dict)
    """By id."""


class Service:
    """Sessions, models and checkpoints of the clients of one server.

    Args:
        session: the runtime's; each model has a slot of it.
        base: the name of the base model.
        directory: the run's; checkpoints are in ``checkpoints/MODEL/KIND/NAME``.
        rank: of the job's adapters (``model.lora``); 0 where all weights are trained.
        most: models that there may be at once; each has what is trained, its gradients and the optimizer's state.
        sampler: samples from checkpoints; None where nothing does.
    """

    def __init__(
        self,
        session: Session,
        base: str,
        directory: Path,
        rank: int = 0,
        most: int = 1,
        sampler: Sampler | None = None,
    ) -> None:
        self.session, self.base, self.directory, self.rank, self.most = session, base, directory, rank, most
        self.requests = Requests(failed)
        self.sampler = sampler
        self._sampling = ThreadPoolExecutor(1, "raypipe-sample")
        self._clients: dict[str, Client] = {}
        self._models: dict[str, TrainedModel] = {}
        self._lock = threading.Lock()
        self._start = directory / "start"
        """Weights and no optimizer state: what a new model begins with."""
        self._log = RunLog(directory)
        self._updates = 0
        self._newest: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Keep the start values of the weights, for models to begin with."""
        shutil.rmtree(self._start, ignore_errors=True)
        self.session.save(self._start).result()

    # Sessions.

    def create_session(self) -> str:
        """Begin a session of a client, and return its id.

        Raises:
            SpecError: there are too many.
        """
        with self._lock:
            self._expire()
            if len(self._clients) >= MOST_SESSIONS:
                raise SpecError("create_session", f"{MOST_SESSIONS} sessions are open", "end some, or wait")
            name = uuid.uuid4().hex
            self._clients[name] = Client(time.monotonic())
            return name

    def heard(self, session: str) -> None:
        """Note that a client lives.

        Raises:
            GoneError: its session has ended.
        """
        with self._lock:
            self._expire()
            self._client(session).heard_at = time.monotonic()

    def end_session(self, session: str) -> None:
        """End a session, and give up its models."""
        with self._lock:
            self._end(session)

    def expire(self) -> None:
        """End the sessions whose clients have not been heard of for ``SESSION_S``."""
        with self._lock:
            self._expire()

    def _client(self, session: str) -> Client:
        client = self._clients.get(session)
        if client is None:
            raise GoneError("session_id", "there is no such session, or it has ended", "create another one")
        return client

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, client in self._clients.items() if now - client.heard_at > SESSION_S]:
            self._end(name)

    def _end(self, session: str) -> None:
        client = self._client(session)
        self.requests.close_lines(session, client.models)
        for one in client.samplers.values():
            if one.path is None and one.folder != self._start:
                shutil.rmtree(one.folder, ignore_errors=True)
        for name in client.models:
            slot = self._models.pop(name).slot
            self._newest.pop(name, None)
            self.requests.then(partial(self.session.free, slot))
        del self._clients[session]

    # Models.

    def create_model(self, asked: Any, body: bytes) -> tuple[str, str]:
        """Begin a model with the weights of the base model; return the request's id and the model's.

        Raises:
            GoneError: the session has ended.
            SpecError: it asks for what this server has not.
        """
        self.heard(asked.session_id)
        self._check_base(asked.base_model)
        lora = asked.lora_config
        rank = 0 if lora is None else lora.rank
        if rank != self.rank:
            trains = f"adapters of rank {self.rank}" if self.rank else "all weights, without adapters"
            why = f"has rank {rank}, and this server trains {trains}"
            raise SpecError("lora_config", why, f"ask for rank {self.rank}, or serve a job with another model.lora")
        if lora is not None and rank and not (lora.train_mlp and lora.train_attn and lora.train_unembed):
            why = "chooses layers, and which ones have adapters is the job's model.lora.target_modules"
            raise SpecError("lora_config", why, "leave train_mlp, train_attn and train_unembed as they are")
        check_optimizer(asked.optimizer_config)
        return self._make(asked, body, self._start, with_optimizer=False)

    def _check_base(self, name: str | None) -> None:
        if name is not None and name != self.base:
            raise SpecError("base_model", f'"{name}" is not served here', f'use "{self.base}"')

    def _make(self, asked: Any, body: bytes, folder: Path, with_optimizer: bool) -> tuple[str, str]:
        name, kind = f"{asked.session_id}:train:{asked.model_seq_id}", asked.type
        with self._lock:
            client = self._client(asked.session_id)
            model = self._models.get(name)
            if model is None:
                taken = {one.slot for one in self._models.values()}
                if len(taken) >= self.most:
                    why = f"this server has {self.most} models at once, and others have them until their sessions end"
                    raise SpecError("create_model", why, "end a session, or serve with more --models")
                model = TrainedModel(name, asked.session_id, min(set(range(self.most)) - taken))
                client.models.append(model.id)
                self._models[model.id] = model
            slot = model.slot
            one = Accepted(
                f"{model.id}:0",
                asked.session_id,
                digest_of(body),
                lambda: self.session.load(folder, with_optimizer, slot, lasting=folder == self._start),
                lambda _: Answer({"type": kind, "model_id": name, "path": None}),
                len(body),
            )
            return self.requests.accept_first(model.id, one), model.id

    def model(self, name: str) -> TrainedModel:
        """Return a model.

        Raises:
            GoneError: there is none.
        """
        with self._lock:
            result = self._models.get(name)
        if result is None:
            raise GoneError("model_id", "there is no such model, or its session has ended", "create another one")
        self.heard(result.session)
        return result

    @contextmanager
    def _numbered(self, asked: Any) -> Iterator[tuple[TrainedModel, int]]:
        """Yield a request's model and number; one that the block refuses has used its number, and no other waits."""
        model, number = self.model(asked.model_id), asked.seq_id
        if number is None or number < 1:
            raise SpecError("seq_id", f"is {number}", "number the requests of a model from 1")
        try:
            yield model, number
        except SpecError:
            self.requests.refuse(model.id, number)
            raise

    def _accept(self, model: TrainedModel, number: int, body: bytes, start: Any, finish: Any) -> tuple[str, str]:
        one = Accepted(f"{model.id}:{number}", model.session, digest_of(body), start, finish, len(body))
        return self.requests.accept(model.id, number, one), model.id

    # Calls.

    def forward_backward(self, body: bytes) -> tuple[str, str]:
        """Accept a ``forward_backward`` or forward; return the request's id and the model's.

        Raises:
            SpecError: the request is wrong; nothing of it runs.
        """
        request = read_request(body)
        with self._numbered(request) as (model, number):
            data, loss, options = data_of(request), request.loss_fn, options_of(request)
            check(data, loss, options, self.session.limits)
        queue = self.session.forward if request.forward_only else self.session.forward_backward

        def finish(outputs: Outputs) -> Answer:
            model.calls += 1
            model.tokens += sum(map(len, outputs.logprobs))
            if not request.forward_only:
                model.loss_sum += outputs.loss_sum
            return Answer(protobuf=output_bytes(outputs.logprobs, {"loss:sum": outputs.loss_sum}))

        return self._accept(model, number, body, lambda: queue(data, loss, options, model.slot), finish)

    def optim_step(self, asked: Any, body: bytes) -> tuple[str, str]:
        """Accept an update; return the request's id and the model's.

        Raises:
            SpecError: the request is wrong; nothing of it runs.
        """
        given = asked.adam_params
        clip = given.grad_clip_norm if given.grad_clip_norm > 0 else None
        adam = AdamW(given.learning_rate, (given.beta1, given.beta2), given.eps, given.weight_decay, clip)
        with self._numbered(asked) as (model, number):
            check_adam(adam)

        def finish(updated: Updated) -> Answer:
            model.steps += 1
            self._log_update(model, updated, adam.lr)
            return Answer({"type": "optim_step", "metrics": {"grad_norm": updated.grad_norm, "step": model.steps}})

        return self._accept(model, number, body, lambda: self.session.optim_step(adam, model.slot), finish)

    def _log_update(self, model: TrainedModel, updated: Updated, rate: float) -> None:
        """Add a row to the run's metrics, with the keys of a training step: the calls since the model's last update."""
        self._updates += 1
        now = time.monotonic()
        step_s = max(1e-9, now - model.since)
        row = {
            "step": self._updates,
            "model": model.id,
            "loss": model.loss_sum,
            "grad_norm": updated.grad_norm,
            "lr": rate,
            "step_s": step_s,
            "tokens_per_s": model.tokens / step_s,
            "bubble_ratio": updated.bubble_ratio,
            "calls": model.calls,
            "queue": self.requests.waiting(model.id),
            "between_calls": updated.between_calls,
        }
        self._log.metric(row)
        with self._lock:
            if model.id in self._models:
                self._newest[model.id] = row
        model.since, model.calls, model.tokens, model.loss_sum = now, 0, 0, 0.0

    def newest(self) -> dict[str, dict[str, Any]]:
        """Return the newest row of each model that there is, by its short name."""
        with self._lock:
            return {model_name(row): row for row in self._newest.values()}

    # Checkpoints.

    def save(self, asked: Any, body: bytes, kind: str) -> tuple[str, str]:
        """Accept a save of weights and optimizer state under a name; return the request's id and the model's.

        Raises:
            SpecError: the name is none, or there is such a checkpoint.
        """
        sampler = getattr(asked, "sampling_session_seq_id", None)
        with self._numbered(asked) as (model, number):
            if kind == KINDS[1] and (sampler is None) == (asked.path is None):
                raise SpecError("path", "and sampling_session_seq_id are for one of two uses", "give one of them")
            if sampler is not None:
                self._check_samples()
            name = asked.path if asked.path is not None else f"{number:06}"
            if not NAME.fullmatch(name):
                why = f"{json.dumps(name[:60])} is no name of a checkpoint"
                raise SpecError("path", why, "use letters, digits, dots, dashes and underscores")
            folder = self._folder(model.id, kind, name)
            if folder.exists() and not getattr(asked, "overwrite", False):
                raise SpecError("path", f"there is a checkpoint {name} already", "use another name, or overwrite")
        path = f"{SCHEME}{model.id}/{kind}/{name}"

        def finish(saved: Path) -> Answer:
            about = {"base_model": self.base, "model_id": model.id, "steps": model.steps}
            about["expires_at"] = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
            self._drop_expired()
            write_whole(saved / ABOUT, json.dumps(about).encode())
            if sampler is None:
                return Answer({"type": asked.type, "path": path})
            made = self._sampler_of(model.session, sampler, saved, None)
            return Answer({"type": asked.type, "sampling_session_id": made.id})

        return self._accept(model, number, body, lambda: self.session.save(folder, model.slot), finish)

    def load(self, asked: Any, body: bytes) -> tuple[str, str]:
        """Accept a load, onto a model or as a new one; return the request's id and the model's.

        Raises:
            SpecError: there is no such checkpoint.
        """
        if asked.model_id is None:
            if asked.session_id is None or asked.model_seq_id is None:
                raise SpecError("load_weights", "names neither a model nor a session", "give model_id")
            self.heard(asked.session_id)
            self._check_base(asked.base_model)
            check_optimizer(asked.optimizer_config)
            return self._make(asked, body, self.saved(asked.path), asked.optimizer)
        with self._numbered(asked) as (model, number):
            folder = self.saved(asked.path)
        path, with_optimizer = asked.path, asked.optimizer
        return self._accept(
            model,
            number,
            body,
            lambda: self.session.load(folder, with_optimizer, model.slot),
            lambda _: Answer({"type": "load_weights", "path": path, "model_id": model.id}),
        )

    # Samples.

    def create_sampler(self, asked: Any) -> str:
        """Begin to sample from a checkpoint or the base model; return the id to do so.

        Raises:
            SpecError: there is no such checkpoint, or no sampling here.
        """
        self.heard(asked.session_id)
        self._check_base(asked.base_model)
        folder = self._start if asked.model_path is None else self.saved(asked.model_path)
        return self._sampler_of(asked.session_id, asked.sampling_session_seq_id, folder, asked.model_path).id

    def _check_samples(self) -> None:
        if self.sampler is None:
            why = "this server samples from models of transformers alone"
            raise SpecError("create_sampling_session", why, "serve a job with model.hf, or sample elsewhere")

    def _sampler_of(self, session: str, number: int, folder: Path, path: str | None) -> Sampled:
        self._check_samples()
        made = Sampled(f"{session}:sample:{number}", folder, path)
        with self._lock:
            return self._client(session).samplers.setdefault(made.id, made)

    def sampled(self, sampler: str) -> Sampled:
        """Return what a client samples from.

        Raises:
            GoneError: its session has ended.
        """
        session = sampler.partition(":")[0]
        self.heard(session)
        with self._lock:
            result = self._client(session).samplers.get(sampler)
        if result is None:
            raise GoneError("sampling_session_id", "there is no such sampling session", "create one")
        return result

    def sample(self, sampler: str, number: int | None, asked: SampleRequest, body: bytes) -> str:
        """Accept a request for continuations of a prompt; return the request's id.

        Raises:
            SpecError: it is wrong.
        """
        result, engine = self.sampled(sampler), self.sampler
        assert engine is not None
        engine.check(asked)

        folder = result.folder if result.path is None else self.saved(result.path)

        def work() -> Answer:
            return Answer(protobuf=samples_bytes(*engine.sample(folder, asked)))

        session = sampler.partition(":")[0]
        one = Accepted(f"{sampler}:{number}", session, digest_of(body), _unused, _unused, len(body))
        return self.requests.accept_aside(one, work, self._sampling)

    def _folder(self, model: str, kind: str, name: str) -> Path:
        return self.directory / "checkpoints" / model.replace(":", "-") / kind / name

    def saved(self, path: str) -> Path:
        """Return the folder of a checkpoint by its path, ``tinker://MODEL/weights/NAME``.

        Raises:
            SpecError: there is none, or the path is of another form; nothing outside the run's directory is looked at.
        """
        parts = path.removeprefix(SCHEME).split("/")
        fits = path.startswith(SCHEME) and len(parts) == 3 and parts[1] in KINDS
        if not fits or not NAME.fullmatch(parts[0].replace(":", "-")) or not NAME.fullmatch(parts[2]):
            raise SpecError(
                "path", f"{json.dumps(path[:100])} is no path of a checkpoint", f"use {SCHEME}MODEL/weights/NAME"
            )
        folder = self._folder(*parts)
        if not (folder / ABOUT).is_file() or _expired(folder):
            raise SpecError("path", f"there is no checkpoint {path}", "use a path that save_weights returned")
        return folder

    def _drop_expired(self) -> None:
        """Remove the checkpoints whose ``ttl_seconds`` are over."""
        for about in self.directory.glob(f"checkpoints/*/*/*/{ABOUT}"):
            if _expired(about.parent):
                shutil.rmtree(about.parent, ignore_errors=True)


def _expired(folder: Path) -> bool:
    at = json.loads((folder / ABOUT).read_text()).get("expires_at")
    return at is not None and time.time() > at


def _unused(*_: Any) -> Any:
    raise AssertionError("it needs no worker")


def check_optimizer(config: Mapping[str, Any] | None) -> None:
    """Raise SpecError where a model asks for another optimizer than AdamW."""
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise SpecError("optimizer_config", f"asks for {kind}", "use adamw")


def failed(error: Exception) -> Exception:
    """Return what a client is told of a failure: what raypipe says of its own errors, and of others their kind."""
    cause = own_error(error)
    if isinstance(cause, SpecError | CheckpointError):
        return cause
    if isinstance(cause, RaypipeError):
        return RunError(cause.where, cause.why, cause.fix)
    return RunError("", describe(cause), "see the server's log")
