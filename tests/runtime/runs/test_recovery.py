"""A worker that dies at a chosen moment of a step is replaced; the others live on, and no loss changes by a bit."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.runtime import calls
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.reserve import Reservation, reserve
from raypipe.runtime.worker.worker_group import WaitingWorkers, WorkerGroup, start_worker_group, titles_of
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES
from tests.runtime.runs.dying_worker import dying
from tests.runtime.runs.small_runs import Done, drive, job_for, new_driver, small_job

pytestmark = pytest.mark.runs
STEP = 2
TWO_COPIES = {"schedule": "1f1b", "stages": 2, "replicas": 2}
FOLDED = {"schedule": "zb-v", "stages": 2, "replicas": 2, "microbatch": 1}
BOTH_WAYS = {"schedule": "chimera", "stages": 4, "microbatch": 1}
EXPERTS = {"schedule": "1f1b", "stages": 1, "replicas": 4, "experts": 2}
MIXTRAL = {"hf": "mixtral", "config": FAMILIES["mixtral"], "sequence": 16}
TRAIN: dict[str, Any] = {"steps": 5, "eval_every": 3, "checkpoint_every": 3}
CPU = DeviceRequest(cpus=1.0, gpus=0.0)


@dataclass
class Mortals:
    """Four devices whose workers serve one case after another, like those of a run that changes its plan."""

    held: Reservation
    file: Path
    """Says who dies, and when."""
    waiting: WaitingWorkers = field(default_factory=WaitingWorkers)
    workers: WorkerGroup | None = None
    """Those of the case that runs."""

    def pids(self) -> list[int]:
        assert self.workers is not None
        return [at.pid for at in self.workers.locations]

    def run(self, job: JobSpec, directory: Path, log: type[RunLog] = RunLog) -> list[bool]:
        """Run a job to its end; return, by rank, whether its worker has lived."""
        driver = new_driver(job, directory, log=log)
        titles = titles_of(driver.schedule, job.parallel.replicas, 1)
        with driver.copies:
            self.workers = start_worker_group(titles, self.held.for_attempt(), dying(self.file), waiting=self.waiting)
            before = self.pids()
            try:
                driver.run(self.workers, None, 0)
            finally:
                self.workers.leave()
        assert not self.file.exists()  # who was to die has died
        return [a == b for a, b in zip(before, self.pids(), strict=True)]


@pytest.fixture(scope="module")
def mortals(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortals]:
    result = Mortals(reserve(4, CPU, 60.0), tmp_path_factory.mktemp("mortals") / "dies")
    yield result
    result.waiting.end()
    result.held.give_back()


@pytest.fixture(scope="module")
def undisturbed_runs() -> dict[str, Done]:
    """By what is asked for."""
    return {}


@pytest.mark.parametrize(
    ("parallel", "train", "rank", "moment", "repeated"),
    [
        (TWO_COPIES, {}, 3, "summed 0", 1),
        (TWO_COPIES, {}, 0, "write 0", None),
        (FOLDED, {"clip": 100.0}, 1, "told 0", None),
        (BOTH_WAYS, {"clip": 0.5}, 1, "U 1", None),
        (EXPERTS, {"clip": 0.5}, 1, "BW 0", 1),
        *exhaustive(
            (TWO_COPIES, {}, 0, "F 0", 1),
            (TWO_COPIES, {"clip": 0.5}, 1, "agreed 0", None),
            (TWO_COPIES, {}, 3, "ended 0", None),
            (FOLDED, {"clip": 100.0}, 2, "U 1", None),
            (BOTH_WAYS, {}, 3, "BW 1", 1),
            (EXPERTS, {"clip": 0.5}, 2, "agreed 0", None),
            ({**TWO_COPIES, "context": 2}, {"clip": 0.5}, 3, "BW 0", 1),
        ),
    ],
    ids=[
        "gradients-not-told", "while-it-writes-its-shard", "optimistic-and-told", "between-its-updates",
        "whose-experts-one-other-has", "first-task",
        "before-its-update", "result-not-delivered", "between-its-optimistic-updates", "in-a-backward",
        "which-others-wait-for", "in-a-sequence-that-two-divide",
    ],
)  # fmt: skip
def test_a_worker_is_replaced(
    parallel: dict[str, Any], train: dict[str, Any], rank: int, moment: str, repeated: int | None, text_folder: Path,
    stage_pool, mortals: Mortals, undisturbed_runs: dict[str, Done], tmp_path: Path,
) -> None:  # fmt: skip
    if "experts" in parallel:
        job = job_for(MIXTRAL, text_folder, parallel, **TRAIN, **train)
    else:
        job = small_job(text_folder, parallel, **TRAIN, **train)
    asked = json.dumps([parallel, train])
    if asked not in undisturbed_runs:
        undisturbed_runs[asked] = drive(job, stage_pool, tmp_path / "undisturbed")
    undisturbed = undisturbed_runs[asked]
    mortals.file.write_text(f"{rank} {STEP} {moment}")
    directory = tmp_path / "disturbed"
    lived = mortals.run(job, directory)
    rows = read_rows(directory / METRICS)
    assert [r["loss"] for r in rows if "loss" in r] == undisturbed.losses
    assert [r["val_loss"] for r in rows if "val_loss" in r] == undisturbed.val_losses
    assert [r["grad_norm"] for r in rows if "loss" in r] == [r["grad_norm"] for r in undisturbed.rows]
    (event,) = [e for e in read_rows(directory / EVENTS) if e["event"] == "recovered"]
    assert event["steps_repeated"] in ((0, 1) if repeated is None else (repeated,))
    newest, skipped = latest(directory / "checkpoints")
    assert newest is not None
    assert (newest.name, skipped) == ("step-00000005", [])
    for path in (directory / "checkpoints").glob("step-*"):  # whatever was being written when the worker died
        result = open_checkpoint(path)
        assert {file.name for file in path.iterdir()} == {"manifest.json", *result.files.values()}
    given_up = [e for e in read_rows(directory / EVENTS) if "step 3 is given up" in e.get("message", "")]
    assert len(given_up) == (moment == "write 0")
    assert lived == [r != rank for r in range(len(lived))]


@pytest.mark.parametrize(
    ("parallel", "rank", "moment"),
    [
        ({"schedule": "1f1b", "stages": 4}, 1, "BW 0"),
        ({"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero3"}, 2, "F 1"),
        *exhaustive(
            ({"schedule": "1f1b", "stages": 4}, 3, "ended 0"),
            ({"schedule": "zb-v", "stages": 4, "microbatch": 1}, 0, "U 0"),
            ({"schedule": "1f1b", "stages": 2, "replicas": 2, "experts": 2}, 1, "BW 0"),
        ),
    ],
    ids=["one-copy", "its-share-of-all-state", "result-not-delivered", "between-its-updates", "whose-experts-none-has"],
)
def test_a_worker_without_a_twin_is_replaced_from_copies(
    parallel: dict[str, Any], rank: int, moment: str, text_folder: Path, stage_pool, mortals: Mortals, tmp_path: Path
) -> None:
    """All go on from the newest copy, with at most one step that had ended run again."""
    train: dict[str, Any] = {"steps": 6, "eval_every": 2, "clip": 0.5}

    def job(**more: Any) -> JobSpec:
        if "experts" in parallel:
            return job_for(MIXTRAL, text_folder, {"microbatch": 2, **parallel}, **train, **more)
        return small_job(text_folder, parallel, {"layers": 8}, **train, **more)

    undisturbed = drive(job(), stage_pool, tmp_path / "undisturbed")
    mortals.file.write_text(f"{rank} 3 {moment}")
    lived = mortals.run(job(copy_every=1), tmp_path / "disturbed")
    rows = read_rows(tmp_path / "disturbed" / METRICS)
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in rows if "loss" in r] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in undisturbed.rows
    ]
    assert [r["val_loss"] for r in rows if "val_loss" in r] == undisturbed.val_losses
    (event,) = [e for e in read_rows(tmp_path / "disturbed" / EVENTS) if e["event"] == "recovered"]
    assert (event["source"], event["ranks"]) == ("neighbour", [rank])
    assert event["steps_repeated"] <= 2  # with the one that was running
    assert event["stuck"].startswith("first stuck: ")
    assert f"device {rank} is in " in event["stuck"] or moment == "ended 0"
    assert lived == [r != rank for r in range(len(lived))]


@pytest.mark.parametrize(("rank", "moment"), [(1, "agreed 0"), *exhaustive((2, "summed 0"), (3, "BW 1"))], ids=str)
def test_a_worker_is_replaced_in_the_middle_of_a_call(
    rank: int, moment: str, text_folder: Path, mortals: Mortals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the steps of that call that count, all are logged although no device has returned them."""
    job = small_job(text_folder, TWO_COPIES, steps=15, clip=0.5)
    result = []
    for call_s in (0.0, 1e9):
        monkeypatch.setattr(calls, "CALL_S", call_s)
        if call_s:
            mortals.file.write_text(f"{rank} 9 {moment}")  # the call has the steps 5 to 12, from 0
        mortals.run(job, tmp_path / str(call_s))
        result.append([row for row in read_rows(tmp_path / str(call_s) / METRICS) if "loss" in row])
    undisturbed, disturbed = ([{key: row[key] for key in ("step", "loss", "grad_norm")} for row in of] for of in result)
    assert disturbed == undisturbed
    (event,) = [e for e in read_rows(tmp_path / "1000000000.0" / EVENTS) if e["event"] == "recovered"]
    assert event["step"] in (9, 10)
    assert event["steps_repeated"] in (0, 1)


@pytest.mark.parametrize(
    ("parallel", "train", "source", "times"),
    [
        (TWO_COPIES, {}, "replica", 1),
        *exhaustive(
            (TWO_COPIES, {}, "replica", 20),
            (FOLDED, {"clip": 100.0}, "replica", 3),
            ({"schedule": "1f1b", "stages": 4}, {"copy_every": 4}, None, 3),
        ),
    ],
    ids=["twin", "twenty-times", "optimistic", "saved"],
)
def test_workers_that_are_told_to_end_go_between_two_steps(
    parallel: dict[str, Any], train: dict[str, Any], source: str | None, times: int, text_folder: Path, stage_pool,
    mortals: Mortals, tmp_path: Path,
) -> None:  # fmt: skip
    """A SIGTERM at a random moment, and another one after that: no step is repeated, and the others live on."""
    job = small_job(text_folder, parallel, {"layers": 8}, steps=30 * (times + 1), **train)
    plain = job.model_copy(update={"train": job.train.model_copy(update={"copy_every": 0})})
    undisturbed = drive(plain, stage_pool, tmp_path / "undisturbed")
    draw, told, lived = random.Random(0), [], list[bool]()

    class Tells(RunLog):
        def metric(self, row: dict[str, Any]) -> None:
            super().metric(row)
            if len(told) < times and len(told) == len(lived) and row["step"] > 30 * len(told) + 2:
                rank = draw.randrange(4)
                told.append((rank, mortals.pids()))
                threading.Timer(draw.uniform(0, 0.1), os.kill, (told[-1][1][rank], signal.SIGTERM)).start()

        def event(self, kind: str, **fields: Any) -> None:
            super().event(kind, **fields)
            if kind == "recovered":
                (rank, before), after = told[-1], mortals.pids()
                same = [a == b for a, b in zip(before, after, strict=True)]
                lived.append(fields["ranks"] == [rank] and same == [r != rank for r in range(4)])

    mortals.run(job, tmp_path / "disturbed", Tells)
    rows, events = (read_rows(tmp_path / "disturbed" / name) for name in (METRICS, EVENTS))
    assert [r["loss"] for r in rows if "loss" in r] == undisturbed.losses
    recovered = [e for e in events if e["event"] == "recovered"]
    assert [e["steps_repeated"] for e in recovered] == [0] * times
    assert all(e["source"] == source or source is None for e in recovered)
    assert lived == [True] * times
    assert sum("(SIGTERM), goes after step" in e.get("message", "") for e in events) == times
