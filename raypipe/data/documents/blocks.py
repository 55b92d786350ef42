"""Blocks of documents: the unit that is read, tokenised and packed at once, and whose order is shuffled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from raypipe.data.documents.sources import Part

Block = tuple[Part, ...]


def blocks_of(parts: Iterable[Part], size: int) -> list[Block]:
    """Gather parts, in order, into blocks of about ``size`` bytes; larger parts are cut.

    No block is less than half of that, if there is that much, so that what does not fill a sample stays small.

    >>> one = Part("a", 0, 0, 10, 100)
    >>> [[(p.file, p.first, p.rows) for p in block] for block in blocks_of([one], 40)]
    [[('a', 0, 4)], [('a', 4, 3)], [('a', 7, 3)]]
    """
    made: list[Block] = []
    held: list[Part] = []
    for part in _cut(parts, size):
        held.append(part)
        if sum(one.size for one in held) >= size * 3 // 4:
            made.append(tuple(held))
            held = []
    if held and made and sum(one.size for one in held) < size // 2:
        made[-1] += tuple(held)
    elif held:
        made.append(tuple(held))
    return made


def _cut(parts: Iterable[Part], size: int) -> Iterator[Part]:
    for part in parts:
        pieces = min(max(1, math.ceil(part.size / size)), max(1, part.rows))
        if part.size <= size * 3 // 2:
            pieces = 1
        first, (least, rest) = part.first, divmod(part.rows, pieces)
        for number in range(pieces):
            count = least + (number < rest)
            if count:
                yield part._replace(first=first, rows=count, size=part.size * count // max(1, part.rows))
            first += count
