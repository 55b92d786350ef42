"""Files of a server's run: accepted requests, checkpoints of its models, and a row of metrics an update.

With the requests, a server that was killed comes back with all that it has promised. A client's session is a folder,
each of its models a folder in that with a ``Journal``: a request is in it before the client hears of its id, and its
answer before the client can ask for it. A snapshot of a model has a note beside it: the
last request that is in it. A server that comes back loads the snapshots and does again what came after them; sessions
are deterministic, so results and weights are the same bits, and an update is in them once.

What is written outlasts the process, however it ends. It is not forced to the disk: a node that loses power may lose
the newest requests, and with them updates that clients know of.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import CheckpointError, RunError, SpecError
from raypipe.files import link_or_copy, write_whole
from raypipe.job.spec import JobSpec
from raypipe.launch.run_directory import check_model, saved_job
from raypipe.observe.run_dir import CALLS as FOLDER
from raypipe.observe.run_dir import CHECKPOINTS
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.observe.run_record import model_name
from raypipe.runtime.session.session import KEPT_NAME, NOTE, Outputs, Updated
from raypipe.runtime.session.slots import Adapters
from raypipe.service.futures import Answer, Ended

REFUSED = "refused"
"""In place of a verb: a number that a wrong request has used."""
EACH = 128
"""Requests and answers of one file of a journal."""
PIN = "from"
"""A folder with the checkpoint that a request loads, as it was when the request was accepted."""


class WrittenRequest(NamedTuple):
    """A request that was accepted."""

    number: int
    verb: str
    body: bytes


def check_served(job: JobSpec, directory: Path, say: Callable[[str], None]) -> list[str]:
    """Check that a directory holds a run of the same server, which can come back; see ``prepare_run``.

    Raises:
        SpecError: it does not, or what calls come to would differ.
    """
    if not (directory / FOLDER).is_dir():
        raise SpecError(str(directory), "holds no run of raypipe serve", "start without --resume, in a new --run-dir")
    check_model(job, directory)
    saved, asked = saved_job(directory).train, job.train
    for key in ("seed", "dtype", "decay", "batch"):
        if getattr(saved, key) != getattr(asked, key):
            why = f"is {getattr(asked, key)}, and was {getattr(saved, key)} in {directory}"
            raise SpecError(f"train.{key}", why, "resume with what was served, or start in a new --run-dir")
    return []


def begin_session(directory: Path, session: str) -> None:
    """Write down a session."""
    (directory / FOLDER / session).mkdir(parents=True)


def end_session(directory: Path, session: str) -> None:
    """Remove what is written of a session."""
    gone = directory / FOLDER / f".{session}"
    (directory / FOLDER / session).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sessions(directory: Path) -> list[str]:
    """Return the sessions that there were; what was left of others is removed."""
    for left in (directory / FOLDER).glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    return sorted(folder.name for folder in (directory / FOLDER).glob("*"))


def models(directory: Path, session: str) -> Iterator[Journal]:
    """Return the journals of a session's models; of one that the client was not told of, what is left is removed."""
    for folder in sorted((directory / FOLDER / session).glob("train.*")):
        journal = Journal.found(folder)
        if journal is None:
            shutil.rmtree(folder)
        else:
            yield journal


def add_sampler(directory: Path, name: str, about: Mapping[str, Any]) -> None:
    """Write down what a client samples from, ``SESSION:sample:NUMBER``."""
    session, _, number = name.split(":")
    write_whole(directory / FOLDER / session / f"sample.{number}", json.dumps(about))


def samplers(directory: Path, session: str) -> dict[str, dict[str, Any]]:
    """Return what the client of a session sampled from, by name."""
    found = [file for file in (directory / FOLDER / session).glob("sample.*") if file.name.count(".") == 1]
    return {f"{session}:sample:{file.name.partition('.')[2]}": json.loads(file.read_bytes()) for file in found}


class Journal:
    """The requests of a model and their answers, in files that grow by one write for each.

    A file goes when a snapshot has all that is in it. A process that is killed as it writes leaves a part, of which no
    client knows: that ends its file, and whoever comes back begins another one.

    Args:
        folder: of the model, ``CALLS/SESSION/train.NUMBER.SLOT``.
        adapters: of the model.
    """

    def __init__(self, folder: Path, adapters: Adapters) -> None:
        self.folder, self.adapters = folder, adapters
        self._files: list[tuple[Path, list[int]]] = []
        """Each with the numbers of its requests and answers. The first has what made the model, and stays."""
        self._room = 0
        """Of the newest file."""
        self.lost: OSError | None = None
        """Why an answer is not there."""
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: Path, name: str, slot: int, adapters: Adapters) -> Journal:
        """Return the journal of a new model, ``SESSION:train:NUMBER``."""
        session, _, number = name.split(":")
        return cls(directory / FOLDER / session / f"train.{number}.{slot}", adapters)

    @classmethod
    def found(cls, folder: Path) -> Journal | None:
        """Return the journal in a folder; None where it has not begun."""
        files = [file for file in sorted(folder.glob("[0-9]*")) if file.is_file()]
        first = next(_records(files[0]), None) if files else None
        if first is None:
            return None
        made = cls(folder, Adapters(*first[0]["adapters"]))
        made._files = [(file, [about["number"] for about, _ in _records(file)]) for file in files]
        return made

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return f"{self.folder.parent.name}:train:{self.folder.name.split('.')[1]}"

    @property
    def slot(self) -> int:
        """Return the slot of the model."""
        return int(self.folder.name.split(".")[2])

    def add(self, number: int, verb: str, body: bytes, loads: Path | None = None) -> None:
        """Write down a request.

        Args:
            number: of the request.
            verb: of the API.
            body: as it came.
            loads: the checkpoint that it loads, which may be removed or overwritten before it is done again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if loads is not None:
            pin = self.pinned(number)
            shutil.rmtree(pin, ignore_errors=True)
            shutil.copytree(loads, pin, copy_function=link_or_copy)
        begins = {} if number else {"adapters": self.adapters}
        self._append({"number": number, "verb": verb, **begins}, body)

    def add_answer(self, number: int, digest: str, ended: Ended) -> None:
        """Write down how a request has ended; where that fails, no snapshot can take the request's place any more."""
        kind, body = _plain(ended)
        try:
            self._append({"number": number, "digest": digest, "kind": kind}, body)
        except OSError as error:  # the disk is full, or the session has ended
            self.lost = error

    def _append(self, about: dict[str, Any], body: bytes) -> None:
        record = json.dumps({**about, "bytes": len(body)}).encode() + b"\n" + body
        with self._lock:
            if not self._room:
                after = int(self._files[-1][0].name) + 1 if self._files else 0
                self._room = EACH if after else 1
                self._files.append((self.folder / f"{after:08}", []))
            path, numbers = self._files[-1]
            with path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    if file.write(record) != len(record):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                except OSError:
                    file.truncate(end)  # what comes next could not be read behind it
                    raise
            numbers.append(about["number"])
            self._room -= 1

    def pinned(self, number: int) -> Path:
        """Return where the checkpoint is that a request loads."""
        return self.folder / f"{number:08}.{PIN}"

    def requests(self, after: int = -1) -> list[WrittenRequest]:
        """Return the requests after one of them, in order."""
        found = [(about, body) for file, _ in self._files for about, body in _records(file) if "verb" in about]
        written = [WrittenRequest(about["number"], about["verb"], body) for about, body in found]
        return sorted(one for one in written if one.number > after)

    def answers(self, up_to: int) -> dict[int, tuple[str, Ended]]:
        """Return digest and answer of the requests up to one of them, by number."""
        found = [(about, body) for file, _ in self._files for about, body in _records(file) if "kind" in about]
        return {
            about["number"]: (about["digest"], _ended(about["kind"], body))
            for about, body in found
            if about["number"] <= up_to
        }

    def drop(self, number: int) -> None:
        """Remove the files that go up to a request that a snapshot has; what made the model stays."""
        with self._lock:
            for old in [old for old in self._files[1:-1] if max(old[1], default=0) <= number]:
                self._files.remove(old)
                old[0].unlink(missing_ok=True)
        for pin in self.folder.glob(f"*.{PIN}"):
            if int(pin.name.partition(".")[0]) <= number:
                shutil.rmtree(pin, ignore_errors=True)


def _records(file: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Return what is whole in a file: what is said of each, and its body."""
    with file.open("rb") as content:
        while (line := content.readline()).endswith(b"\n"):
            about = json.loads(line)
            if len(body := content.read(about["bytes"])) < about["bytes"]:
                return
            yield about, body


class ModelSnapshot(NamedTuple):
    """A snapshot of a model."""

    folder: Path
    number: int
    """The last request that is in it."""
    updates: int


def note_of(model: str, number: int, updates: int) -> bytes:
    """Return the note of a snapshot."""
    return json.dumps({"model": model, "number": number, "updates": updates}).encode()


def snapshots(directory: Path) -> dict[str, ModelSnapshot]:
    """Return the newest snapshot of each model in a session's directory, by the model's name."""
    found = {}
    folders = directory.glob(KEPT_NAME.format(slot="*", number="*"))
    for folder in sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2])):
        note = json.loads((folder / NOTE).read_bytes())
        found[note["model"]] = ModelSnapshot(folder, note["number"], note["updates"])
    return found


def _plain(ended: Ended) -> tuple[str, bytes]:
    if isinstance(ended, Answer):
        return ("bytes", ended.protobuf) if ended.json is None else ("json", json.dumps(ended.json).encode())
    kind = "user" if isinstance(ended, SpecError | CheckpointError) else "server"
    return kind, json.dumps([*map(str, ended.args[:3])]).encode()


def _ended(kind: str, body: bytes) -> Ended:
    if kind == "bytes":
        return Answer(protobuf=body)
    if kind == "json":
        return Answer(json.loads(body))
    return (SpecError if kind == "user" else RunError)(*json.loads(body))


# Checkpoints of its models (``checkpoints/MODEL/KIND/NAME``).
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of checkpoints."""
SCHEME = "tinker://"
KINDS = ("weights", "sampler_weights")
"""Folders of a model's checkpoints, as they are called in its paths."""
ABOUT = "about.json"


class Checkpoints:
    """The checkpoints below the directory of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / CHECKPOINTS

    def _folder(self, model: str, kind: str, name: str) -> Path:
        return self._directory / model.replace(":", "-") / kind / name

    def begun(self, model: str, kind: str, name: str, overwrites: bool) -> tuple[Path, str]:
        """Return the folder and the path of a checkpoint that is to be written.

        Raises:
            SpecError: the name is none, or there is such a checkpoint.
        """
        if not NAME.fullmatch(name):
            why = f"{json.dumps(name[:60])} is no name of a checkpoint"
            raise SpecError("path", why, "use letters, digits, dots, dashes and underscores")
        folder = self._folder(model, kind, name)
        if folder.exists() and not overwrites:
            raise SpecError("path", f"there is a checkpoint {name} already", "use another name, or overwrite")
        return folder, f"{SCHEME}{model}/{kind}/{name}"

    def end(self, folder: Path, about: dict[str, Any], ttl_s: int | None) -> None:
        """Note what a checkpoint is that has been written, and until when it stays; remove those that have expired."""
        for old in self._directory.glob(f"*/*/*/{ABOUT}"):
            if _expired(old.parent):
                shutil.rmtree(old.parent, ignore_errors=True)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        write_whole(folder / ABOUT, json.dumps({**about, "expires_at": expires_at}))

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

    def about(self, folder: Path) -> dict[str, Any]:
        """Return what ``end`` noted."""
        found: dict[str, Any] = json.loads((folder / ABOUT).read_bytes())
        return found


def _expired(folder: Path) -> bool:
    at = json.loads((folder / ABOUT).read_text()).get("expires_at")
    return at is not None and time.time() > at


@dataclass(slots=True)
class SinceUpdate:
    """Calls of a model since its last update."""

    since: float = field(default_factory=time.monotonic)
    calls: int = 0
    tokens: int = 0
    loss_sum: float = 0.0

    def add(self, outputs: Outputs, trains: bool) -> None:
        """Add a call on data."""
        self.calls += 1
        self.tokens += sum(map(len, outputs.logprobs))
        if trains:
            self.loss_sum += outputs.loss_sum


class UpdateRows:
    """Adds a row for each update; one that a server which was killed has made already has its row.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path) -> None:
        written = read_rows(directory / METRICS) if (directory / METRICS).exists() else []
        self._written = Counter(row.get("model") for row in written)
        self._log = RunLog(directory)
        self._count = len(written)
        self._newest: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, model: str, done: SinceUpdate, updated: Updated, rate: float, queue: int) -> None:
        """Add an update of a model, which had ``done`` this since the last one and has ``queue`` requests waiting."""
        if updated.step <= self._written[model]:
            return
        self._count += 1
        step_s = max(1e-9, time.monotonic() - done.since)
        row = {
            "step": self._count,
            "model": model,
            "loss": done.loss_sum,
            "grad_norm": updated.grad_norm,
            "lr": rate,
            "step_s": step_s,
            "tokens_per_s": done.tokens / step_s,
            "bubble_ratio": updated.bubble_ratio,
            "calls": done.calls,
            "queue": queue,
            "between_calls": updated.between_calls,
        }
        self._log.metric(row)
        with self._lock:
            self._newest[model] = row

    def forget(self, model: str) -> None:
        """Forget a model that there is no more."""
        with self._lock:
            self._newest.pop(model, None)

    def newest(self) -> dict[str, dict[str, Any]]:
        """Return the newest row of each model that there is, by its short name."""
        with self._lock:
            return {model_name(row): row for row in self._newest.values()}
