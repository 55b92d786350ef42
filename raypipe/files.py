"""Files that people name: read where they are regular and of a size that such a file can have, else one OSError.

A device such as ``/dev/zero`` never ends, and a named pipe waits for whoever writes to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path

MOST_BYTES = 256 << 20
"""Of a schedule, plan, profile or manifest: several million tasks. What is above is another kind of file."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises:
        OSError: whatever the system says, or that it is no regular file, or too large; ``strerror`` says which.
    """
    try:
        # A pipe must not be waited for: whether it is one is known before it is opened.
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is no regular file, but a device or a pipe", str(path))
        with path.open("rb") as file:
            content = file.read(most + 1)  # not by its size: files below /proc say that they are empty
    except ValueError as error:  # a name that no file can have: it holds a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if len(content) > most:
        size = said(max(about.st_size, len(content)))
        raise OSError(errno.EFBIG, f"has {size}, and such a file at most {said(most)}", str(path))
    return content


def sha256(path: Path) -> str:
    """Hex digest of a file's content, read a mebibyte at a time.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def said(size: int) -> str:
    """A size as people say it.

    >>> said(300), said(3 << 19)
    ('300 bytes', '1.5 MiB')
    """
    unit = 0
    rest = float(size)
    while rest >= 1024 and unit < len(_UNITS) - 1:
        rest, unit = rest / 1024, unit + 1
    return f"{rest:.4g} {_UNITS[unit]}"


def is_url(name: object) -> bool:
    """Whether a name has a scheme as in ``s3://bucket/x``; a ``Path`` has lost one of the two slashes.

    >>> is_url("s3://bucket/x"), is_url("gs:/bucket"), is_url("runs/a:b/c"), is_url("C:/runs")
    (True, True, False, False)
    """
    return _SCHEME.match(str(name)) is not None


def expanded(path: Path) -> Path:
    """With ``~`` as the home directory; unchanged where there is none, or no such user, as a shell has it."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def short(text: str, most: int = 80) -> str:
    """A text for a message: cut in the middle where it is long.

    >>> short("abcdefghij", 7)
    'ab...ij'
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
