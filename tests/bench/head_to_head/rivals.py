"""Blocks, what a contender measured in its turn of a round, and the rivals' processes that are asked for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median

from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.runtime.executor.step import MOST_STEPS


@dataclass(frozen=True, slots=True)
class Order:
    """What a rival's process is asked to run: ``steps`` steps from the job's start weights."""

    kind: str
    """``pipeline``, ``ddp``, ``fsdp2``, ``ep``, ``plain``, ``deepspeed`` or ``accelerate``."""
    job: JobSpec
    plan: Plan
    data: Path
    steps: int
    whole: bool = False
    """Forward the process's whole share of the mini-batch at once, instead of accumulating micro-batches."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process measured."""

    begin: float
    ends: list[float]
    """End of each step on this host's monotonic clock, which all its processes share."""
    cpu: list[float]
    """Processor time this process had used, all threads, at the end of each step."""
    losses: list[float]
    """Per step, this process's part of the mini-batch loss; the parts add up."""
    same_order: bool = True
    """Its schedule has exactly raypipe's order of tasks."""
    peak_bytes: int = 0
    """Most memory this process held during the block (``peak_bytes``)."""


@dataclass(frozen=True, slots=True)
class Block:
    """One contender's turn."""

    step_s: list[float]
    """All steps of the block; the first holds warm-up."""
    cpu: list[float]
    """Processor time used by all devices at the end of each step."""
    losses: list[float]
    peak_bytes: int = 0
    """Most memory that one device's process held during the block."""

    def steady(self, warm_up: int) -> float:
        """Median step of the block, its first ``warm_up`` steps left out.

        Where there are many, the median over all runs of as many steps as raypipe takes in a call: of single steps,
        the median would leave out what lies between two calls.
        """
        steps = self.step_s[warm_up:]
        size = MOST_STEPS if len(steps) >= 2 * MOST_STEPS else 1
        return median(sum(steps[at : at + size]) / size for at in range(len(steps) - size + 1))

    def work(self, warm_up: int) -> float:
        """Mean processor time of a step over all devices: waiting costs none, a busy machine hardly any."""
        return (self.cpu[-1] - self.cpu[warm_up - 1]) / (len(self.cpu) - warm_up)


def joined(reports: Sequence[RankReport]) -> Block:
    """A block from all its ranks: a step lasts from the end of the step before, on the slowest rank, to its own."""
    ends = [max(at) for at in zip(*(r.ends for r in reports), strict=True)]
    starts = [min(r.begin for r in reports), *ends[:-1]]
    losses = [sum(parts) for parts in zip(*(r.losses for r in reports), strict=True)]
    cpu = [sum(used) for used in zip(*(r.cpu for r in reports), strict=True)]
    steps = [end - start for start, end in zip(starts, ends, strict=True)]
    return Block(steps, cpu, losses, max(r.peak_bytes for r in reports))


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def forget_peak(pid: int | str = "self") -> None:
    """Let the peak of a process's resident memory count from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int | str = "self") -> int:
    """Return the most memory a process has held since ``forget_peak``, pages of files and shared ones left out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return 1024 * (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"])


# Starts the rivals' processes and asks them for blocks; between orders they sleep on a socket.


class Rival:
    """One group of processes: several under torchrun, or a single one."""

    def __init__(
        self, name: str, folder: Path, processes: int, threads: int, python: Path | str = sys.executable
    ) -> None:
        address = str(folder / f"{name}.sock")
        worker = ["-m", "tests.bench.head_to_head.worker", address]
        if processes > 1:
            launcher = [
                "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
                "--master-port", str(_free_port()),
            ]  # fmt: skip
            worker = [*launcher, *worker]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with Listener(address, family="AF_UNIX") as listener:
            self._process = subprocess.Popen([str(python), *worker], env=environment, stdout=sys.stderr)
            links = [listener.accept() for _ in range(processes)]
        self._links: list[Connection] = [link for _, link in sorted((link.recv(), link) for link in links)]
        self.same_order = True
        """Whether every pipeline block so far had exactly raypipe's order of tasks."""

    def block(self, order: Order) -> Block:
        """Run one block on all its processes.

        Raises:
            RuntimeError: it failed in one of them.
        """
        for link in self._links:
            link.send(order)
        reports: list[RankReport] = []
        for link in self._links:
            answer = link.recv()
            if isinstance(answer, Exception):
                raise RuntimeError(f"{order.kind} failed in a rival's process: {answer!r}") from answer
            reports.append(answer)
        self.same_order = all(r.same_order for r in reports)
        return joined(reports)

    def stop(self) -> None:
        """End its processes."""
        for link in self._links:
            try:
                link.send(None)
                link.close()
            except OSError:
                pass  # it ended by itself
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
