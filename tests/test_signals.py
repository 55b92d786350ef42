"""The first signal ends a command in order, the second at once; nothing is started but a Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from raypipe.errors import TerminationError
from raypipe.observe.run_dir import INTERRUPT, PAUSE, ask, asked_to_stop, go_on
from raypipe.signals import Interrupted, Terminated, end_on_signals, held, waiting

pytestmark = pytest.mark.usefixtures("pythons_own_handlers")


def _answer(error: Exception) -> None:
    """Raise an error after a signal, whether that is raised or only noted."""
    with suppress(Terminated):
        signal.raise_signal(signal.SIGTERM)
    raise error


@pytest.mark.parametrize(
    ("number", "kind", "status"), [(signal.SIGTERM, Terminated, 143), (signal.SIGINT, Interrupted, None)]
)
def test_the_first_one_is_raised_where_the_command_is(number, kind, status) -> None:
    with pytest.raises(kind) as caught, end_on_signals():
        signal.raise_signal(number)
    assert getattr(caught.value, "code", None) == status
    assert isinstance(caught.value, SystemExit if status else KeyboardInterrupt)


def test_a_wait_only_notes_it() -> None:
    with end_on_signals(), end_on_signals(), waiting() as received:
        with waiting():
            pass
        assert received() is None
        signal.raise_signal(signal.SIGTERM)
        assert received() == signal.SIGTERM


@pytest.mark.parametrize("fails", [False, True])
def test_what_must_not_be_left_half_done_is_done_first(fails: bool) -> None:
    done = []

    @held()
    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        done.append(True)
        if fails:
            raise OSError("it fails also")

    with pytest.raises(Terminated), end_on_signals():
        work()
    assert done


@pytest.mark.parametrize("theirs", [SystemExit(1), ImportError("initialization failed")], ids=["Ray", "ortools"])
def test_what_others_make_of_a_handlers_exception_is_the_signals_again(theirs: BaseException) -> None:
    """Ray's core replaces it where it waits, and a module of C++ while it is imported."""

    @end_on_signals()
    def get() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Terminated:
            raise theirs from None

    with pytest.raises(Terminated) as caught, end_on_signals():
        get()
    assert (caught.value.code, caught.value.message) == (143, "ended by SIGTERM")
    said = TerminationError("", "ended after step 3", "raypipe train --resume")
    with pytest.raises(TerminationError, match="after step 3"), end_on_signals():
        _answer(said)


def test_other_errors_stay() -> None:
    with pytest.raises(OSError, match="disk"), end_on_signals(), waiting():
        _answer(OSError("the disk is full"))
    with pytest.raises(SystemExit, match=r"^3$"), end_on_signals():
        sys.exit(3)  # a script's own


def test_handlers_are_as_before_and_the_users_stay() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with end_on_signals():
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_have_no_handlers() -> None:
    seen: list[object] = []

    def work() -> None:
        with end_on_signals(), waiting() as received:
            seen.append(received())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_one_ends_at_once() -> None:
    code = """
import signal
from raypipe.signals import end_on_signals, waiting
with end_on_signals(), waiting():
    signal.raise_signal(signal.SIGINT)
    print("goes on", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("never")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "goes on\n", "")


def test_any_verb_ends_with_the_shells_status() -> None:
    code = """
import signal, sys
from raypipe import cli
def verb(argv):
    signal.raise_signal(int(argv[0]))
cli._run = verb
cli.main()
"""
    for number, status, said in ((15, 143, "ended by SIGTERM"), (2, 130, "interrupted")):
        words = [sys.executable, "-c", code, str(number)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (status, f"{said}\n")


def test_a_run_is_asked_for_a_checkpoint_before_anything_else(tmp_path: Path) -> None:
    ask(tmp_path, PAUSE, "more devices")
    ask(tmp_path, INTERRUPT, "SIGTERM")
    stop = asked_to_stop(tmp_path)
    assert stop is not None
    assert (stop.why, stop.pauses, stop.interrupts) == ("SIGTERM", True, True)
    go_on(tmp_path)
    assert asked_to_stop(tmp_path) is None


WAITS = """
import time
from raypipe import signals
signals.LOOK_S = 0.05
with signals.end_on_signals(), signals.ends_without(lambda: {there}, lambda number: f"{{number}}: it is gone"):
    with signals.waiting() as received:
        print("ready", flush=True)
        while received() is None or not {there}:
            time.sleep(0.05)
        time.sleep(0.5)
"""


@pytest.mark.parametrize("there", [True, False])
def test_what_waits_for_something_that_is_gone_ends(there: bool) -> None:
    program = [sys.executable, "-c", WAITS.format(there=there)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == ((0, "") if there else (143, "15: it is gone\n"))


FORKS = """
import os, sys, threading, time
from pathlib import Path
from raypipe.signals import fork_apart

pid, stay = Path(sys.argv[1]), threading.Event()

def work():
    print("not seen")
    pid.with_suffix(".part").write_text(str(os.getpid()))
    pid.with_suffix(".part").rename(pid)
    time.sleep({sleeps})

if {thread}:
    threading.Thread(target=stay.wait).start()
ended = fork_apart(work)
stay.set()
while ended is not None and not (pid.exists() and ({sleeps} or ended())):
    time.sleep(0.01)
print(ended if ended is None else ended())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
@pytest.mark.parametrize(
    ("sleeps", "thread", "printed"), [(0, False, "True"), (600, False, "False"), (0, True, "None")]
)
def test_what_is_forked_ends_with_its_process(sleeps: int, thread: bool, printed: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = [sys.executable, "-c", FORKS.format(sleeps=sleeps, thread=thread), str(file)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == (f"{printed}\n", "")
    assert file.exists() != thread
    if not thread:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
