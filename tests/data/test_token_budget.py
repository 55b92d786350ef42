"""Which documents a step takes, the rows that they are packed into, and what becomes of those that are too long."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from raypipe.data import Arrays, Ragged, flat, open_data, prepare_arrays, token_budget
from raypipe.data.packed import Packed, balanced, dealt, step_documents, time_of
from raypipe.errors import SpecError
from raypipe.job import DataSpec
from raypipe.job.train_spec import TokenBudget, rows_needed
from raypipe.models.task import IGNORED, MaskedToken, NextToken, Task
from raypipe.runtime.stage.inputs import Feed
from tests.job_files import minimal_job

SOURCES = [path.stat().st_size for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
"""Bytes of the modules of Python's standard library."""


def prepared(folder: Path, rows: list[list[int]], longest: int, how: str = "refuse", **other: list[list[int]]) -> Path:
    columns = {name: Ragged.of([np.array(row) for row in r]) for name, r in ({"input_ids": rows} | other).items()}
    np.savez(folder / "rows.npz", **flat({"labels": columns["input_ids"], **columns}))
    data = DataSpec(type="arrays", path=str(folder / "rows.npz"), held_out=str(folder / "rows.npz"), long_documents=how)
    prepare_arrays(data, folder / "data", True, longest)
    return folder / "data"


def opened(folder: Path, budget: TokenBudget, task: Task | None = None, multiple: int = 1) -> Packed:
    result = open_data(folder, task or NextToken(("labels",)), multiple, budget=budget)
    assert isinstance(result, Packed)
    return result


def test_steps_take_every_document_once_an_epoch() -> None:
    lengths = np.array(SOURCES)
    steps = step_documents(lengths, "train", 3, 200_000 + int(lengths.max()))
    taken = [steps.at(step) for step in range(200)]
    visited = [document for step in taken for document in step]
    for begin in range(0, len(visited) - len(lengths), len(lengths)):
        assert sorted(visited[begin : begin + len(lengths)]) == list(range(len(lengths)))
    for number, step in enumerate(taken[:-1]):
        tokens = int(lengths[step].sum())
        assert tokens <= 200_000 + lengths.max() < tokens + lengths[taken[number + 1][0]]
    assert visited[: len(lengths)] != visited[len(lengths) : 2 * len(lengths)]


def test_a_step_is_found_without_those_before_it() -> None:
    lengths = np.array(SOURCES)
    most = int(lengths.max())
    one = step_documents(lengths, "train", 3, most)
    assert step_documents(lengths, "train", 3, most).at(150) == [one.at(step) for step in range(151)][150]
    assert step_documents(lengths, "train", 4, most).at(150) != one.at(150)
    assert step_documents(lengths, "val", 4, most).at(5) == step_documents(lengths, "val", 3, most).at(5)


@pytest.mark.parametrize("seed", range(20))
def test_any_documents_fit_the_rows(seed: int) -> None:
    """Also where documents of more than half a row leave no room to balance."""
    draw = np.random.default_rng(seed)
    most = int(draw.integers(5, 60))
    lengths = draw.integers(1, most + 1, int(draw.integers(1, 60)))
    if seed % 2:
        lengths = np.maximum(lengths, most // 2 + 1)
    rows = balanced(lengths.tolist(), rows_needed(int(lengths.sum()), most), most, int(draw.integers(1, 100)))
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert max(int(lengths[row].sum()) for row in rows) <= most


def test_rows_take_equally_long_and_copies_too() -> None:
    lengths, even = [n for n in SOURCES if n <= 40_000], 8_000
    rows = balanced(lengths, 24, 2 * sum(lengths) // 24, even)
    times = [sum(time_of(lengths[i], even) for i in row) for row in rows]
    assert max(times) <= 1.05 * min(times)
    tokens = [sum(lengths[i] for i in row) for row in rows]
    assert max(tokens) > 1.2 * min(tokens)  # and so are not equally long
    step = dealt(rows, times, 3)
    assert sorted(map(tuple, step)) == sorted(tuple(sorted(row)) for row in rows)
    sums = [sum(time_of(lengths[i], even) for row in step[a : a + 8] for i in row) for a in (0, 8, 16)]
    assert max(sums) <= 1.01 * min(sums)


def test_rows_keep_documents_apart(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [[11, 12, 13], [21, 22], [31], [41, 42, 43, 44]], 6)
    rows = opened(folder, TokenBudget(10, 6, 3, 1, 4), multiple=4)
    batch = rows.batch("train", 0, 0, 3)
    lengths = rows.lengths("train", 0, 0, 3)
    assert batch["input_ids"].shape == (3, int(lengths["labels"].max()))
    for row, documents in enumerate(rows.rows("train", 0, 0, 3)):
        tokens, labels, positions = (batch[name][row].tolist() for name in ("input_ids", "labels", "position_ids"))
        own = [t for t in tokens if t]
        assert [t // 10 - 1 for t, p in zip(own, positions, strict=False) if p == 0] == documents
        assert positions[len(own) :] == [0] * (len(tokens) - len(own))
        assert labels == [t if t and p else IGNORED for t, p in zip(tokens, positions, strict=True)]
        assert lengths["input_ids"][row] == min(-(-len(own) // 4) * 4, 6)
    assert NextToken(("labels",)).targets(batch) == 10 - 4


def test_a_row_without_documents_has_no_target(tmp_path: Path) -> None:
    rows = opened(prepared(tmp_path, [[1, 2, 3, 4]], 4), TokenBudget(4, 4, 3, 1, 4))
    batch = rows.batch("train", 0, 0, 3)
    assert sorted((batch["labels"] != IGNORED).sum(1).tolist()) == [0, 0, 3]
    assert sorted(rows.lengths("train", 0, 0, 3)["labels"].tolist()) == [1, 1, 4]


def test_labels_of_first_tokens_are_kept_where_they_are_predicted(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [[1, 2], [3, 4]], 4)
    assert opened(folder, TokenBudget(4, 4, 1, 1, 4), MaskedToken(9, 0.15)).batch("train", 0, 0, 1)["labels"].min() > 0


def test_the_same_documents_whatever_the_rows(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    folder = prepared(tmp_path, [draw.integers(1, 99, n).tolist() for n in draw.integers(1, 12, 30)], 12)
    few, many = (opened(folder, TokenBudget(40, most, n, copies, 8)) for most, n, copies in ((40, 4, 1), (12, 8, 2)))
    for step in (0, 1, 7):
        assert few.documents("train", 5, step) == many.documents("train", 5, step)
        one, other = few.batch("train", 5, step, 4), many.batch("train", 5, step, 8)
        assert sorted(one["labels"][one["labels"] != IGNORED]) == sorted(other["labels"][other["labels"] != IGNORED])


def test_micro_batch_ids_stand_for_others_in_one_step_alone(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    folder = prepared(tmp_path, [draw.integers(1, 99, n).tolist() for n in draw.integers(1, 12, 30)], 12)
    rows = opened(folder, TokenBudget(40, 12, 8, 1, 8), multiple=4)
    fields = ("input_ids", "labels", "position_ids")
    feed, arranged = (Feed(rows, rows.task, fields, 5, 8, 2, torch.device("cpu"), torch.float64) for _ in range(2))
    order = (3, 0, 2, 1)
    arranged.prefetch("train", 1)
    arranged.arrange(1, order)
    for step in (0, 1, 2):
        for mb in range(4):
            other = order[mb] if step == 1 else mb
            assert arranged.lengths("train", step, mb) == feed.lengths("train", step, other)
            one, two = arranged.inputs("train", step, mb), feed.inputs("train", step, other)
            assert all(torch.equal(one[name], two[name]) for name in fields)
        assert arranged.targets("train", step) == feed.targets("train", step)
        arranged.drop("train", step)


@pytest.mark.parametrize(
    ("how", "left"), [("split", [[1, 2, 3], [4, 5], [6]]), ("truncate", [[1, 2, 3], [6]]), ("drop", [[6]])]
)
def test_long_documents(how: str, left: list[list[int]], tmp_path: Path) -> None:
    folder = prepared(tmp_path, [[1, 2, 3, 4, 5], [6]], 3, how)
    column = Arrays.open(folder).columns["train"]["input_ids"]
    assert isinstance(column, Ragged)
    assert [column.values[a:b].tolist() for a, b in zip(column.offsets, column.offsets[1:], strict=False)] == left


def test_a_document_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)document 1 has 5 tokens and a row holds 3 .*split, truncate or drop"):
        prepared(tmp_path, [[6], [1, 2, 3, 4, 5]], 3)
    with pytest.raises(SpecError, match="every document has more than 2 tokens"):
        prepared(tmp_path, [[1, 2, 3], [1, 2, 3]], 2, "drop")


def test_a_resumed_run_whose_documents_do_not_fit_is_refused(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [[1, 2, 3, 4, 5], [6]], 5)
    with pytest.raises(SpecError, match=r"train\.microbatch_tokens: 4, and a document of this run has 5 tokens"):
        opened(folder, TokenBudget(10, 4, 4, 1, 8))


def test_a_mask_that_hides_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="attention_mask hides tokens"):
        prepared(tmp_path, [[1, 2, 3], [6]], 5, attention_mask=[[1, 1, 0], [1]])


def test_a_profile_runs_some_of_the_rows_of_a_step(tmp_path: Path) -> None:
    """It asks for fewer than hold a step's documents, which all of them have to."""
    job = minimal_job(
        {"hf": "llama"}, {"type": "arrays", "path": str(tmp_path / "rows.npz")}, "auto",
        batch=None, tokens_per_step=400, microbatch_tokens=50,
    )  # fmt: skip
    few = job.model_copy(update={"train": job.train.model_copy(update={"batch": 2})})
    budgets = [token_budget(one, 1, Mock(even_length=lambda: 64)) for one in (job, few)]
    assert [budget.rows for budget in budgets if budget is not None] == [15, 15]
    rows = [list(range(1, 1 + n)) for n in (50, 7, 33, 26, 41, 12, 50, 3) * 4]
    data = prepared(tmp_path, rows, 50)
    every, some = (opened(data, budget) for budget in budgets if budget is not None)
    for step in range(6):
        assert some.rows("train", 0, step, 2) == every.rows("train", 0, step, 15)[:2]
