"""The stages of a device from the store; those that are missing are compiled first, each in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from raypipe.runtime.compiled.inductor.cache import use_cache
from raypipe.runtime.compiled.needs import Needs, StageNeeds, opaque
from raypipe.runtime.compiled.stage import CompiledStage
from raypipe.runtime.compiled.stored.document import is_sound, read_stage
from raypipe.runtime.compiled.stored.helper_process import HelperProcess, stored_in
from raypipe.runtime.compiled.stored.key import stage_key
from raypipe.runtime.compiled.stored.limit import note_use
from raypipe.runtime.compiled.stored.request import Request
from raypipe.runtime.executor.compile_report import StageReport, first_line
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.update.gradients import StageKey

Outcome = list[tuple[StageKey, CompiledStage | None, StageReport]]
SWITCH_S = 0.0005
"""How often the interpreter changes threads while programs are loaded beside a step; Python's 5 ms would be waited for
at every one of the step's operations."""


class StoredStages:
    """Fetches compiled stages. ``begin`` and ``find`` together take as long as the compilation."""

    def __init__(self, setup: Setup, executor: Executor) -> None:
        self.setup, self.executor = setup, executor
        self.cache = use_cache()
        self._needs = Needs.of_run(setup, executor)
        self._limit_s = setup.job.train.compile_timeout_s
        self._began = time.monotonic()
        self._wanted: dict[StageKey, tuple[StageNeeds, Path, HelperProcess | None]] = {}

    def begin(self, keys: Sequence[StageKey]) -> list[StageReport]:
        """Begin to compile the stages that are not stored, all at the same time; return those that cannot be."""
        refused = []
        for key in keys:
            module = self.executor.modules[key]
            reason = opaque(module)
            if reason is None:
                try:
                    needs = self._needs.of(key)
                    folder = stored_in(self.cache, stage_key(self.setup, key[0], module, needs))
                    request = Request(self.setup, key[0], needs, folder, self.cache)
                    known = any(folder == other for _, other, _ in self._wanted.values())
                    missing = not known and not is_sound(folder)
                    self._wanted[key] = needs, folder, HelperProcess(request) if missing else None
                    continue
                except Exception as error:  # shapes that cannot be known, losses that cannot be sent; eager runs
                    reason = first_line(error)
            refused.append(StageReport(*key, time.monotonic() - self._began, reason))
        return refused

    def find(self) -> Outcome:
        """Wait for the stages and load them."""
        reasons = {}
        for _, folder, process in self._wanted.values():
            if process is not None:
                reasons[folder] = process.reason(self._began + self._limit_s)
        return [(key, *self._load(key, needs, folder, reasons.get(folder)))
                for key, (needs, folder, _) in self._wanted.items()]  # fmt: skip

    @property
    def compiles(self) -> bool:
        """Whether processes compile some of the stages."""
        return any(process is not None for _, _, process in self._wanted.values())

    def close(self) -> None:
        """End the processes that still compile."""
        for _, _, process in self._wanted.values():
            if process is not None:
                process.end()

    def _load(
        self, key: StageKey, needs: StageNeeds, folder: Path, reason: str | None
    ) -> tuple[CompiledStage | None, StageReport]:
        found = None
        if reason is None:
            import torch._inductor.config as inductor

            inductor.cpp.vec_isa_ok = True  # whoever compiled it on this processor has tried its vector instructions
            try:
                with _often_switching():
                    found = read_stage(folder, self.executor.modules[key])
            except Exception as error:  # kernels that cannot be loaded, or built again
                reason = first_line(error)
        seconds = time.monotonic() - self._began
        if found is None:
            return None, StageReport(*key, seconds, reason or f"{folder} was damaged meanwhile")
        compiled, kept = found
        note_use(folder)
        return compiled, StageReport.of(key, seconds, kept, needs.lengths, needs.eager_share, len(needs.validation))


@contextmanager
def _often_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
