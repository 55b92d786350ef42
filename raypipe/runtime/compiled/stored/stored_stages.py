"""Read the stages of a device from the store; those that are missing are compiled first, each in its own process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import raypipe
from raypipe.models.task import Task
from raypipe.runtime.compiled.inductor.toolchain import VARIABLE, use_cache
from raypipe.runtime.compiled.needs import Needs, StageNeeds, opaque
from raypipe.runtime.compiled.stage import CompiledStage
from raypipe.runtime.compiled.stored.document import is_sound, read_stage
from raypipe.runtime.compiled.stored.limit import note_use
from raypipe.runtime.compiled.stored.request import Request
from raypipe.runtime.executor.compile_report import StageReport, first_line
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import StageKey

# Start the process that compiles a stage (``helper``), and wait for it.


class HelperProcess:
    """Compiles one stage while this process goes on."""

    def __init__(self, request: Request) -> None:
        packed = request.packed()
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until it ends
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raypipe.runtime.compiled.stored.helper"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended, and ``reason`` says why
            assert self._process.stdin is not None
            self._process.stdin.write(len(packed).to_bytes(8, "big") + packed)
            self._process.stdin.flush()  # not closed: the process ends when this one does

    def reason(self, deadline: float) -> str | None:
        """Wait for the process; return why the stage is not compiled, None if it is.

        ``deadline``: time on the monotonic clock at which it is ended.
        """
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return "it is not compiled within train.compile_timeout_s"
        finally:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._output.seek(0)
        answer = self._output.read().decode().strip()
        if status == 0 and answer:
            reason: str | None = json.loads(answer.splitlines()[-1])["reason"]
            return reason
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the process that compiles it ended with status {status}: {said[-1][:200] if said else 'no message'}"

    def end(self) -> None:
        """End the process and the compilers that it has started, unless it has ended."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def stored_in(cache: Path, key: str) -> Path:
    """Return the folder of a stored stage."""
    return cache / "stages" / key


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
        return [
            (key, *self._load(key, needs, folder, reasons.get(folder)))
            for key, (needs, folder, _) in self._wanted.items()
        ]

    @property
    def compiles(self) -> bool:
        """Return whether processes compile some of the stages."""
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


# The key under which a compiled stage is stored: a digest of all that its graphs follow from.
#
# That is the stage's modules with their settings, code and parameters, what they are given, the pieces wanted, the
# sources of raypipe that make the graphs, torch's version, Inductor's settings, and the host's processor and compiler.

SOURCES = (
    "capture",
    "models",
    "tensor",
    "runtime/backward",
    "runtime/compiled",
    "runtime/executor",
    "runtime/setup",
    "runtime/stage",
)
"""Rooms of raypipe whose code ends up in the graphs, or reads them."""

SETTINGS = "TORCHINDUCTOR_"
"""How environment variables begin that change what Inductor makes; where its cache lies is no such change."""


def stage_key(setup: Setup, stage: int, module: StageModule, needs: StageNeeds) -> str:
    """Return the key of one stage."""
    digest = hashlib.sha256()
    model = json.dumps(setup.job.model.model_dump(mode="json"), sort_keys=True)
    for one in (*_host(), _sources(), model, str(setup.job.train.dtype), str(setup.cut[stage]), *_modules(module)):
        digest.update(one.encode() + b"\0")
    for example in (*needs.examples, *needs.validation):
        loss = _described(example.loss)
        said = (example.samples, example.arrived, sorted(example.inputs.items()), example.segment, example.autocast)
        digest.update(repr((said, loss, example.lengths, example.training)).encode() + b"\0")
    needed = needs.needed
    wanted = (needed.joint, needed.split, needed.recomputes, needed.keeps, needs.budget)
    digest.update(repr((wanted, module.segments, module.takes_gradient, module.gives_gradient)).encode())
    return digest.hexdigest()


def _host() -> Iterator[str]:
    yield from (torch.__version__, sys.version, platform.machine(), torch.backends.cpu.get_cpu_capability())
    yield from (os.environ.get("CXX", ""), str(torch.are_deterministic_algorithms_enabled()))
    yield from (
        f"{name}={set_to}"
        for name, set_to in sorted(os.environ.items())
        if name.startswith(SETTINGS) and name != VARIABLE
    )


@cache
def _sources() -> str:
    root = Path(raypipe.__file__).parent
    digest = hashlib.sha256()
    for room in SOURCES:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _described(value: Any) -> str:
    """Describe a loss by its kind and its settings, alike in every process: no addresses, no order of a set."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case Mapping():
            return repr(sorted((_described(name), _described(one)) for name, one in value.items()))
        case set() | frozenset():
            return repr(sorted(map(_described, value)))
        case list() | tuple():
            return repr([_described(one) for one in value])
        case Task():
            return f"{type(value).__module__}.{type(value).__qualname__} {_described(vars(value))}"
    return repr(value)


def _modules(module: nn.Module) -> Iterator[str]:
    """Describe modules: what they are, their settings, the code of captured ones, their tensors."""
    for path, one in module.named_modules():
        settings = {name: v for name, v in vars(one).items() if isinstance(v, bool | int | float | str | None)}
        yield f"{path} {type(one).__module__}.{type(one).__qualname__} {sorted(settings.items())}"
        if isinstance(one, fx.GraphModule):
            yield str(one.code)
    for path, parameter in module.named_parameters():
        yield f"{path} {tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {parameter.requires_grad}"
    for path, buffer in module.named_buffers():
        yield f"{path} {tuple(buffer.shape)} {buffer.stride()} {buffer.dtype}"
