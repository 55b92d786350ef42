"""Accepted requests on disk, so that a server that was killed comes back with all that it has promised.

A client's session is a folder, each of its models a folder in that, and each request a file that is written before the
client hears of its id. A snapshot of a model has a note beside it: the last request that is in it, and the answers up
to there that a client may still ask for. A server that comes back loads the snapshots and does again what came after
them; sessions are deterministic, so results and weights are the same bits, and an update is in them once.

Files outlast the process, however it ends. They are not forced to the disk: a node that loses power may lose the newest
ones.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import CheckpointError, RunError, SpecError
from raypipe.files import write_whole
from raypipe.job.spec import JobSpec
from raypipe.launch.run_directory import check_model, saved_job
from raypipe.observe.run_dir import CALLS as FOLDER
from raypipe.runtime.session.session import KEPT_NAME, NOTE
from raypipe.runtime.session.slots import Adapters
from raypipe.service.futures import Answer, Ended

REFUSED = "refused"
"""In place of a verb: a number that a wrong request has used."""
ADAPTERS = "adapters.json"
"""Of a model, in its folder."""
PIN = "from"
"""A folder with the checkpoint that a request loads, as it was when the request was accepted."""


class WrittenRequest(NamedTuple):
    """A request that was accepted."""

    number: int
    verb: str
    body: bytes


class WrittenModel(NamedTuple):
    """A model that there was."""

    name: str
    session: str
    slot: int
    folder: Path


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


def model_folder(directory: Path, name: str, slot: int) -> Path:
    """Return the folder of a model, ``SESSION:train:NUMBER``."""
    session, _, number = name.split(":")
    return directory / FOLDER / session / f"train.{number}.{slot}"


def models(directory: Path, session: str) -> Iterator[WrittenModel]:
    """Return the models of a session; one that the client was not told of is removed."""
    for folder in sorted((directory / FOLDER / session).glob("train.*")):
        _, number, slot = folder.name.split(".")
        if any(written.number == 0 for written in requests(folder)):
            yield WrittenModel(f"{session}:train:{number}", session, int(slot), folder)
        else:
            shutil.rmtree(folder)


def add_sampler(directory: Path, name: str, about: Mapping[str, Any]) -> None:
    """Write down what a client samples from, ``SESSION:sample:NUMBER``."""
    session, _, number = name.split(":")
    write_whole(directory / FOLDER / session / f"sample.{number}", json.dumps(about))


def samplers(directory: Path, session: str) -> dict[str, dict[str, Any]]:
    """Return what the client of a session sampled from, by name."""
    found = [file for file in (directory / FOLDER / session).glob("sample.*") if file.name.count(".") == 1]
    return {f"{session}:sample:{file.name.partition('.')[2]}": json.loads(file.read_bytes()) for file in found}


def add(
    folder: Path, number: int, verb: str, body: bytes, loads: Path | None = None, begins: Adapters | None = None
) -> None:
    """Write down a request of a model.

    Args:
        folder: of the model.
        number: of the request.
        verb: of the API.
        body: as it came.
        loads: the checkpoint that it loads, which may be removed or overwritten before the request is done again.
        begins: the adapters of the model, where the request begins it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if begins is not None:
        write_whole(folder / ADAPTERS, json.dumps(begins))
    if loads is not None:
        pin = pinned(folder, number)
        shutil.rmtree(pin, ignore_errors=True)
        shutil.copytree(loads, pin, copy_function=_link)
    write_whole(folder / f"{number:08}.{verb}", body)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # a file system without links
        shutil.copy2(source, to)


def pinned(folder: Path, number: int) -> Path:
    """Return where the checkpoint is that a request loads."""
    return folder / f"{number:08}.{PIN}"


def adapters(folder: Path) -> Adapters:
    """Return the adapters of a model."""
    return Adapters(*json.loads((folder / ADAPTERS).read_bytes()))


def requests(folder: Path, after: int = -1) -> list[WrittenRequest]:
    """Return the requests of a model after one of them, in order."""
    found = [file for file in sorted(folder.glob("[0-9]*")) if file.name.count(".") == 1 and file.is_file()]
    numbers = [(int(file.name.partition(".")[0]), file) for file in found]
    return [WrittenRequest(at, file.name.partition(".")[2], file.read_bytes()) for at, file in numbers if at > after]


def drop(folder: Path, number: int) -> None:
    """Remove the requests up to one that a snapshot has; the one that made the model stays."""
    for file in folder.glob("[0-9]*"):
        if int(file.name.partition(".")[0]) <= number:
            if file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            elif int(file.name.partition(".")[0]):
                file.unlink(missing_ok=True)


class ModelSnapshot(NamedTuple):
    """A snapshot of a model."""

    folder: Path
    number: int
    """The last request that is in it."""
    updates: int
    answers: Mapping[int, tuple[str, Ended]]
    """See ``Requests.answers``."""


def note_of(model: str, number: int, updates: int, answers: Mapping[int, tuple[str, Ended]]) -> bytes:
    """Return the note of a snapshot."""
    kept = {str(at): [digest, _plain(ended)] for at, (digest, ended) in answers.items()}
    return json.dumps({"model": model, "number": number, "updates": updates, "answers": kept}).encode()


def snapshots(directory: Path) -> dict[str, ModelSnapshot]:
    """Return the newest snapshot of each model in a session's directory, by the model's name."""
    found = {}
    folders = directory.glob(KEPT_NAME.format(slot="*", number="*"))
    for folder in sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2])):
        note = json.loads((folder / NOTE).read_bytes())
        answers = {int(at): (digest, _ended(ended)) for at, (digest, ended) in note["answers"].items()}
        found[note["model"]] = ModelSnapshot(folder, note["number"], note["updates"], answers)
    return found


def _plain(ended: Ended) -> list[Any]:
    if isinstance(ended, Answer):
        return ["json", ended.json] if ended.json is not None else ["bytes", base64.b64encode(ended.protobuf).decode()]
    kind = "user" if isinstance(ended, SpecError | CheckpointError) else "server"
    return [kind, *map(str, ended.args[:3])]


def _ended(plain: list[Any]) -> Ended:
    kind, *rest = plain
    if kind == "json":
        return Answer(rest[0])
    if kind == "bytes":
        return Answer(protobuf=base64.b64decode(rest[0]))
    return (SpecError if kind == "user" else RunError)(*rest)
