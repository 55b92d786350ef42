"""Runs a case: every contender once a round, in turn, so that a slower minute of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from raypipe.data import prepare
from raypipe.errors import RaypipeError
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.train import make_plan
from tests.bench.head_to_head.cases import DEVICES, PEERS, UNCUT, Case
from tests.bench.head_to_head.raypipe_side import DriverCost, RaypipeSide
from tests.bench.head_to_head.rivals import Block, Order, Rival

PEERS_PYTHON = Path(__file__).parents[3] / ".venv-peers/bin/python"
"""The interpreter of the environment that ``make peers`` makes: what is here, and DeepSpeed."""
IDEAL = "one process, 1 thread, micro-batches"
Say = Callable[[str], None]
Turn = tuple[str, Callable[[], None]]
"""A contender's name, and what runs one block of it."""


@dataclass(frozen=True, slots=True)
class Rivals:
    """The rivals' processes: one pair of one thread each, and single processes of one and of two threads."""

    pair: Rival
    one_thread: Rival
    two_threads: Rival
    peers: Rival | None
    """A pair whose interpreter has DeepSpeed; none where that was not to be had."""


@contextmanager
def rivals(folder: Path) -> Iterator[Rivals]:
    """Start them all; they end with the block."""
    started: list[Rival] = []
    try:
        for name, processes, threads in (("pair", DEVICES, 1), ("one", 1, 1), ("two", 1, DEVICES)):
            started.append(Rival(name, folder, processes, threads))
        if PEERS_PYTHON.exists():
            started.append(Rival("peers", folder, DEVICES, 1, PEERS_PYTHON))
        yield Rivals(*started[:3], peers=started[3] if len(started) > 3 else None)
    finally:
        for rival in started:
            rival.stop()


@dataclass(slots=True)
class CaseResult:
    """All blocks of a case; ``blocks[contender][round]``."""

    case: Case
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    driver: dict[str, list[DriverCost]] = field(default_factory=dict)
    same_order: dict[str, bool] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    first_steps: list[float] = field(default_factory=list)
    busy_when_idle: list[float] = field(default_factory=list)
    """Processors' busy share just before each round, when no contender runs."""

    def add(self, contender: str, block: Block) -> None:
        """Keep a block."""
        self.blocks.setdefault(contender, []).append(block)


def run_case(
    case: Case, ray: RaypipeSide, others: Rivals, folder: Path, rounds: int, say: Say, pipelines_only: bool = False,
    compiled: bool = False,
) -> CaseResult:  # fmt: skip
    """Measure ``case``; raypipe's Ray and the rivals' processes are up already. ``compiled``: raypipe takes a turn with
    compiled stages too."""
    result = CaseResult(case := case.in_folder(folder))
    jobs: dict[str, tuple[JobSpec, Plan]] = {}
    for name in case.schedules:
        try:
            job = case.job(name, case.steps)
            jobs[name] = job, make_plan(job)
        except RaypipeError as error:
            result.skipped[name] = str(error)
    if not jobs:
        return result
    data = folder / f"data-{case.name}"
    any_job, any_plan = next(iter(jobs.values()))
    prepare(any_job.data, any_job.model.sequence, data)
    turns = _pipelines(case, jobs, ray, others, data, result, compiled)
    plain = _plain(case, any_job, any_plan, others, data, result)
    turns += plain[:1] if pipelines_only else plain
    for number in range(rounds):
        time.sleep(1.0)
        share = psutil.cpu_times_percent(1.0)
        result.busy_when_idle.append(1 - (share.idle + share.iowait) / 100)
        # Every second round runs backwards: nobody always follows the same neighbour.
        for name, turn in turns if number % 2 == 0 else turns[::-1]:
            say(f"{case.name}: round {number + 1} of {rounds}: {name}")
            turn()
    for number in range(rounds):
        say(f"{case.name}: first step of fresh actors, {number + 1} of {rounds}")
        result.first_steps.append(ray.first_step_ratio(any_job, any_plan, data, case.warm_up))
    return result


def _pipelines(
    case: Case, jobs: dict[str, tuple[JobSpec, Plan]], ray: RaypipeSide, others: Rivals, data: Path, result: CaseResult,
    compiled: bool,
) -> list[Turn]:  # fmt: skip
    turns: list[Turn] = []
    for name, (job, plan) in jobs.items():

        def ours(name: str = name, job: JobSpec = job, plan: Plan = plan) -> None:
            block, cost = ray.block(job, plan, data, case.warm_up)
            result.add(f"raypipe {name}", block)
            result.driver.setdefault(name, []).append(cost)

        def ours_compiled(name: str = name, job: JobSpec = job, plan: Plan = plan) -> None:
            train = job.train.model_copy(update={"compile": "inductor", "compile_first": True})
            block, _ = ray.block(job.model_copy(update={"train": train}), plan, data, case.warm_up)
            result.add(f"compiled {name}", block)

        def theirs(name: str = name, job: JobSpec = job, plan: Plan = plan) -> None:
            kind = UNCUT.get(name, "pipeline")
            result.add(f"torch {name}", others.pair.block(Order(kind, job, plan, data, case.steps)))
            result.same_order[name] = others.pair.same_order

        turns += [(f"raypipe {name}", ours), (f"torch {name}", theirs)]
        turns += [(f"raypipe {name}, compiled", ours_compiled)] * compiled
        turns += _peers(case, name, Order("", job, plan, data, case.steps), others, result)
    return turns


def _peers(case: Case, name: str, order: Order, others: Rivals, result: CaseResult) -> list[Turn]:
    def turn(peer: str, processes: Rival) -> None:
        result.add(f"{peer} {name}", processes.block(replace(order, kind=peer)))

    turns: list[Turn] = []
    for peer in (peer for peer, known in PEERS.items() if name in known):
        processes = others.pair if peer == "fsdp2" else others.peers
        if processes is None:
            result.skipped["DeepSpeed, accelerate"] = "make peers installs them, with an index that has them"
        else:
            turns.append((f"{peer} {name}", partial(turn, peer, processes)))
    return turns


def _plain(case: Case, job: JobSpec, plan: Plan, others: Rivals, data: Path, result: CaseResult) -> list[Turn]:
    turns: list[Turn] = []
    order = Order("plain", job, plan, data, case.steps)
    whole = replace(order, whole=True)
    two, pair = f"one process, {DEVICES} threads", "DistributedDataParallel"
    for title, rival, request in (
        (IDEAL, others.one_thread, order),
        (f"{two}, micro-batches", others.two_threads, order),
        (f"{two}, whole mini-batch", others.two_threads, whole),
        (f"{pair}, micro-batches", others.pair, replace(order, kind="ddp")),
        (f"{pair}, whole share", others.pair, replace(whole, kind="ddp")),
    ):

        def plain(title: str = title, rival: Rival = rival, request: Order = request) -> None:
            result.add(title, rival.block(request))

        turns.append((title, plain))
    return turns
