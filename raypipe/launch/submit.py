"""Submit a job to a Ray cluster's job server, as ``ray job submit`` does, and follow it to its end."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.errors import InterruptionError, RunError, SpecError
from raypipe.job.reading import parse_yaml, read_text

RUNTIME_ENV = "jobs/runtime_env.yaml"
"""Taken where it is in the working directory and no other is given."""
ADDRESS = "RAY_API_SERVER_ADDRESS"
"""What Ray's client looks at before anything else, the address that it is given included."""
NOT_READY, READY_S = "try again later", 60.0
"""What a job server answers whose node has yet to start its agent, and how long to wait for that."""
START = "give --address http://HOST:8265, or start a head here: ray start --head"


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as the job server is told of it."""

    entrypoint: str
    runtime_env: dict[str, Any]
    file: Path | None
    """Where the runtime environment was read."""

    @property
    def command(self) -> str:
        """The ``ray job submit`` that does the same."""
        words = ["ray", "job", "submit", "--working-dir", self.runtime_env["working_dir"]]
        words += ["--runtime-env", str(self.file)] if self.file is not None else []
        return f"{shlex.join(words)} -- {self.entrypoint}"


def submission(
    job: Path, overrides: Sequence[str], run_dir: str | None, resume: bool, runtime_env: Path | None, folder: Path
) -> Submission:
    """Return what to submit for a job file below ``folder``, the working directory that travels with the job.

    Raises:
        SpecError: the job file is elsewhere, the run directory would be lost, or the runtime environment cannot be
            read.
    """
    folder, whole = folder.resolve(), job.resolve()
    if not whole.is_relative_to(folder):
        why = f"is not below {folder}, the working directory that travels with the job"
        raise SpecError(str(job), why, "run this in the folder that holds the job file and what it names")
    if run_dir is not None and not run_dir.startswith(("/", "~")):
        why = f"{run_dir} is below the job's working directory, which goes away with it"
        raise SpecError("--run-dir", why, "give an absolute path on a file system that all nodes see")
    words = ["python", "-m", "raypipe", "train", str(whole.relative_to(folder))]
    for text in overrides:
        words += ["--set", text]
    if run_dir is not None:
        words += ["--run-dir", run_dir]
    if resume:
        words.append("--resume")
    usual = folder / RUNTIME_ENV
    file = runtime_env or (usual if usual.is_file() else None)
    known = {"excludes": [".git", ".venv", "runs"]} if file is None else _runtime_env(file)
    return Submission(shlex.join(words), {**known, "working_dir": str(folder)}, file)


def _runtime_env(path: Path) -> dict[str, Any]:
    result = parse_yaml(read_text(path, "runtime environment", RUNTIME_ENV), str(path))
    if not isinstance(result, dict):
        raise SpecError(str(path), "holds no keys and values", f"see {RUNTIME_ENV}")
    return result


class Submitted:
    """A job that the job server has taken."""

    def __init__(self, client: Any, job_id: str) -> None:
        self.client = client
        self.id = job_id

    def follow(self, say: Callable[[str], None]) -> int:
        """Pass the job's output on to its end; returns its exit status.

        Raises:
            RunError: the job was stopped, or ended without a status of its own.
            InterruptionError: Ctrl-C; the job goes on.
        """
        try:
            asyncio.run(self._tail(say))
            details = self.client.get_job_info(self.id)
        except KeyboardInterrupt:
            fix = f"ray job logs --follow {self.id}, or ray job stop {self.id}"
            raise InterruptionError("", f"left {self.id}, which goes on", fix) from None
        except (RuntimeError, ConnectionError) as error:
            raise RunError(self.id, f"lost sight of the job: {error}", f"ray job status {self.id}") from None
        if details.status == "SUCCEEDED":
            return 0
        if details.status == "FAILED" and details.driver_exit_code:
            return int(details.driver_exit_code)
        raise RunError(self.id, f"{str(details.status).lower()}: {details.message}", f"ray job logs {self.id}")

    async def _tail(self, say: Callable[[str], None]) -> None:
        async for text in self.client.tail_job_logs(self.id):
            say(text)


def submit(what: Submission, address: str | None, name: str) -> Submitted:
    """Hand a job to the job server at ``address``; by default RAY_ADDRESS's, or that of this machine's cluster.

    Raises:
        SpecError: no job server answers there, or it refuses the job.
    """
    if address is not None:
        os.environ[ADDRESS] = address
    from ray.job_submission import JobSubmissionClient

    where = address or "--address"
    try:
        client = JobSubmissionClient(address)
    except ConnectionError as error:
        raise SpecError(where, f"no job server answers: {_first_line(error)}", START) from None
    deadline = time.monotonic() + READY_S
    while True:
        try:
            # The client writes into what it is given.
            environment, about = dict(what.runtime_env), {"job_name": name}
            taken = client.submit_job(entrypoint=what.entrypoint, runtime_env=environment, metadata=about)
            return Submitted(client, taken)
        except (RuntimeError, ValueError, ConnectionError) as error:
            if NOT_READY not in str(error) or time.monotonic() > deadline:
                why = f"the job server refuses the job: {_first_line(error)}"
                raise SpecError(where, why, f"see {RUNTIME_ENV}") from None
            time.sleep(1.0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
