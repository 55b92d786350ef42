"""Two pieces of work that take turns: where one waits for its tensor group, the other computes.

Each runs in a thread of its own, but never both at once: a turn ends when a collective has begun, and its result is
waited for at the beginning of the next turn. So any code can take part, a backward pass too, without being cut into
pieces; and the order of everything - collectives, sums into gradients - is the same in every run and on every device.

Source: Merak section 5.3 (sub-pipelined tensor parallelism).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch

from raypipe.models.keyed_random import current_keys, swap_keys
from raypipe.tensor.group import current_group, group_of_thread, meanwhile

T = TypeVar("T")


class _Turns:
    """Whose turn it is: 0 or 1."""

    def __init__(self) -> None:
        self._keys = current_keys()
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._over = [False, False]
        self.failed = False

    def begin(self, who: int) -> None:
        """Wait for the first turn; 0 has it."""
        if who:
            self._gates[who].acquire()
        self._go_on()

    def pass_on(self, who: int) -> None:
        """Let the other go on; back when it waits in its turn, or is through."""
        if self._over[1 - who]:
            return
        mine = swap_keys(self._keys)
        self._gates[1 - who].release()
        self._gates[who].acquire()
        swap_keys(mine)
        self._go_on()

    def _go_on(self) -> None:
        if self.failed:
            raise _OtherFailedError

    def end(self, who: int, failed: bool) -> None:
        """No more turns for this one."""
        self._over[who] = True
        self.failed = self.failed or failed
        self._gates[1 - who].release()


class _OtherFailedError(Exception):
    """The other one failed: what it would have done, this one's peers will wait for in vain."""


class Alternation:
    """Runs pairs of functions in turns; keeps the second thread between them."""

    def __init__(self) -> None:
        # Never in the outermost autocast block of its thread: at the end of one, the copies of weights that both halves
        # share (``casts``) would go.
        self._helper = ThreadPoolExecutor(
            1, thread_name_prefix="raypipe-second-half", initializer=torch.autocast_increment_nesting
        )

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """What both return. ``first`` runs in the calling thread and begins.

        Both see the caller's tensor group, random keys and modes (gradients, autocast). On a GPU the backward runs in
        these threads too, not in autograd's own.

        Raises:
            Exception: what the one that failed first raised.
        """
        turns = _Turns()
        like_caller = _modes()
        group = current_group()

        def run(who: int, work: Callable[[], T]) -> T:
            turns.begin(who)
            failed = True
            try:
                with like_caller(), group_of_thread(group), meanwhile(lambda: turns.pass_on(who)):
                    result = work()
                failed = False
                return result
            finally:
                turns.end(who, failed)

        later = self._helper.submit(run, 1, second)
        try:
            one = run(0, first)
        except _OtherFailedError:
            later.result()
            raise
        except BaseException:
            later.exception()  # it has been told, and leaves
            raise
        return one, later.result()


def _modes() -> Callable[[], AbstractContextManager[None]]:
    """What torch keeps per thread, as it is here: enters another thread, or this one again."""
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
