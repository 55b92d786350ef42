"""Read a checkpoint, or only some of its tensors, under any plan; find the newest, keep the best, copy it elsewhere."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from raypipe.checkpoint.write import NAME, load_manifest, step_directory
from raypipe.errors import CheckpointError, SpecError, nearest
from raypipe.files import link_or_copy, sha256, whole


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of optimizer steps done."""
    meta: dict[str, Any]
    """The data that the driver passed to ``commit``."""
    files: dict[str, str]
    """Per key, the name of the file that holds it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all tensors, sorted."""
        return tuple(sorted(self.stored))

    @cached_property
    def stored(self) -> dict[str, list[str]]:
        """Per tensor, the keys under which it is stored: its own, or those of its rows (``rows_key``), in order."""
        pieces: dict[str, list[tuple[int, str]]] = {}
        for key in self.files:
            rows = _ROWS.fullmatch(key)
            whole_key, begin = (key, 0) if rows is None else (rows[1], int(rows[2]))
            pieces.setdefault(whole_key, []).append((begin, key))
        return {key: [one for _, one in sorted(some)] for key, some in pieces.items()}

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Read only these tensors, onto the CPU, in the dtype they were written in.

        Raises:
            CheckpointError: the checkpoint does not hold a key, or a file is damaged.
        """
        wanted = list(keys)
        if missing := [key for key in wanted if key not in self.stored]:
            raise CheckpointError(str(self.path), f"holds no {missing[0]}", nearest(missing[0], self.stored))
        pieces = self._read_stored([one for key in wanted for one in self.stored[key]])
        joins = {key: [pieces[one] for one in self.stored[key]] for key in wanted}
        return {key: some[0] if len(some) == 1 else torch.cat(some) for key, some in joins.items()}

    def _read_stored(self, keys: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[str, list[str]] = {}
        for key in keys:
            by_file.setdefault(self.files[key], []).append(key)
        result: dict[str, Tensor] = {}
        for file, wanted in by_file.items():
            try:
                with safe_open(self.path / file, framework="pt") as shard:
                    result.update({key: shard.get_tensor(key) for key in wanted})
            except (OSError, SafetensorError) as error:
                raise CheckpointError(str(self.path / file), f"is damaged: {error}", _EARLIER) from None
        return result


_ROWS = re.compile(r"(.*)\[([0-9]+):[0-9]+\]")
_EARLIER = "use an earlier checkpoint"
_STEP = re.compile(r"step-([0-9]{1,18})")


def open_checkpoint(path: str | Path, verify: bool = True) -> Checkpoint:
    """Open a ``step-...`` directory after checking its version, file sizes and, with ``verify``, file digests.

    Hashing reads every byte, so one process should verify, and the others open with ``verify=False``.

    Raises:
        CheckpointError: it is missing, unfinished, not a checkpoint, of another version, truncated or damaged, or its
            folder is named after another step.
    """
    path = Path(path)
    manifest = load_manifest(path)
    named = _STEP.fullmatch(path.name)
    if named is not None and int(named[1]) != manifest["step"]:
        why = f"holds the checkpoint of step {manifest['step']}"
        raise CheckpointError(str(path), why, f"rename it to {step_directory(path.parent, manifest['step']).name}")
    for file in (path / NAME, *(path / entry["file"] for entry in manifest["files"])):
        if file.is_symlink():  # what it leads to may change or go, whatever it is now
            raise CheckpointError(str(file), "is a link, not a file of the checkpoint", _EARLIER)
    for entry in manifest["files"]:
        file = path / entry["file"]
        if not file.is_file():
            raise CheckpointError(str(file), "is missing", _EARLIER)
        try:
            size = file.stat().st_size
            result = sha256(file) if verify and size == entry["bytes"] else entry["sha256"]
        except OSError as error:
            raise CheckpointError(str(file), f"can't be read: {error.strerror}", _EARLIER) from None
        if size != entry["bytes"]:
            what = "is truncated" if size < entry["bytes"] else "is damaged"
            raise CheckpointError(str(file), f"{what}: {size} bytes instead of {entry['bytes']}", _EARLIER)
        if result != entry["sha256"]:
            raise CheckpointError(str(file), "is damaged: its content differs from its digest", _EARLIER)
    return Checkpoint(path, manifest["step"], manifest["meta"], manifest["keys"])


def latest(root: str | Path) -> tuple[Path | None, list[str]]:
    """Find the newest complete checkpoint below ``root``, and verify it, including digests.

    Returns its path, or None if there is none, and a notice for each newer checkpoint that was skipped, which also
    names the one that is used.
    """
    notices: list[str] = []
    for _, path in sorted(_by_step(root), reverse=True):
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            notices.append(f"skipped checkpoint: {error.where} {error.why}")
        else:
            return path, [f"{notice}; using {path.name}" for notice in notices]
    return None, notices


def at_step(root: str | Path, step: int) -> Path:
    """Find the checkpoint of one step below ``root``, and verify it, including digests.

    Raises:
        SpecError: there is none; it names the nearest one.
        CheckpointError: it is damaged.
    """
    result = dict(_by_step(root))
    if step not in result:
        if not result:
            raise SpecError("--step", f"{root} holds no checkpoint", "train it first")
        near = min(result, key=lambda there: (abs(there - step), there))
        raise SpecError("--step", f"there is no checkpoint of step {step} in {root}", f"the nearest is of step {near}")
    open_checkpoint(result[step])
    return result[step]


def _by_step(root: str | Path) -> list[tuple[int, Path]]:
    """The folders of checkpoints below ``root``, with their steps."""
    return [(int(result[1]), path) for path in Path(root).glob("step-*") if (result := _STEP.fullmatch(path.name))]


# The best checkpoint of a run, which is kept in addition to the newest ones.
#
# ``best`` is a link to a folder ``best-00000040`` with the files of that step's checkpoint, as hard links where the
# file system supports them. It takes no extra space while the checkpoint exists, and stays when that is deleted.
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
            link_or_copy(file, kept / file.name)
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
    result = open_checkpoint(pointer.resolve(), verify)
    if not isinstance(result.meta.get(LOSS), float | int):
        raise CheckpointError(str(result.path), f"its manifest has no {LOSS}", forget)
    return result


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


def _drop(root: Path, but: Path | None = None) -> None:
    for old in root.glob(f"{POINTER}-*"):
        if old != but:
            shutil.rmtree(old, ignore_errors=True)


# Copies of checkpoints on a storage that need not be mounted: any that pyarrow or fsspec opens by a URI.
#
# A copy is a folder ``step-00000050`` under the URI with the same files as the checkpoint. Its manifest is written last
# and removed first, so what a killed process leaves there is never taken for a checkpoint; a copy that comes back is
# verified, digests included, before it gets its name.


KEY = "train.checkpoint_storage"
_COPY = re.compile(r"step-[0-9]{8,18}")
_NOT_SAID = re.compile(r"(?<=://)[^/@]*@|\?.*")
"""Of a URI: credentials, which do not belong in logs, and options, which are not part of a copy's name."""


class Storage:
    """The storage at ``uri``, such as ``s3://bucket/run``; ``name`` is what messages call it.

    Raises:
        SpecError: neither pyarrow nor fsspec can open it.
    """

    def __init__(self, uri: str) -> None:
        self._files, self._root = _opened(uri)
        self.name = _NOT_SAID.sub("", uri)

    def check(self) -> None:
        """Write and remove a small file, to learn before training whether that is possible.

        Raises:
            SpecError: it is not.
        """
        probe = f"{self._root}/.writable-{secrets.token_hex(4)}"
        try:
            self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(probe) as stream:
                stream.write(b"!")
            self._files.delete_file(probe)
        except OSError as error:
            raise SpecError(KEY, f"{self.name} cannot be written: {error}", "check its name and your rights") from None

    def put(self, path: Path, keep: int | None) -> None:
        """Copy the complete checkpoint ``path``, then remove all but the newest ``keep`` copies; None keeps all.

        Raises:
            CheckpointError: it cannot be written.
        """
        from pyarrow import fs

        target = f"{self._root}/{path.name}"
        try:
            if path.name in self._folders():  # of an attempt that went on from an earlier step
                self._remove(path.name)
            self._files.create_dir(target, recursive=True)
            for name in sorted((file.name for file in path.iterdir()), key=lambda name: (name == NAME, name)):
                fs.copy_files(
                    str(path / name),
                    f"{target}/{name}",
                    source_filesystem=fs.LocalFileSystem(),
                    destination_filesystem=self._files,
                )
            for old in self._folders()[:-keep] if keep is not None else ():
                self._remove(old)
        except OSError as error:
            raise CheckpointError(
                f"{self.name}/{path.name}", f"can't be written: {error}", f"free the storage, or change {KEY}"
            ) from None

    def fetch(self, root: Path) -> tuple[Path | None, list[str]]:
        """Copy the newest complete checkpoint to ``root``, verified.

        Returns its path there, or None if there is none, and a notice for each newer one that was skipped.

        Raises:
            CheckpointError: the storage cannot be read, or ``root`` not be written.
        """
        from pyarrow import fs

        notices: list[str] = []
        try:
            root.mkdir(parents=True, exist_ok=True)
            for name in reversed(self._folders()):
                try:
                    with whole(root / name, folder=True, synced=True) as partial:
                        fs.copy_files(
                            f"{self._root}/{name}",
                            str(partial),
                            source_filesystem=self._files,
                            destination_filesystem=fs.LocalFileSystem(),
                        )
                        open_checkpoint(partial)
                    return root / name, notices
                except CheckpointError as error:
                    notices.append(f"skipped {self.name}/{name}: it {error.why}")
        except OSError as error:
            raise CheckpointError(self.name, f"can't be read: {error}", f"check {KEY}") from None
        return None, notices

    def _folders(self) -> list[str]:
        """Names of the copies, complete or not, the oldest first."""
        from pyarrow import fs

        result = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        return sorted(one.base_name for one in result if _COPY.fullmatch(one.base_name))

    def _remove(self, name: str) -> None:
        from pyarrow import fs

        manifest = f"{self._root}/{name}/{NAME}"
        if self._files.get_file_info(manifest).type == fs.FileType.File:
            self._files.delete_file(manifest)
        self._files.delete_dir(f"{self._root}/{name}")


def _opened(uri: str) -> tuple[Any, str]:
    """Return a pyarrow file system and the path in it."""
    import pyarrow
    from pyarrow import fs

    name = _NOT_SAID.sub("", uri)
    try:
        result, path = fs.FileSystem.from_uri(uri)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):  # not one of pyarrow's own
        try:
            from fsspec.core import url_to_fs

            other, path = url_to_fs(uri)
        except (ImportError, ValueError, OSError) as error:
            fix = "give a URI of a file system for which pyarrow or an installed fsspec package exists"
            raise SpecError(KEY, f"{name} cannot be opened: {error}", fix) from None
        result = fs.PyFileSystem(fs.FSSpecHandler(other))
    except OSError as error:
        raise SpecError(KEY, f"{name} cannot be opened: {error}", "check its name and your rights") from None
    return result, path.rstrip("/")
