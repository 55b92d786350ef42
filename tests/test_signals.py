"""The first signal ends a command in order, the second at once; nothing is started but a Python."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypipe.observe.run_dir import ask_to_end_soon, ask_to_pause, asked_to_stop, go_on
from raypipe.signals import Interrupted, Terminated, end_on_signals, kept_handlers, waiting


@pytest.fixture(autouse=True)
def pythons_own_handlers() -> Iterator[None]:
    """Begin with Python's handlers: a Ray that an earlier test started in this process has left its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


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
        assert received() is None
        signal.raise_signal(signal.SIGTERM)
        assert received() == signal.SIGTERM


def test_handlers_are_as_before_and_the_users_stay() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with end_on_signals():
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.raise_signal(signal.SIGTERM)
            with kept_handlers():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does
            assert signal.getsignal(signal.SIGTERM) is mine
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
    ask_to_pause(tmp_path, "more devices")
    ask_to_end_soon(tmp_path, "SIGTERM")
    stop = asked_to_stop(tmp_path)
    assert stop is not None
    assert (stop.why, stop.pauses, stop.interrupts) == ("SIGTERM", True, True)
    go_on(tmp_path)
    assert asked_to_stop(tmp_path) is None
