"""Positions, room and growth of the shared ring, against a plain model."""

from __future__ import annotations

import random
from ctypes import memmove, string_at

from raypipe.runtime.transport.same_host.ring import Ring, capacity_for


def test_blocks_keep_their_bytes_while_unread() -> None:
    """However many wait; the ring grows twice meanwhile, and both ends go on with the mappings that they have."""
    writer = Ring(capacity=4096)
    reader = Ring(writer.file)
    rng = random.Random(1)
    waiting: list[tuple[int, bytes]] = []
    refused = 0
    for n in range(3000):
        if n in (1000, 2000):
            assert writer.grow(2 * writer.capacity)
        size = rng.randrange(0, 1900)
        position = writer.place(size)
        while position is None or (waiting and rng.random() < 0.4):
            refused += position is None
            assert waiting, "an empty ring has room for what it holds"
            at, content = waiting.pop(0)
            assert string_at(reader.address(at), len(content)) == content
            reader.release(len(content))
            position = writer.place(size) if position is None else position
        assert position + size <= writer.capacity
        content = bytes([n % 251]) * size
        memmove(writer.address(position), content, size)
        waiting.append((position, content))
    assert refused > 100
    writer.close()
    reader.close()
    reader.close()


def test_when_all_is_read_the_same_bytes_serve_again() -> None:
    ring = Ring(capacity=4096)
    for _ in range(3):
        assert [ring.place(100), ring.place(100)] == [0, 128]
        ring.release(100)
        ring.release(100)
    assert ring.place(5000) is None
    ring.close()


def test_a_capacity_holds_two() -> None:
    for nbytes in (0, 1, 1000, 32_700, 32_704, 32_705, 10**6):
        assert capacity_for(nbytes, 1 << 16) >= 2 * nbytes
