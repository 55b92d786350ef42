"""Compiled stages made by the worker itself: traced before the first step, compiled in a thread.

So it is done on GPUs, whose programs are not stored: another process would need the GPU to make them. And so it is done
where layers are measured, without a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.runtime.compiled.compiler import Build, StageCompiler, TracedStage
from raypipe.runtime.compiled.inductor.compile_graph import compile_graph
from raypipe.runtime.compiled.needs import Needs
from raypipe.runtime.compiled.stored.stored_stages import Outcome
from raypipe.runtime.executor.compile_report import StageReport
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.update.gradients import StageKey


class InProcess:
    """Compiles stages here; ``build`` compiles one graph."""

    def __init__(self, setup: Setup, executor: Executor, build: Build = compile_graph) -> None:
        self._compiler = StageCompiler(executor, Needs.of_run(setup, executor), build)
        self._traced: dict[StageKey, TracedStage] = {}

    def begin(self, keys: Sequence[StageKey]) -> list[StageReport]:
        """Trace the stages: a trace sets the module's queue, which a running step uses. Return those that fail."""
        found = {key: self._compiler.trace(key) for key in keys}
        self._traced = {key: one for key, one in found.items() if isinstance(one, TracedStage)}
        return [one for one in found.values() if isinstance(one, StageReport)]

    def find(self) -> Outcome:
        """Compile the stages."""
        return [(key, *self._compiler.compile(key, traced)) for key, traced in self._traced.items()]

    @property
    def compiles(self) -> bool:
        """Return whether there are stages to compile: none is stored."""
        return bool(self._traced)

    def close(self) -> None:
        """Nothing can be given up: a thread compiles to the end."""
