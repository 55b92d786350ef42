"""The norm's shares in lists, passed on in log2 hops: every rank has every number, whatever the number of ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive

HERE = Path(__file__).parent


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [3, *exhaustive(2, 5, 8)])
def test_all_ranks_have_all_numbers(ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "list_world.py"), str(rank), str(ranks), str(port)],
            cwd=HERE.parents[2], env=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, [err for _, err in ended]
    assert [out.strip() for out, _ in ended] == ["told"] * (ranks - 1) + [""]
