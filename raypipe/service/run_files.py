"""Files of a server's run: checkpoints of its models (``checkpoints/MODEL/KIND/NAME``), a row of metrics an update."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.files import write_whole
from raypipe.observe.run_dir import CHECKPOINTS
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.observe.run_record import model_name
from raypipe.runtime.session.session import Outputs, Updated

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
