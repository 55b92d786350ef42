"""Copies of checkpoints on a storage that need not be mounted: any that pyarrow or fsspec opens by a URI.

A copy is a folder ``step-00000050`` under the URI with the same files as the checkpoint. Its manifest is written last
and removed first, so what a killed process leaves there is never taken for a checkpoint; a copy that comes back is
verified, digests included, before it gets its name.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

from raypipe.atomic_write import whole
from raypipe.checkpoint.read import open_checkpoint
from raypipe.checkpoint.write import NAME
from raypipe.errors import CheckpointError, SpecError

KEY = "train.checkpoint_storage"
_STEP = re.compile(r"step-[0-9]{8,18}")
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

        found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        return sorted(one.base_name for one in found if _STEP.fullmatch(one.base_name))

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
        found, path = fs.FileSystem.from_uri(uri)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):  # not one of pyarrow's own
        try:
            from fsspec.core import url_to_fs

            other, path = url_to_fs(uri)
        except (ImportError, ValueError, OSError) as error:
            fix = "give a URI of a file system for which pyarrow or an installed fsspec package exists"
            raise SpecError(KEY, f"{name} cannot be opened: {error}", fix) from None
        found = fs.PyFileSystem(fs.FSSpecHandler(other))
    except OSError as error:
        raise SpecError(KEY, f"{name} cannot be opened: {error}", "check its name and your rights") from None
    return found, path.rstrip("/")
