"""Read files that users name, refusing what is not a regular file of a plausible size, and JSON that is not exact.

Write files and folders atomically: under a temporary name in the same folder, then renamed.

Reading a device such as ``/dev/zero`` would never end, and reading a named pipe would wait for a writer. The temporary
name is unique, so several processes may write the same file; the last one to finish wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from raypipe.errors import CLONE

MOST_BYTES = 256 << 20
"""Largest size of a schedule, plan, profile or manifest; a schedule of several million tasks fits."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size for reading.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; ``strerror`` gives the reason.
    """
    try:
        # Without waiting, since opening a pipe would wait for a writer, and reading /proc/kmsg for a message.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # the name contains a NUL character
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a regular file but a device or a pipe", str(path))


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large; ``strerror`` gives the reason.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)  # do not trust st_size: files below /proc report 0
        size = max(os.fstat(file.fileno()).st_size, len(content or b""))
    if content is None:
        raise OSError(errno.EINVAL, "has no end: the system writes it while it is read", str(path))
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has {said(size)}; the limit is {said(most)}", str(path))
    return content


def parse_json(text: bytes | str) -> Any:
    """Decode JSON exactly: a key that is given twice, and numbers that JSON does not have, are errors.

    Raises:
        ValueError: the text is not JSON in UTF-8, or nested too deeply.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")  # json would guess UTF-16 too
    try:
        result = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_number)
        if _SURROGATE.search(decoded):  # half a pair is no character: writing or printing it would fail
            json.dumps(result, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return result


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Decode a regular file of at most ``most`` bytes as ``parse_json`` does.

    Raises:
        OSError: as ``read_regular``.
        ValueError: as ``parse_json``.
    """
    return parse_json(read_regular(path, most))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ValueError(f'the key "{short(twice)}" is given twice')
    return result


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content, which is read in blocks of 1 MiB.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def said(size: float) -> str:
    """Format a number of bytes.

    >>> said(300), said(3 << 19)
    ('300 bytes', '1.5 MiB')
    """
    unit = 0
    rest = size
    while rest >= 1024 and unit < len(_UNITS) - 1:
        rest, unit = rest / 1024, unit + 1
    return f"{rest:.4g} {_UNITS[unit]}"


def is_url(name: object) -> bool:
    """Return whether a name has a URL scheme, as in ``s3://bucket/x``; converting to ``Path`` drops one of the slashes.

    >>> is_url("s3://bucket/x"), is_url("gs:/bucket"), is_url("runs/a:b/c"), is_url("C:/runs")
    (True, True, False, False)
    """
    return _SCHEME.match(str(name)) is not None


def expanded(path: Path) -> Path:
    """Expand ``~`` to the home directory; as in shells, an unknown user's ``~`` stays as it is."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def short(text: str, most: int = 80) -> str:
    """Shorten a text for a message by leaving out its middle.

    >>> short("abcdefghij", 7)
    'ab...ij'
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def shipped(folder: str) -> Path:
    """Return a folder of files that come with raypipe and are not code, such as ``dashboards``.

    It is the clone's, or where pip has put its copy.
    """
    if (CLONE / "pyproject.toml").is_file():
        return CLONE / folder
    return Path(sysconfig.get_path("data")) / "share" / "raypipe" / folder


def strict_json(value: object, **options: Any) -> str:
    """Return ``json.dumps(value)`` with null for every number that is not finite.

    >>> strict_json({"loss": float("nan"), "times": [1.0, float("inf")]})
    '{"loss": null, "times": [1.0, null]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def whole(path: Path, *, folder: bool = False, synced: bool = False) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``path`` at the end of the block, or remove it if the block fails.

    Args:
        path: the file or folder to write. Its parent must exist. A file or an empty folder there is replaced.
        folder: the temporary path is a new folder; otherwise the block creates a file or a link at the path.
        synced: flush content and name to disk, so that they survive a power failure.

    Raises:
        OSError: the file system refuses the write. Exceptions of the block are passed on.
    """
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        if folder:
            partial.mkdir()
        yield partial
        if synced:
            _sync(partial)
        partial.replace(path)
        if synced:
            _sync(path.parent)  # the new name is stored in the folder, which must be flushed separately
    except BaseException:
        if folder:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()
        raise


def write_whole(path: Path, content: bytes | str, *, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all: a crash in the middle leaves what was there before.

    What a link points to is replaced, not the link. A pipe or a terminal, which nothing can replace, is written to.

    Args:
        path: the file.
        content: its bytes; a text is encoded as UTF-8.
        synced: as in ``whole``.

    Raises:
        OSError: the file system refuses the write.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with whole(path.resolve() if path.is_symlink() else path, synced=synced) as partial:
        partial.write_bytes(data)


def link_or_copy(file: Path | str, to: Path | str) -> None:
    """Give a file another name, or make a copy where its file system has no hard links."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copy2(file, to)


def _sync(path: Path) -> None:
    """Wait until the content of a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
