"""The best checkpoint of a run, which is kept in addition to the newest ones.

``best`` is a link to a folder ``best-00000040`` with the files of that step's checkpoint, as hard links where the file
system supports them. It takes no extra space while the checkpoint exists, and stays when that is deleted.
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
    """Make the checkpoint ``path`` the best one of ``root``, replacing the previous best.

    The link is replaced atomically when all files are in place, so there is a best checkpoint at all times.

    Raises:
        CheckpointError: the files cannot be written.
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
    """Open the best checkpoint; None if none was kept. Its ``meta`` has the validation loss.

    Raises:
        CheckpointError: it is damaged, its folder is gone, or its manifest has no validation loss.
    """
    pointer = Path(root) / POINTER
    if not os.path.lexists(pointer):
        return None
    forget = f"remove {pointer}, then --resume"
    if not pointer.exists():
        raise CheckpointError(str(pointer), f"leads to {pointer.readlink()}, which is gone", forget)
    found = open_checkpoint(pointer.resolve(), verify)
    if not isinstance(found.meta.get(LOSS), float | int):
        raise CheckpointError(str(found.path), f"its manifest has no {LOSS}", forget)
    return found


def outcome(root: Path, best_one: bool) -> tuple[Path | None, list[str]]:
    """Return a run's final checkpoint and notices: with ``best_one`` the best one, if there is one, else ``latest``.

    Raises:
        CheckpointError: the best one is damaged.
    """
    kept = best(root, verify=True) if best_one else None
    return (kept.path, []) if kept is not None else latest(root)


def forget_best(root: Path) -> None:
    """Delete the best checkpoint, because the run resumes from an earlier step."""
    (root / POINTER).unlink(missing_ok=True)
    _drop(root)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # the file system has no hard links
        shutil.copy2(file, to)


def _drop(root: Path, but: Path | None = None) -> None:
    for old in root.glob(f"{POINTER}-*"):
        if old != but:
            shutil.rmtree(old, ignore_errors=True)
