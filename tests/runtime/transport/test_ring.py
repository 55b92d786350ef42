"""Positions, room and wrap-around of the shared ring, against a plain model."""

from __future__ import annotations

import os
import random
from ctypes import memmove, string_at

from raypipe.runtime.transport.same_host.ring import Ring, capacity_for, ring_file


def test_blocks_keep_their_bytes_while_in_use() -> None:
    file = ring_file(4096)
    writer, reader = Ring(file, 4096), Ring(file, 4096)
    os.close(file)
    rng = random.Random(1)
    waiting: list[tuple[int, bytes]] = []
    refused = 0
    for n in range(3000):
        size = rng.randrange(1, 1900)
        assert writer.holds(size)
        position = writer.place(size)
        while position is None or (waiting and rng.random() < 0.4):
            refused += position is None
            assert waiting, "an empty ring has room for what it holds"
            at, content = waiting.pop(0)
            assert string_at(reader.address(at), len(content)) == content
            reader.release(at, len(content))
            position = writer.place(size) if position is None else position
        assert position % 4096 + size <= 4096, "a block must not wrap around the end"
        content = bytes([n % 251]) * size
        memmove(writer.address(position), content, size)
        waiting.append((position, content))
    assert refused > 100
    writer.close()
    reader.close()
    reader.close()


def test_holds_is_half() -> None:
    for nbytes in (0, 1, 1000, 32_700, 32_704, 32_705, 10**6):
        assert capacity_for(nbytes, 1 << 16) >= 2 * nbytes
