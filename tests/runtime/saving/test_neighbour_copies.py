"""Copies in the memory of keepers: the newest complete ones become a checkpoint, bit for bit, whoever is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raypipe.checkpoint import Snapshot, open_checkpoint
from raypipe.errors import CheckpointError, TransportError
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.executor.step import Written
from raypipe.runtime.recovery.nonfinite import NonFiniteError
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies, start_index
from raypipe.runtime.saving.saves import RunCheckpoints
from raypipe.runtime.state.keeper import Keeper
from raypipe.runtime.state.shard_writer import SaveBegun, send_snapshot
from tests.processes import descendants
from tests.runtime.runs.small_runs import small_job

pytestmark = pytest.mark.runs


def state(rank: int, step: int) -> dict[str, torch.Tensor]:
    """More than one block of it."""
    torch.manual_seed(100 * step + rank)
    return {f"param/{rank}.w": torch.randn(3_000_001), f"optim/{rank}.w/step": torch.tensor(float(step))}


class Run:
    """Two workers on this node, whose state the test sends."""

    def __init__(self, text_folder: Path, directory: Path) -> None:
        self.directory, self.told = directory, []
        self.log = RunLog(directory)
        job = small_job(text_folder, {"schedule": "1f1b", "stages": 2})
        self.checkpoints = RunCheckpoints(job, directory, self.log, lambda *told: self.told.append(told[0]))
        self.copies = NeighbourCopies(2, self.log)
        node = ray.get_runtime_context().get_node_id()
        self.locations = [SimpleNamespace(peer=SimpleNamespace(node=node)) for _ in range(2)]
        self.calls: list[tuple[Any, ...]] = []

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert method == "copy"
        self.calls = list(arguments)
        return []

    def copy(
        self, step: int, ranks: Sequence[int] = (0, 1), silent: Sequence[int] = (), beside: Sequence[Any] = ()
    ) -> None:
        """Copy the state after a step; only some of the workers come to the end, and the ``silent`` do not say so.

        ``beside``: keepers that get it too.
        """
        self.copies.call(self, step, left_out=1)  # type: ignore[arg-type]
        self.copies.begun(step, [SaveBegun(None, 0.0, 0.0, ()) for _ in range(2)])
        for rank in ranks:
            number, keepers = self.calls[rank]
            snapshot = Snapshot()
            snapshot.take(state(rank, step))
            handed = send_snapshot([*keepers, *beside], number, f"rank-{rank:05d}", snapshot)
            if rank not in silent:
                self.copies.heard([Written(rank, number, handed.info, 0.1, handed.lost)])

    def on_cpus(self) -> bool:
        return True

    def kill_keepers(self) -> None:
        for keeper in {id(one): one for _, keepers in self.calls for one in keepers}.values():
            ray.kill(keeper)

    def notices(self) -> list[str]:
        return [e["message"] for e in read_rows(self.directory / EVENTS) if e["event"] == "notice"]


@pytest.fixture
def run(local_ray: None, text_folder: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(text_folder, tmp_path)
    yield made
    made.copies.__exit__()


def test_devices_read_the_newest_copy_that_keepers_have_whole(run: Run) -> None:
    """Also of a worker that died before it could report it, but not of more steps than are known."""
    run.copy(2)
    run.copy(4, silent=[1])
    run.copy(6, ranks=[0])
    assert run.copies.newest(1, {1}) is None
    run.copy(4, silent=[1])
    run.copy(6, ranks=[0])
    copy = run.copies.newest(6, {1})
    assert copy is not None
    assert (copy.step, copy.meta) == (4, {"left_out": 1})
    wanted = state(0, 4) | state(1, 4)
    assert copy.keys == tuple(sorted(wanted))
    result = copy.read(wanted)
    assert all(torch.equal(result[key], value) for key, value in wanted.items())
    with pytest.raises(CheckpointError, match="holds no param/9"):
        copy.read(["param/9.w"])
    run.kill_keepers()
    with pytest.raises(TransportError, match="is kept by nobody any more"):
        copy.read(wanted)


def test_the_newest_complete_copies_become_a_checkpoint(run: Run) -> None:
    assert [step for step in range(7) if run.copies.due(step)] == [0, 2, 4, 6]
    run.copy(2)
    run.copy(4)
    run.copy(6, ranks=[0])  # the other worker has died meanwhile
    assert run.copies.restore(run.checkpoints, newest=3)
    done, path = run.checkpoints.newest
    assert (done, run.told) == (4, [4])
    assert path is not None
    result = open_checkpoint(path)
    assert result.meta["left_out"] == 1
    for rank in range(2):
        saved = state(rank, 4)
        held = result.read(saved)
        assert all(torch.equal(held[key], value) for key, value in saved.items())
    assert not run.copies.restore(run.checkpoints, newest=4), "it is no newer"


def test_calls_may_be_ahead_of_what_workers_report(run: Run) -> None:
    run.copies.call(run, 2, left_out=0)  # type: ignore[arg-type]
    first = run.calls
    run.copies.call(run, 4, left_out=0)  # type: ignore[arg-type]
    for rank, (number, keepers) in enumerate(first):
        snapshot = Snapshot()
        snapshot.take(state(rank, 2))
        info, *_ = send_snapshot(keepers, number, f"rank-{rank:05d}", snapshot)
        run.copies.begun(4, [SaveBegun(None, 0.0, 0.0, (Written(rank, number, info, 0.1),))])
    assert run.copies.restore(run.checkpoints, newest=0)
    assert run.checkpoints.newest[0] == 2


def test_a_worker_may_be_a_copy_ahead(run: Run) -> None:
    """Its shard of the next copy is there before the other one's of this copy, which then is complete."""
    numbers = []
    for step in (2, 4):
        run.copies.call(run, step, left_out=0)  # type: ignore[arg-type]
        numbers.append(run.calls)
    for rank, copy in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (number, keepers), snapshot = numbers[copy][rank], Snapshot()
        snapshot.take(state(rank, 2 * copy + 2))
        info, *_ = send_snapshot(keepers, number, f"rank-{rank:05d}", snapshot)
        run.copies.heard([Written(rank, number, info, 0.1)])
    assert run.copies.restore(run.checkpoints, newest=0)
    assert (run.checkpoints.newest[0], run.notices()) == (4, [])


def test_two_copies_may_be_lost_with_one_keeper(run: Run) -> None:
    for step in (2, 4):
        run.copies.call(run, step, left_out=0)  # type: ignore[arg-type]
    numbers = [run.calls[0][0] + 1, run.calls[0][0]]
    run.kill_keepers()
    run.copies.heard([Written(0, number, None, 0.1, lost=True) for number in numbers])
    assert len(run.notices()) == 1


def test_what_a_keeper_died_with_is_said_and_another_one_follows(run: Run) -> None:
    run.copy(2)
    run.kill_keepers()
    assert not run.copies.restore(run.checkpoints, newest=0)
    assert run.notices()[0].startswith("the copies of step 2 are lost")
    run.copy(4, ranks=[0])
    assert "another follows" in run.notices()[1]
    run.copy(6)
    assert run.copies.restore(run.checkpoints, newest=0)
    assert run.checkpoints.newest[0] == 6


def test_a_keeper_that_is_gone_costs_no_copy_that_another_has(run: Run) -> None:
    """The loss of a node takes the keepers of all that send to it, while those of other nodes have what was sent."""
    gone = ray.remote(Keeper).options(num_cpus=0).remote()
    ray.get(gone.lives.remote())
    ray.kill(gone)
    run.copy(2, beside=[gone])
    copy = run.copies.newest(2, {1})
    assert copy is not None
    wanted = state(0, 2) | state(1, 2)
    assert all(torch.equal(value, wanted[key]) for key, value in copy.read(wanted).items())


def test_nobody_waits_for_a_keeper_whose_node_is_gone(run: Run) -> None:
    run.copy(2)
    (_, (keeper,)), *_ = run.calls
    pid = next(pid for pid, title in descendants(os.getpid()).items() if title.startswith("ray::Keeper"))
    os.kill(pid, signal.SIGSTOP)
    try:
        sent = ray.remote(_sends).options(num_cpus=0).remote(keeper)
        assert not ray.wait([sent], timeout=0.5)[0]
        run.copies.lost(ray.get_runtime_context().get_node_id())
        assert ray.get(sent, timeout=10) == (None, True, 0.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _sends(keeper: Any) -> tuple[Any, ...]:
    snapshot = Snapshot()
    snapshot.take({"w": torch.ones(3)})
    return tuple(send_snapshot([keeper], -9, "rank-00000", snapshot))


def test_a_shard_of_which_a_block_is_missing_is_not_whole() -> None:
    keeper = Keeper()
    keeper.take(-1, "rank-00000", np.zeros(3, dtype=np.uint8))
    with pytest.raises(TransportError, match="did not arrive"):
        keeper.finish(-1, "rank-00000", 4, b"")
    assert keeper.whole() == {}


def test_the_next_driver_finds_the_copies_of_one_that_died(run: Run) -> None:
    index = start_index()
    dead, run.copies = run.copies, NeighbourCopies(2, run.log, index)
    run.copy(2)
    run.copy(4)
    run.copy(6, ranks=[0])  # then the driver dies
    last = run.calls[0][0]
    run.copies = NeighbourCopies(2, run.log, index)
    assert run.copies.restore(run.checkpoints, newest=2)
    assert run.checkpoints.newest[0] == 4
    run.copy(6)
    assert run.calls[0][0] < last, "numbers are those of one copy each"
    run.copies = NeighbourCopies(2, run.log, index)
    assert run.copies.restore(run.checkpoints, newest=4)
    state_then, result = state(1, 6), open_checkpoint(run.checkpoints.newest[1])
    assert all(torch.equal(result.read([key])[key], value) for key, value in state_then.items())
    run.copies.forget()
    assert not NeighbourCopies(2, run.log, index).restore(run.checkpoints, newest=4)
    ray.kill(index)
    dead.__exit__()


def test_the_next_driver_goes_on_from_what_keepers_have_whole(run: Run) -> None:
    """Also where the one that died has not heard of it, but not from more steps than it has logged."""
    index = start_index()
    dead, run.copies = run.copies, NeighbourCopies(2, run.log, index)
    calls = []
    for step in (2, 4):
        run.copies.call(run, step, left_out=0)  # type: ignore[arg-type]
        calls.append(run.calls)
    for step, copy in zip((2, 4), calls, strict=True):
        for rank, (number, keepers) in enumerate(copy):
            snapshot = Snapshot()
            snapshot.take(state(rank, step))
            info, *_ = send_snapshot(keepers, number, f"rank-{rank:05d}", snapshot)
            if step == 2:
                run.copies.heard([Written(rank, number, info, 0.1)])
    for most in (3, 4):
        assert NeighbourCopies(2, run.log, index).restore(run.checkpoints, newest=0, most=most)
        assert run.checkpoints.newest[0] == 2 * (most // 2)
    ray.kill(index)
    dead.__exit__()


def test_an_index_that_is_gone_is_followed_by_another(run: Run) -> None:
    index = start_index()
    dead, run.copies = run.copies, NeighbourCopies(2, run.log, index)
    run.copy(2)
    ray.kill(index)  # and the keepers with it
    run.copies.heard([Written(0, run.calls[0][0], None, 0.1, lost=True)])
    assert not run.copies.restore(run.checkpoints, newest=0)
    next_driver = NeighbourCopies(2, run.log, index)
    assert "the process that knew" in run.notices()[-1]
    next_driver.__exit__()
    dead.__exit__()


def test_copies_of_another_way_are_forgotten(run: Run) -> None:
    run.copy(2)
    run.copies.forget()
    assert not run.copies.restore(run.checkpoints, newest=0)


def test_what_is_not_finite_is_no_copy(run: Run) -> None:
    run.copies.call(run, 2, left_out=0)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match=r"param/0\.w is not finite"):
        run.copies.begun(2, [SaveBegun("param/0.w", 0.0, 0.0, ()), SaveBegun(None, 0.0, 0.0, ())])
    assert not run.copies.restore(run.checkpoints, newest=0)
