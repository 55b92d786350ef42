"""Start the process that compiles a stage (``helper``), and wait for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from raypipe.runtime.compiled.stored.request import Request


class HelperProcess:
    """Compiles one stage while this process goes on."""

    def __init__(self, request: Request) -> None:
        packed = request.packed()
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until it ends
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raypipe.runtime.compiled.stored.helper"],
            stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # it has ended, and ``reason`` says why
            assert self._process.stdin is not None
            self._process.stdin.write(len(packed).to_bytes(8, "big") + packed)
            self._process.stdin.flush()  # not closed: the process ends when this one does

    def reason(self, deadline: float) -> str | None:
        """Wait for the process; return why the stage is not compiled, None if it is.

        ``deadline``: time on the monotonic clock at which it is ended.
        """
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return "it is not compiled within train.compile_timeout_s"
        finally:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._output.seek(0)
        answer = self._output.read().decode().strip()
        if status == 0 and answer:
            reason: str | None = json.loads(answer.splitlines()[-1])["reason"]
            return reason
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the process that compiles it ended with status {status}: {said[-1][:200] if said else 'no message'}"

    def end(self) -> None:
        """End the process and the compilers that it has started, unless it has ended."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def stored_in(cache: Path, key: str) -> Path:
    """Return the folder of a stored stage."""
    return cache / "stages" / key
