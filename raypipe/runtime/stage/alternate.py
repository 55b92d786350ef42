"""Alternate two functions: while one waits for a collective of a group that divides layers, the other computes.

Each runs in a thread of its own, but never both at once: a turn ends when a collective has been launched, and the
function's next turn begins by waiting for its result. So any code can alternate, a backward pass too, without being
cut into pieces; and the order of collectives and of gradient accumulation is the same in every run and on every device.

Source: Merak section 5.3 (sub-pipelined tensor parallelism).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar, get_args

import torch

from raypipe.models.keyed_random import current_keys, swap_keys
from raypipe.tensor.group import Axis, TensorGroup, current_group, group_of_thread, meanwhile

T = TypeVar("T")


class _Turns:
    """Passes the turn between the two threads, 0 and 1."""

    def __init__(self) -> None:
        self._keys = current_keys()
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._over = [False, False]
        self.failed = False
        self.held_s = [0.0, 0.0]
        """Seconds for which each thread had the turn."""
        self._since = time.perf_counter()

    def begin(self, who: int) -> None:
        """Wait for this thread's first turn; thread 0 has the first of all."""
        if who:
            self._gates[who].acquire()
        self._check_other()

    def pass_on(self, who: int) -> None:
        """Let the other thread run; return when it passes the turn back or has finished."""
        if self._over[1 - who]:
            return
        own_keys = swap_keys(self._keys)
        self._count(who)
        self._gates[1 - who].release()
        self._gates[who].acquire()
        swap_keys(own_keys)
        self._check_other()

    def _check_other(self) -> None:
        if self.failed:
            raise _OtherFailedError

    def end(self, who: int, failed: bool) -> None:
        """Finish this thread: it takes no more turns."""
        self._count(who)
        self._over[who] = True
        self.failed = self.failed or failed
        self._gates[1 - who].release()

    def _count(self, who: int) -> None:
        now = time.perf_counter()
        self.held_s[who] += now - self._since
        self._since = now


class _OtherFailedError(Exception):
    """The other thread failed. This one stops too, because its peers would miss the other's collectives."""


class Alternation:
    """Runs pairs of functions alternately; keeps the second thread between pairs."""

    def __init__(self) -> None:
        # The nesting level is raised so that the thread is never in its outermost autocast block: at the end of one,
        # torch would drop the casts of weights that both halves share (``executor.casts``).
        self._helper = ThreadPoolExecutor(
            1, thread_name_prefix="raypipe-second-half", initializer=torch.autocast_increment_nesting
        )
        self.first_s = 0.0
        """Seconds for which the first function of the newest pair had the turn; the second had the rest."""

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run both functions and return both results; ``first`` runs in the calling thread and has the first turn.

        Both see the caller's tensor group, random keys and modes (gradients, autocast). On a GPU the backward runs in
        these threads too, not in autograd's own.

        Raises:
            Exception: the error of the function that failed first.
        """
        turns = _Turns()
        callers_modes = _modes()
        groups: dict[Axis, TensorGroup] = {axis: current_group(axis) for axis in get_args(Axis)}

        def run(who: int, work: Callable[[], T]) -> T:
            turns.begin(who)
            failed = True
            try:
                with ExitStack() as inside:
                    inside.enter_context(callers_modes())
                    for axis, group in groups.items():
                        inside.enter_context(group_of_thread(group, axis))
                    inside.enter_context(meanwhile(lambda: turns.pass_on(who)))
                    result = work()
                failed = False
                return result
            finally:
                turns.end(who, failed)

        other = self._helper.submit(run, 1, second)
        try:
            result = run(0, first)
        except _OtherFailedError:
            other.result()
            raise
        except BaseException:
            other.exception()  # it notices the failure at its next turn; wait until it has ended
            raise
        found = result, other.result()
        self.first_s = turns.held_s[0]
        return found


def _modes() -> Callable[[], AbstractContextManager[None]]:
    """Capture torch's per-thread modes of the calling thread; the result is a context manager that restores them."""
    gradients = torch.is_grad_enabled()
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    gpu = torch.cuda.current_device() if "cuda" in kinds else None

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            if gpu is not None:
                stack.enter_context(torch.cuda.device(gpu))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    return enter
