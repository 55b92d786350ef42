"""The kernel's own count of waiting for a core, on a real process and on made-up ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from raypipe.observe.progress import CoreWait


def test_the_one_that_waited_most_counts(tmp_path: Path) -> None:
    def count(pid: int, ran: int, waited: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "schedstat").write_text(f"{ran} {waited} 7\n")

    count(1, 500, 900)  # of its start, which does not count
    count(2, 500, 0)
    wait = CoreWait(tmp_path)
    assert wait.share is None
    wait.follow([1, 2, 3])
    assert wait.share is None
    count(1, 600, 900)
    count(2, 560, 40)
    wait.update()
    assert wait.share == 0.4
    (tmp_path / "2" / "schedstat").unlink()  # it ended
    wait.update()
    assert wait.share == 0.4


def test_a_process_of_this_machine_is_read() -> None:
    """Whether it had to wait depends on what else runs here."""
    script = "import sys; sys.stdin.readline(); sum(range(10**6)); print(flush=True); sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdin is not None
        assert busy.stdout is not None
        wait = CoreWait()
        wait.follow([busy.pid])
        busy.stdin.write(b"\n")
        busy.stdin.flush()
        busy.stdout.readline()
        wait.update()
        busy.stdin.write(b"\n")
    if Path("/proc/self/schedstat").exists():
        assert wait.share is not None
        assert 0 <= wait.share < 1
