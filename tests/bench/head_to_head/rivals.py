"""Starts the rivals' processes and asks them for blocks; between orders they sleep on a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from tests.bench.head_to_head.blocks import Block, Order, RankReport, joined


class Rival:
    """One group of processes: several under torchrun, or a single one."""

    def __init__(self, name: str, folder: Path, processes: int, threads: int) -> None:
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
            self._process = subprocess.Popen([sys.executable, *worker], env=environment)
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
