"""The verbs of the Tinker API on one session of the runtime; ``server`` has their HTTP."""

from __future__ import annotations

import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import CheckpointError, RaypipeError, RunError, SpecError
from raypipe.observe.run_dir import CALLS
from raypipe.runtime.recovery.failure import describe, own_error
from raypipe.runtime.session.call_data import Kind, check
from raypipe.runtime.session.session import QUEUED, Call, Outputs, Session, Updated, check_adam
from raypipe.runtime.session.session_worker import AdamW
from raypipe.runtime.session.slots import Adapters
from raypipe.service import run_files
from raypipe.service.adapters import adapters_of, check_eps, check_loaded
from raypipe.service.futures import Accepted, Answer, GoneError, Queued, Requests, digest_of
from raypipe.service.run_files import KINDS, Checkpoints, Journal, SinceUpdate, UpdateRows
from raypipe.service.sampling import Sampler, SampleRequest
from raypipe.service.wire import data_of, options_of, output_bytes, read_request, samples_bytes

SESSION_S = 60.0
"""A session whose client has not been heard of for so long ends; clients send a heartbeat every 10 s."""
MOST_SESSIONS = 256
JOINING = 4
"""Calls that are queued with the workers where those of several models can run in one pass."""


@dataclass(slots=True)
class TrainedModel:
    """A model that a client trains."""

    id: str
    session: str
    slot: int
    """Of the runtime's session."""
    adapters: Adapters
    journal: Journal
    kept: int = -1
    """The last request that its snapshot had when the server came back."""
    steps: int = 0
    done: SinceUpdate = field(default_factory=SinceUpdate)


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
        self.requests = Requests(failed, self._wait_for_room, session.together)
        self.sampler = sampler
        self._sampling = ThreadPoolExecutor(1, "raypipe-sample")
        self._clients: dict[str, Client] = {}
        self._models: dict[str, TrainedModel] = {}
        self._lock = threading.Lock()
        self._start = directory / "start"
        """Weights and no optimizer state: what a new model begins with."""
        self.checkpoints = Checkpoints(directory)
        self.rows = UpdateRows(directory)
        self.returning = False
        """Whether requests are those of a server that was killed, which have been accepted before."""

    def begin(self, again: bool = False) -> None:
        """Keep the start values of the weights, for models to begin with; ``again``: where they may be kept already."""
        (self.directory / CALLS).mkdir(exist_ok=True)
        if not (again and self._start.exists()):
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
            run_files.begin_session(self.directory, name)
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
        now = -math.inf if self.returning else time.monotonic()
        for name in [name for name, client in self._clients.items() if now - client.heard_at > SESSION_S]:
            self._end(name)

    def _end(self, session: str) -> None:
        client = self._client(session)
        run_files.end_session(self.directory, session)
        self.requests.close_lines(session, client.models)
        for one in client.samplers.values():
            if one.path is None and one.folder != self._start:
                shutil.rmtree(one.folder, ignore_errors=True)
        for name in client.models:
            slot = self._models.pop(name).slot
            self.rows.forget(name)
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
        adapters = adapters_of(asked.lora_config, self.rank, self._start)
        check_optimizer(asked.optimizer_config)
        return self._make(asked, body, adapters, None)

    def _check_base(self, name: str | None) -> None:
        if name is not None and name != self.base:
            raise SpecError("base_model", f'"{name}" is not served here', f'use "{self.base}"')

    def _make(self, asked: Any, body: bytes, adapters: Adapters, loads: Path | None) -> tuple[str, str]:
        """Begin a model with a checkpoint, or with the base model; return the request's id and the model's."""
        name, kind = f"{asked.session_id}:train:{asked.model_seq_id}", asked.type
        with self._lock:
            client = self._client(asked.session_id)
            model = self._models.get(name)
            if model is None:
                taken = {one.slot for one in self._models.values()}
                if len(taken) >= self.most:
                    why = f"this server has {self.most} models at once, and others have them until their sessions end"
                    raise SpecError("create_model", why, "end a session, or serve with more --models")
                slot = min(set(range(self.most)) - taken)
                model = self._add(client, Journal.of(self.directory, name, slot, adapters))
            if loads is None:
                load = partial(self.session.load, self._start, False, model.slot, lasting=True, adapters=adapters)
            else:
                load = partial(self.session.load, model.journal.pinned(0), asked.optimizer, model.slot, lasting=True)
            finish = lambda _: Answer({"type": kind, "model_id": name, "path": None})  # noqa: E731
            return self._accept(model, 0, kind, body, load, finish, loads)

    def _add(self, client: Client, of: Journal) -> TrainedModel:
        model = self._models[of.name] = TrainedModel(of.name, of.name.partition(":")[0], of.slot, of.adapters, of)
        client.models.append(model.id)
        return model

    def _record(
        self, model: TrainedModel, number: int, verb: str, body: bytes, loads: Path | None = None
    ) -> Callable[[], None]:
        """Return what writes a request down that was not accepted before."""
        if self.returning:
            return lambda: None
        return partial(model.journal.add, number, verb, body, loads)

    def _note(self, model: TrainedModel, number: int, updates: int) -> bytes:
        """Return the note of a snapshot after a request; forget what the snapshot before it has and nobody asks for."""
        asked_for = self.requests.wait_for(model.id, number)
        if model.journal.lost is not None:
            raise model.journal.lost
        if (kept := run_files.snapshots(self.session.directory).get(model.id)) is not None:
            model.journal.drop(min(kept.number, asked_for - 1))
        return run_files.note_of(model.id, number, updates)

    def restore(self, session: str) -> list[TrainedModel]:
        """Bring a session back that a server had which was killed; return its models, with the state of their newest
        snapshots. What came after these is to be asked for again, with ``returning``."""
        client = self._clients[session] = Client(time.monotonic())
        for name, about in run_files.samplers(self.directory, session).items():
            client.samplers[name] = Sampled(name, Path(about["folder"]), about["path"])
        models = []
        for found in run_files.models(self.directory, session):
            model = self._add(client, found)
            models.append(model)
            kept = run_files.snapshots(self.session.directory).get(model.id)
            if kept is not None:
                model.kept, model.steps = kept.number, kept.updates
                self.requests.restore(model.id, session, kept.number, found.answers(kept.number))
                load = partial(self.session.load, kept.folder, True, model.slot, lasting=True, updates=kept.updates)
                self.requests.then(load, model.id)
        return models

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
            self.requests.refuse(model.id, number, self._record(model, number, run_files.REFUSED, b""))
            raise

    def _accept(
        self,
        model: TrainedModel,
        number: int,
        verb: str,
        body: bytes,
        start: Callable[[], Queued],
        finish: Callable[[Any], Answer],
        loads: Path | None = None,
        joins: tuple[Kind, Call] | None = None,
    ) -> tuple[str, str]:
        digest, record = digest_of(body), self._record(model, number, verb, body, loads)
        keep, name = partial(model.journal.add_answer, number, digest), f"{model.id}:{number}"
        one = Accepted(name, model.session, digest, start, finish, len(body), record, keep, joins)
        accept = self.requests.accept if number else self.requests.accept_first
        return accept(model.id, one), model.id

    # Calls.

    def _wait_for_room(self) -> None:
        """Wait until another call should be queued; calls of other models that come meanwhile may join it."""
        self.session.wait_for_room(JOINING if self.session.mixes and len(self._models) > 1 else QUEUED)

    def forward_backward(self, body: bytes) -> tuple[str, str]:
        """Accept a ``forward_backward`` or forward; return the request's id and the model's.

        Raises:
            SpecError: the request is wrong; nothing of it runs.
        """
        request = read_request(body)
        with self._numbered(request) as (model, number):
            data, loss, options = data_of(request), request.loss_fn, options_of(request)
            check(data, loss, options, self.session.limits)
        kind: Kind = "forward" if request.forward_only else "backward"
        call = Call(data, loss, options, model.slot)

        def finish(outputs: Outputs) -> Answer:
            model.done.add(outputs, not request.forward_only)
            return Answer(protobuf=output_bytes(outputs.logprobs, {"loss:sum": outputs.loss_sum}))

        start = lambda: self.session.together(kind, [call])[0]  # noqa: E731
        return self._accept(model, number, "forward_backward", body, start, finish, joins=(kind, call))

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
            check_eps(model.adapters, self.rank, adam.eps)

        def finish(updated: Updated) -> Answer:
            self.rows.add(model.id, model.done, updated, adam.lr, self.requests.waiting(model.id))
            model.steps, model.done = updated.step, SinceUpdate()
            return Answer({"type": "optim_step", "metrics": {"grad_norm": updated.grad_norm, "step": model.steps}})

        note = partial(self._note, model, number)
        start = partial(self.session.optim_step, adam, model.slot, note)
        return self._accept(model, number, asked.type, body, start, finish)

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
            overwrites = getattr(asked, "overwrite", False) or self.returning
            folder, path = self.checkpoints.begun(model.id, kind, name, overwrites)

        def finish(saved: Path) -> Answer:
            about = {"base_model": self.base, "model_id": model.id, "steps": model.steps}
            about["adapters"] = model.adapters[:2]
            self.checkpoints.end(saved, about, asked.ttl_seconds)
            if sampler is None:
                return Answer({"type": asked.type, "path": path})
            made = self._sampler_of(model.session, sampler, saved, None)
            return Answer({"type": asked.type, "sampling_session_id": made.id})

        return self._accept(model, number, asked.type, body, lambda: self.session.save(folder, model.slot), finish)

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
            loads, adapters = self._loaded(asked.path)
            return self._make(asked, body, adapters, loads)
        with self._numbered(asked) as (model, number):
            loads, adapters = self._loaded(asked.path)
            if not self.returning:
                check_loaded(model.adapters, adapters, asked.path)
        path, with_optimizer, folder = asked.path, asked.optimizer, model.journal.pinned(number)
        return self._accept(
            model,
            number,
            asked.type,
            body,
            lambda: self.session.load(folder, with_optimizer, model.slot, lasting=True),
            lambda _: Answer({"type": "load_weights", "path": path, "model_id": model.id}),
            loads,
        )

    def _loaded(self, path: str) -> tuple[Path, Adapters]:
        """Return the folder of a checkpoint to load, and its adapters; where a request returns that was accepted
        before, both are known."""
        if self.returning:
            return Path(), Adapters(0)
        folder = self.checkpoints.saved(path)
        return folder, Adapters(*self.checkpoints.about(folder)["adapters"])

    # Samples.

    def create_sampler(self, asked: Any) -> str:
        """Begin to sample from a checkpoint or the base model; return the id to do so.

        Raises:
            SpecError: there is no such checkpoint, or no sampling here.
        """
        self.heard(asked.session_id)
        self._check_base(asked.base_model)
        folder = self._start if asked.model_path is None else self.checkpoints.saved(asked.model_path)
        return self._sampler_of(asked.session_id, asked.sampling_session_seq_id, folder, asked.model_path).id

    def _check_samples(self) -> None:
        if self.sampler is None:
            why = "this server samples from models of transformers alone"
            raise SpecError("create_sampling_session", why, "serve a job with model.hf, or sample elsewhere")

    def _sampler_of(self, session: str, number: int, folder: Path, path: str | None) -> Sampled:
        self._check_samples()
        made = Sampled(f"{session}:sample:{number}", folder, path)
        with self._lock:
            samplers = self._client(session).samplers
            if made.id not in samplers:
                run_files.add_sampler(self.directory, made.id, {"folder": str(folder), "path": path})
            return samplers.setdefault(made.id, made)

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

        folder = result.folder if result.path is None else self.checkpoints.saved(result.path)

        def work() -> Answer:
            return Answer(protobuf=samples_bytes(*engine.sample(folder, asked)))

        session = sampler.partition(":")[0]
        one = Accepted(f"{sampler}:{number}", session, digest_of(body), _unused, _unused, len(body))
        return self.requests.accept_aside(one, work, self._sampling)


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
