"""The checkpoints of a server's models, in its run's directory: ``checkpoints/MODEL/KIND/NAME``."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.files import write_whole
from raypipe.observe.run_dir import CHECKPOINTS

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
