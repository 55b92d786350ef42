"""Rows of whole documents for token budgets: which documents a step takes, and the rows that they are packed into.

The documents of a step are those that come next in the shuffled order, as many as fit ``train.tokens_per_step``. They
are dealt to rows by predicted time, not by tokens: a document of n tokens takes ``n + n * n / even``, where ``even`` is
the length at which its attention takes as long as all else. Longest first, each to the row with the least time (LPT;
Graham 1969), and where a row would hold more than it may, to the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.arrays import Arrays
from raypipe.data.ragged import TOKENS, classes, fill_of, ragged
from raypipe.data.sample_order import Split, order_key, permutation
from raypipe.errors import SpecError
from raypipe.job.train_spec import TokenBudget
from raypipe.models.task import BY_TOKEN, IGNORED, POSITIONS, NextToken, Task

Numbers = npt.NDArray[np.int64]
FILLER = -1
"""Number of the document that a row without any holds: one token of padding, which is no target."""


class StepDocuments:
    """Which documents each step takes; documents are visited epoch after epoch, in an order that is new in each.

    Args:
        lengths: tokens of every document, at most ``tokens`` each.
        tokens: most tokens of a step.
        order: returns the documents of an epoch in its order.
    """

    def __init__(self, lengths: Numbers, tokens: int, order: Callable[[int], Numbers]) -> None:
        self._lengths, self._tokens, self._order = lengths, tokens, order
        self._begins = [0]
        """Per step, how many documents were visited before it."""
        self._epoch = lru_cache(maxsize=2)(self._visited)

    def at(self, step: int) -> list[int]:
        """Return the documents of a step, at least one."""
        while len(self._begins) < step + 2:
            self._begins.append(self._end(self._begins[-1]))
        result: list[int] = []
        at, end = self._begins[step], self._begins[step + 1]
        while at < end:
            epoch, place = divmod(at, len(self._lengths))
            chosen = self._epoch(epoch)[0][place : place + end - at].tolist()
            result += chosen
            at += len(chosen)
        return result

    def _visited(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return the documents of an epoch in order, and the tokens before each and behind the last."""
        order = self._order(epoch)
        return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths[order])])

    def _end(self, begin: int) -> int:
        size, left = len(self._lengths), self._tokens
        epoch, place = divmod(begin, size)
        while True:
            before = self._epoch(epoch)[1]
            end = int(np.searchsorted(before, before[place] + left, side="right")) - 1
            if end < size:
                return epoch * size + end
            left -= int(before[size] - before[place])
            epoch, place = epoch + 1, 0


def step_documents(lengths: Numbers, split: Split, seed: int, tokens: int) -> StepDocuments:
    """Return which documents the steps of a split take; held-out ones do not depend on the seed."""
    own = seed if split == "train" else 0
    return StepDocuments(lengths, tokens, lambda epoch: permutation(order_key(split, own, epoch), len(lengths)))


def mean_tokens_of_step(arrays: Arrays, seed: int, tokens: int, steps: int) -> float:
    """Return the mean tokens of the first ``steps`` steps."""
    lengths = ragged(arrays.columns["train"][TOKENS]).lengths()
    taken = step_documents(lengths, "train", seed, tokens)
    return float(sum(int(lengths[taken.at(step)].sum()) for step in range(steps))) / steps


def balanced(lengths: Sequence[int], rows: int, most: int, even: int) -> list[list[int]]:
    """Deal documents to rows that take equally long; return the documents of each row, by number.

    Args:
        lengths: tokens of each document.
        rows: number of rows, at least ``rows_needed`` for the sum of ``lengths``.
        most: tokens that a row may hold.
        even: see ``TokenBudget``.

    >>> balanced([8, 2, 2, 2, 2], 2, 8, 4)
    [[0], [1, 2, 3, 4]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    result = _by_time(longest_first, lengths, rows, most, even)
    return result if result is not None else _first_fit(longest_first, lengths, rows, most)


def time_of(length: int, even: int) -> int:
    """Return a document's predicted time, in units of a token's over ``even``: whole, so that every host agrees."""
    return length * (even + length)


def _by_time(order: Sequence[int], lengths: Sequence[int], rows: int, most: int, even: int) -> list[list[int]] | None:
    """Return None where a document fits no row any more."""
    result: list[list[int]] = [[] for _ in range(rows)]
    heap = [(0, 0, row) for row in range(rows)]  # time, tokens, number
    for document in order:
        full = []
        while heap and heap[0][1] + lengths[document] > most:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        time, tokens, row = heap[0]
        result[row].append(document)
        heapq.heapreplace(heap, (time + time_of(lengths[document], even), tokens + lengths[document], row))
        for one in full:
            heapq.heappush(heap, one)
    return result


def _first_fit(order: Sequence[int], lengths: Sequence[int], rows: int, most: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(rows)]
    tokens = [0] * rows
    for document in order:
        row = next(row for row in range(rows) if tokens[row] + lengths[document] <= most)
        result[row].append(document)
        tokens[row] += lengths[document]
    return result


def dealt(rows: Sequence[list[int]], times: Sequence[int], copies: int) -> list[list[int]]:
    """Return the rows in the order of a step: those of the first copy, then those of the second, and so on.

    Copies take equally long: of the rows from the longest on, each copy gets one in turn, the copy with the least time
    the longest. Within a copy, and in a row, documents are in the order of their arrival.
    """
    own: list[list[list[int]]] = [[] for _ in range(copies)]
    sums = [0] * copies
    longest_first = sorted(range(len(rows)), key=lambda i: -times[i])
    for begin in range(0, len(rows), copies):
        by_time = sorted(range(copies), key=lambda copy: sums[copy])
        for copy, number in zip(by_time, longest_first[begin : begin + copies], strict=True):
            own[copy].append(sorted(rows[number]))
            sums[copy] += times[number]
    return [row for each in own for row in sorted(each, key=lambda row: row[0] if row else len(times))]


class Packed:
    """Rows of packed documents as the raw inputs of a task; see ``data.Dataset``.

    Args:
        arrays: the documents, one a row.
        task: what the model is trained to do.
        multiple: rows are padded to a multiple of it.
        budget: how documents are taken and packed.

    Raises:
        SpecError: the task has not one label for each token, or a prepared document does not fit a row.
    """

    def __init__(self, arrays: Arrays, task: Task, multiple: int, budget: TokenBudget) -> None:
        if not task.per_token or task.ignored != IGNORED:
            why = "this model's loss is not a sum over tokens, so that documents could be packed into rows"
            raise SpecError("train.tokens_per_step", why, "leave it out, or train a causal or masked language model")
        self.task, self.multiple, self.budget = task, multiple, budget
        self.columns = {s: {n: ragged(c) for n, c in own.items() if n in BY_TOKEN} for s, own in arrays.columns.items()}
        self.tokens = {split: own[TOKENS].lengths() for split, own in self.columns.items()}
        longest = max(int(lengths.max()) for lengths in self.tokens.values())
        if longest > budget.row_tokens:
            why = f"{budget.row_tokens}, and a document of this run has {longest} tokens"
            raise SpecError("train.microbatch_tokens", why, f"use {longest} or more, or start a new run")
        self._first_is_target = not (isinstance(task, NextToken) and not task.shifted)
        self._steps: dict[tuple[Split, int], StepDocuments] = {}
        self._packed = lru_cache(maxsize=4)(self._rows)

    def documents(self, split: Split, seed: int, step: int) -> list[int]:
        """Return the documents of a step in the order of their arrival; held-out ones do not depend on the seed."""
        steps = self._steps.get((split, seed))
        if steps is None:
            steps = self._steps[split, seed] = step_documents(self.tokens[split], split, seed, self.budget.tokens)
        return steps.at(step)

    def rows(self, split: Split, seed: int, step: int, batch: int) -> list[list[int]]:
        """Return the documents of each row of a step; another number of rows, as a profile takes, is some of them."""
        rows = self._packed(split, seed, step)
        return [rows[i % len(rows)] for i in range(batch)]

    def _rows(self, split: Split, seed: int, step: int) -> list[list[int]]:
        chosen = self.documents(split, seed, step)
        lengths = self.tokens[split][chosen].tolist()
        _, most, number, copies, even = self.budget
        rows = balanced(lengths, number, most, even)
        times = [sum(time_of(lengths[i], even) for i in row) for row in rows]
        return [[chosen[i] for i in row] or [FILLER] for row in dealt(rows, times, copies)]

    def times(self, split: Split, seed: int, step: int) -> list[int]:
        """Return the predicted time of each row of a step, at least that of a token; see ``time_of``."""
        even, tokens = self.budget.even, self.tokens[split]
        return [
            sum(time_of(1 if n == FILLER else int(tokens[n]), even) for n in row)
            for row in self._packed(split, seed, step)
        ]

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return the rows of a step."""
        rows = self.rows(split, seed, step, batch)
        length = int(self._lengths(split, rows).max())
        made: dict[str, Tensor] = {}
        for name, column in self.columns[split].items():
            fill = fill_of(name, self.task.padding) if column.fill is None else column.fill
            values = np.full((len(rows), length), fill, np.int64)
            hides = name == "labels" and not self._first_is_target
            for row, documents in zip(values, rows, strict=True):
                at = 0
                for number in documents:
                    if number == FILLER:
                        continue
                    begin, end = column.offsets[number], column.offsets[number + 1]
                    row[at : at + end - begin] = column.values[begin:end]
                    if hides:
                        row[at] = IGNORED
                    at += end - begin
            made[name] = torch.from_numpy(values)
        made[POSITIONS] = torch.from_numpy(self._positions(split, rows, length))
        return made

    def _positions(self, split: Split, rows: Sequence[list[int]], length: int) -> Numbers:
        """Return positions, which restart with each document and with each token of padding."""
        result = np.zeros((len(rows), length), np.int64)
        for row, documents in zip(result, rows, strict=True):
            at = 0
            for number in documents:
                size = 0 if number == FILLER else int(self.tokens[split][number])
                row[at : at + size] = np.arange(size)
                at += size
        return result

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Numbers]:
        """Return the padded length of each row."""
        own = self._lengths(split, self.rows(split, seed, step, batch))
        return dict.fromkeys((*self.columns[split], POSITIONS), own)

    def _lengths(self, split: Split, rows: Sequence[list[int]]) -> Numbers:
        own = [sum(1 if n == FILLER else int(self.tokens[split][n]) for n in row) for row in rows]
        return classes(np.array(own, np.int64), self.multiple, self.budget.row_tokens)

    def samples(self, split: Split) -> int:
        """Return the number of documents of an epoch."""
        return len(self.tokens[split])
