"""The best checkpoint of a run: kept beside the newest ones, whose number is limited.

``best`` points to a folder ``best-00000040`` with the files of that step's checkpoint, by hard links where the file
system has them: it takes no room while the other is there, and stays when that goes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from raypipe.atomic_write import whole
from raypipe.checkpoint.read import Checkpoint, latest, open_checkpoint
from raypipe.errors import CheckpointError

POINTER = "best"
LOSS = "val_loss"
"""Key of a manifest's ``meta``: the validation loss of the checkpoint's parameters."""


def keep_best(root: Path, path: Path) -> None:
    """Make the whole checkpoint ``path`` the best one of ``root``, in place of another.

    At no moment is there none: the pointer is moved when all files are there.

    Raises:
        CheckpointError: the disk refuses.
    """
    kept = root / path.name.replace("step-", f"{POINTER}-", 1)
    try:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for file in path.iterdir():
            _link(file, kept / file.name)
        with whole(root / POINTER) as moved:
            moved.symlink_to(kept.name)
    except OSError as error:
        raise CheckpointError(str(kept), f"can't be written: {error}", "free or change the storage path") from None
    _drop(root, but=kept)


def best(root: str | Path, verify: bool = False) -> Checkpoint | None:
    """The best checkpoint, if one was kept. Its ``meta`` has the validation loss.

    Raises:
        CheckpointError: it is damaged.
    """
    pointer = Path(root) / POINTER
    return open_checkpoint(pointer.resolve(), verify) if pointer.exists() else None


def outcome(root: Path, best_one: bool) -> tuple[Path | None, list[str]]:
    """What a run came to: its best checkpoint, if that is wanted and there is one; else ``latest``, as that returns it.

    Raises:
        CheckpointError: the best one is damaged.
    """
    held = best(root, verify=True) if best_one else None
    return (held.path, []) if held is not None else latest(root)


def forget_best(root: Path) -> None:
    """Drop it: a run goes on from before it was made."""
    (root / POINTER).unlink(missing_ok=True)
    _drop(root)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # not on this file system
        shutil.copy2(file, to)


def _drop(root: Path, but: Path | None = None) -> None:
    for old in root.glob(f"{POINTER}-*"):
        if old != but:
            shutil.rmtree(old, ignore_errors=True)
