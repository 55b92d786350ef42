"""Damage real checkpoints in a thousand ways: ``python -m tests.bench.safety.corruptions [--times N]``.

Each time two checkpoints that raypipe's own writer made are copied and the newer one is damaged: bits flipped, files
truncated, lengthened, emptied, overwritten, missing, or exchanged for others, of manifests and of shards. It must be
refused with a reason, and the older one must be found and hold every tensor bit for bit. Exits with 1 if a damaged
checkpoint is opened, or an exception is raised that is none of raypipe's.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.checkpoint.write import NAME
from raypipe.errors import CheckpointError
from tests.bench.command import options
from tests.bench.safety import checkpoints
from tests.bench.safety.trial import SilentError, attempt, expect

OLDER, NEWER = checkpoints.STEP - 10, checkpoints.STEP
Damage = Callable[[Path, Path, random.Random], str]
"""Damages the first checkpoint, perhaps with files of the second; says how."""


def _one(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def flip(newer: Path, _: Path, chance: random.Random) -> str:
    """Flip one to four bits of a file."""
    file = _one(newer, chance)
    content = bytearray(file.read_bytes())
    bits = sorted(chance.sample(range(8 * len(content)), chance.choice([1, 1, 1, 2, 4])))
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return f"bits {bits} of {file.name} flipped"


def truncate(newer: Path, _: Path, chance: random.Random) -> str:
    """Cut a file short, perhaps to nothing."""
    file = _one(newer, chance)
    length = chance.choice([0, file.stat().st_size - 1, chance.randrange(file.stat().st_size)])
    file.write_bytes(file.read_bytes()[:length])
    return f"{file.name} truncated to {length} bytes"


def lengthen(newer: Path, _: Path, chance: random.Random) -> str:
    """Append bytes to a file."""
    file = _one(newer, chance)
    more = chance.choice([b"\0", b" ", b"\n", b"{}", bytes(4096)])
    file.write_bytes(file.read_bytes() + more)
    return f"{len(more)} bytes appended to {file.name}"


def overwrite(newer: Path, _: Path, chance: random.Random) -> str:
    """Replace a block of a file by zeros or noise, as a failing disk does."""
    file = _one(newer, chance)
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content))
    stop = min(len(content), start + chance.choice([1, 16, 512]))
    block = bytes(stop - start) if chance.random() < 0.5 else chance.randbytes(stop - start)
    if bytes(content[start:stop]) == block:
        block = bytes(255 - byte for byte in block)
    content[start:stop] = block
    file.write_bytes(content)
    return f"bytes {start} to {stop} of {file.name} overwritten"


def lose(newer: Path, _: Path, chance: random.Random) -> str:
    """Remove a file, or put a folder or an endless file in its place."""
    file = _one(newer, chance)
    file.unlink()
    kind = chance.choice(["missing", "missing", "a folder", "endless"])
    if kind == "a folder":
        file.mkdir()
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    return f"{file.name} is {kind}"


def exchange(newer: Path, older: Path, chance: random.Random) -> str:
    """Exchange two files of the checkpoint, or put one of another step in the place of its namesake."""
    shards = sorted(newer.glob("*.safetensors"))
    kind = chance.choice(["shards", "of another step", "manifest of another step", "all of another step", "a name"])
    if kind == "shards":
        first, second = shards[0].read_bytes(), shards[1].read_bytes()
        shards[0].write_bytes(second)
        shards[1].write_bytes(first)
    elif kind == "of another step":
        file = chance.choice(shards)
        shutil.copy(older / file.name, file)
    elif kind == "manifest of another step":
        shutil.copy(older / NAME, newer / NAME)
    elif kind == "all of another step":
        shutil.rmtree(newer)
        shutil.copytree(older, newer)
    else:
        chance.choice(shards).rename(newer / f"rank-{chance.randrange(2, 99999):05d}.safetensors")
    return f"exchanged: {kind}"


def edit(newer: Path, _: Path, chance: random.Random) -> str:
    """Change a figure of the manifest, or write it anew in another way, with its digest left as it is."""
    body = json.loads((newer / NAME).read_text())
    kind = chance.choice(["step", "bytes", "keys", "meta", "spaces"])
    indent: int | None = 1
    if kind == "step":
        body["step"] += chance.choice([-1, 1, 10**20])
    elif kind == "bytes":
        body["files"][0]["bytes"] += 1
    elif kind == "keys":
        lost = chance.choice(sorted(body["keys"]))
        del body["keys"][lost]
    elif kind == "meta":
        body["meta"]["val_loss"] = 0.0
    else:
        indent = None
    (newer / NAME).write_text(json.dumps(body, indent=indent))
    return f"the manifest's {kind} edited"


DAMAGES: tuple[Damage, ...] = (flip, flip, truncate, lengthen, overwrite, lose, exchange, edit)


def corrupted(right: Path, root: Path, seed: int) -> None:
    """Damage a copy of ``right`` in ``root`` by the ``seed``-th damage, and look for the newest checkpoint there.

    Raises:
        SilentError: the damaged checkpoint was opened, or the older one was not found whole.
    """
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(right, root)
    older, newer = sorted(root.iterdir())
    chance = random.Random(seed)
    how = chance.choice(DAMAGES)(newer, older, chance)
    try:
        open_checkpoint(newer)
    except CheckpointError as error:
        expect(bool(error.why) and str(newer) in error.where, f"{how}: an error that does not say where: {error}")
    else:
        raise SilentError(f"{how}: it was opened")
    result, notices = latest(root)
    expect(result == older and len(notices) == 1, f"{how}: {result} was found")
    expect(checkpoints.holds_what_was_written(open_checkpoint(older), OLDER), f"{how}: the older one differs")


def main() -> int:
    args = options(__doc__, times=1000)
    with tempfile.TemporaryDirectory(prefix="raypipe-corruptions-") as name:
        right = Path(name) / "right"
        for step in (OLDER, NEWER):
            checkpoints.write(right, step)
        expect(checkpoints.holds_what_was_written(open_checkpoint(right / f"step-{NEWER:08d}"), NEWER), "the writer")

        def once(seed: int) -> None:
            corrupted(right, Path(name) / "root", seed)

        outcomes: Counter[str] = Counter()
        for seed in range(args.times):
            outcome = attempt(once, seed)
            outcomes["refused" if outcome.verdict == "taken" else outcome.verdict] += 1
            if outcome.verdict != "taken":
                print(f"{seed}: {outcome.verdict}: {outcome.why}")
    print(json.dumps({"corruptions": args.times, **outcomes}))
    return 0 if set(outcomes) == {"refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
