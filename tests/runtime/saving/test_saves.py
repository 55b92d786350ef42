"""When a save counts as done: its shards come in any order, late or never, and nothing half written is committed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.checkpoint import latest, open_checkpoint, write_shard
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.calls import Ticket
from raypipe.runtime.executor.step import Written
from raypipe.runtime.recovery.nonfinite import NonFiniteError
from raypipe.runtime.saving.saves import RunCheckpoints, Save, Saves
from raypipe.runtime.state.shard_writer import SaveBegun
from raypipe.schedule.lowering.asynchronous import WHOLE
from tests.runtime.runs.small_runs import small_job
from tests.runtime.test_calls import CLOCK, STEP

RANKS = 2


class Workers:
    """Workers that do nothing: the test says what they report."""

    actors = tuple(range(RANKS))

    def call(self, *_: object) -> list[Any]:
        return []

    answers = call


class Run:
    """The saves of an attempt, and what they have told."""

    def __init__(self, text_folder: Path, directory: Path) -> None:
        self.directory, self.told = directory, []
        self.log = RunLog(directory)
        job = small_job(text_folder, {"schedule": "1f1b", "stages": 2})
        checkpoints = RunCheckpoints(job, directory, self.log, lambda *told: self.told.append(told[0]))
        self.saves = Saves(checkpoints, self.log)

    def begin(self, step: int, *written: Written, waited_s: float = 0.0, broken: str | None = None) -> Save:
        save, _ = self.saves.call(Workers(), step)  # type: ignore[arg-type]
        results = [
            SaveBegun(broken if rank == 0 else None, 0.1, waited_s, tuple(w for w in written if w.rank == rank))
            for rank in range(RANKS)
        ]
        self.saves.begun(save, results, {"loss": 1.0})
        return save

    def notices(self) -> list[str]:
        return [e["message"] for e in read_rows(self.directory / EVENTS) if e["event"] == "notice"]

    def close(self) -> None:
        self.saves.close()


@pytest.fixture
def run(text_folder: Path, tmp_path: Path):
    made = Run(text_folder, tmp_path)
    yield made
    made.close()


def written(save: Save, rank: int) -> Written:
    shard = write_shard(save.folder, f"rank-{rank:05d}", {f"param/{rank}.w": torch.full((2,), float(save.step))})
    return Written(rank, save.number, shard, 0.5)


@pytest.mark.parametrize("order", list(itertools.permutations(range(RANKS))))
def test_it_is_committed_when_the_last_shard_is_in(order: tuple[int, ...], run: Run) -> None:
    save = run.begin(4)
    assert run.saves.newest == 4
    first, last = (written(save, rank) for rank in order)
    run.saves.heard([first, first, None])
    run.saves.poll()
    assert run.told == []
    assert latest(run.directory / "checkpoints")[0] is None
    run.saves.heard([last])
    run.close()
    assert run.told == [4]
    assert open_checkpoint(save.folder).step == 4
    events = [e for e in read_rows(run.directory / EVENTS) if e["event"].startswith("checkpoint")]
    assert [(e["event"], e["stall_s"]) for e in events] == [("checkpoint_begun", 0.1), ("checkpoint", 0.1)]


def test_the_next_one_brings_what_is_left_of_the_one_before_and_waiting_is_said_once(run: Run) -> None:
    first = run.begin(2)
    second = run.begin(4, written(first, 0), written(first, 1), waited_s=2.0)
    assert run.told == [2]
    run.begin(6, written(second, 0), written(second, 1), waited_s=2.0)
    assert run.told == [2, 4]
    (notice,) = run.notices()
    assert notice.startswith("the checkpoint of step 4 waited 2.0 s until the one before was written")


def test_what_a_dead_worker_had_not_written_is_lost_and_the_one_before_stands(run: Run) -> None:
    first = run.begin(2)
    run.saves.heard([written(first, 0), written(first, 1)])
    second = run.begin(4)
    run.saves.heard([written(second, 0)])
    assert not run.saves.lost([0])  # its shard is there
    assert not run.saves.overdue
    assert not run.saves.lost([1])
    assert run.saves.overdue
    assert run.saves.newest < 4
    assert "step 4 is given up" in run.notices()[0]
    again = run.begin(4)  # the same folder, in which the worker that lives may still be writing
    assert again.folder == second.folder
    run.saves.heard([written(second, 0)])  # of the save that was given up
    run.saves.heard([written(again, 1)])
    run.saves.poll()
    assert run.told == [2]
    run.saves.heard([written(again, 0)])
    run.saves.drain(Workers(), [], 1.0)  # type: ignore[arg-type]
    assert run.told == [2, 4]
    assert open_checkpoint(again.folder).step == 4


def test_the_best_that_is_lost_is_told(run: Run) -> None:
    save = run.begin(2)
    save.best = True
    assert run.saves.lost([0])


def test_writes_that_came_with_steps_not_collected_are_committed_when_a_run_fails(run: Run) -> None:
    save = run.begin(2)
    of_rank = [[STEP, replace(STEP, written=written(save, rank))] for rank in range(RANKS)]
    ticket = Ticket("step", 4, [], CLOCK, (WHOLE, WHOLE))
    run.saves.drain(Workers(), [(None, ticket.reports(of_rank))], 1.0)  # type: ignore[arg-type]
    assert run.told == [2]
    assert open_checkpoint(save.folder).step == 2


def test_what_is_not_finite_is_no_checkpoint_but_the_one_before_is(run: Run) -> None:
    first = run.begin(2)
    with pytest.raises(NonFiniteError) as caught:
        run.begin(4, written(first, 0), written(first, 1), broken="param/0.w")
    assert caught.value.step == 4
    assert "param/0.w is not finite after the update" in caught.value.what
    assert run.told == [2]
    run.saves.drain(Workers(), [], 1.0)  # type: ignore[arg-type]
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == [first.folder.name]
