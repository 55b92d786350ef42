"""Compiled stages in the store; those that are missing are compiled first, each in a Ray task beside training.

A stored stage is one file: what goes into each piece and comes out, and the Python modules that Inductor has generated.
Who finds it need not trace the stage again, nor import what traces. The modules load the kernels that lie in torch's
cache beside it, and are as trustworthy as those: code that this user's processes have written.

For a GPU the process that compiles sees that GPU, where Triton loads what it tries. It builds the stage on the host and
traces it with tensors that have no memory, so that all it takes there is a CUDA context. Those that compile for one GPU
take turns, each until it ends, so that there is one such context at a time; where steps run beside it, plans count it
(``TrainSpec.compiles_beside``).
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import fx, nn

import raypipe
from raypipe.compat import torch_private
from raypipe.files import write_whole
from raypipe.models import build_model
from raypipe.models.task import Task
from raypipe.runtime.compiled.layout import Gradient, GraphLayout, InputSlot, Interface, RandomPlaces
from raypipe.runtime.compiled.needs import Needs, StageNeeds, opaque
from raypipe.runtime.compiled.program import Compiled, CompiledStage, Outcome, StagePart
from raypipe.runtime.compiled.toolchain import VARIABLE, use_cache
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import CutReport, StageReport, first_line
from raypipe.runtime.setup.setup import Setup, build_stage, io_specs_of
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.schedule.sharding import StageKey
from raypipe.tensor.group import TracedGroup, current_group, group_of_thread

Stored = tuple[list[StagePart], CutReport]
"""A compiled stage whose pieces are Python modules, and the consequences of its cut."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
NICENESS = 10
"""Compilation leaves the processor to whoever trains."""
SWITCH_S = 0.0005
"""How often the interpreter changes threads while programs are loaded beside a step; Python's 5 ms would be waited for
at every one of the step's operations."""


_CLASSES: list[Any] = [CutReport, GraphLayout, Gradient, InputSlot, Interface, RandomPlaces, StagePart, TensorSpec]
"""All that a stored stage is made of, beside numbers, texts and dtypes."""


def read_stage(path: Path) -> Stored | None:
    """Read a compiled stage; None if it is missing or damaged."""
    try:
        with torch.serialization.safe_globals(_CLASSES):
            content = io.BytesIO(gzip.decompress(path.read_bytes()))  # gzip has a checksum
            stored: Stored = torch.load(content, weights_only=True)
    except Exception:  # what the reader raises of damage, or of another raypipe's file, may be anything
        return None
    return stored


def write_stage(path: Path, stored: Stored) -> None:
    """Write a compiled stage, whole or not at all."""
    content = io.BytesIO()
    torch.save(stored, content)
    write_whole(path, gzip.compress(content.getvalue()))


@dataclass(frozen=True)
class SeenGpu:
    """A worker's GPU, and what lets another process of its host see it as the worker does."""

    device: str
    visible: str | None
    """``CUDA_VISIBLE_DEVICES``; None where it is not set."""
    uuid: str
    """The GPU's own name, under which those that compile for it take turns."""

    @classmethod
    def of(cls, device: torch.device) -> SeenGpu | None:
        """Return this process's GPU; None for a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(str(device), os.environ.get(VISIBLE), str(properties.uuid))


def compile_stage(setup: Setup, stage: int, needs: StageNeeds, path: Path, gpu: SeenGpu | None = None) -> Stored | str:
    """Compile a stage and store it; return the reason where it cannot be. It runs in a process of its own.

    ``gpu``: that of the worker; None for a CPU.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    if gpu is not None:  # before anything asks for the devices: Ray hides them from what has reserved none
        os.environ.pop(VISIBLE, None)
        os.environ |= {} if gpu.visible is None else {VISIBLE: gpu.visible}
    os.environ[VARIABLE] = str(path.parents[1])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(setup.job.train.deterministic)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a copy of the stage may be compiled for another worker of this host
            stored = read_stage(path)
            if stored is None:
                if gpu is not None:
                    _take_turns(path.with_name(f"{gpu.uuid}.turn"))
                stored = _compiled(setup, stage, needs, torch.device("cpu" if gpu is None else gpu.device))
                write_stage(path, stored)
            return stored
    except Exception as error:  # torch raises anything at all; the stage then runs eagerly
        return first_line(error)


_TURNS: list[int] = []
"""Files that are locked until this process has ended, and its context with it."""


def _take_turns(path: Path) -> None:
    """Wait until no other process compiles for the same GPU."""
    _TURNS.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    fcntl.flock(_TURNS[-1], fcntl.LOCK_EX)


def _compiled(setup: Setup, stage: int, needs: StageNeeds, device: torch.device) -> Stored:
    from raypipe.runtime.compiled.compiler import compile_parts, source_of, trace_stage
    from raypipe.runtime.compiled.trace import aim

    plan = build_model(setup.job, setup.fields, setup.tensor_rank, setup.parallel)
    module = build_stage(setup, plan, io_specs_of(setup, plan), stage, torch.device("cpu"))
    aim(module, device)
    with group_of_thread(TracedGroup(setup.tensor)):
        traced = trace_stage(module, needs, device)
    module.release()  # only shapes are needed from here on
    try:
        return compile_parts(traced, source_of), traced.kept
    finally:
        torch_private.shutdown_compile_workers()  # Triton's, which outlive a process that Ray ends


def begin_task(*request: Any) -> ray.ObjectRef[Stored | str]:
    """Begin to compile a stage on this node, beside whatever runs here; ``request``: see ``compile_stage``."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(compile_stage)  # its niceness ends with the process
    begun: ray.ObjectRef[Stored | str] = task.options(
        name=f"compile stage {request[1]}", scheduling_strategy=here
    ).remote(*request)
    return begun


class StoredStages:
    """Fetches compiled stages. ``begin`` and ``find`` together take as long as the compilation."""

    def __init__(self, setup: Setup, executor: Executor, begin: Callable[..., Any] = begin_task) -> None:
        self.setup, self.executor = setup, executor
        self._folder, self._begin = use_cache() / "stages", begin
        self._needs = Needs.of_run(setup, executor)
        self._limit_s = setup.job.train.compile_timeout_s
        gpu = SeenGpu.of(executor.settings.device)
        self._beside = () if gpu is None else (gpu,)
        self._began = time.monotonic()
        self._wanted: dict[StageKey, tuple[StageNeeds, Path]] = {}
        self._stored: dict[Path, Stored | str] = {}
        """Stages, or the reasons why they are not compiled."""
        self._tasks: dict[Path, ray.ObjectRef[Stored | str]] = {}

    def begin(self, keys: Sequence[StageKey]) -> list[StageReport]:
        """Begin to compile the stages that are not stored, all at the same time; return those that cannot be."""
        refused = []
        setup = replace(self.setup, samples=None)  # which only workers use
        for key in keys:
            module = self.executor.modules[key]
            reason = opaque(module)
            if reason is None:
                try:
                    needs = self._needs.of(key)
                    path = self._folder / stage_key(setup, key[0], module, needs, self.executor.settings.device)
                    stored = read_stage(path)
                    if stored is not None:
                        self._stored[path] = stored
                    elif path not in self._tasks:
                        self._tasks[path] = self._begin(setup, key[0], needs, path, *self._beside)
                    self._wanted[key] = needs, path
                    continue
                except Exception as error:  # shapes that cannot be known, losses that cannot be sent; eager runs
                    reason = first_line(error)
            refused.append(StageReport(*key, time.monotonic() - self._began, reason))
        return refused

    def find(self) -> Outcome:
        """Wait for the stages and load them."""
        for path, task in self._tasks.items():
            self._stored[path] = self._result(task)
        return [(key, *self._load(key, needs, self._stored[path])) for key, (needs, path) in self._wanted.items()]

    def _result(self, task: ray.ObjectRef[Stored | str]) -> Stored | str:
        try:
            result: Stored | str = ray.get(task, timeout=max(0.0, self._began + self._limit_s - time.monotonic()))
            return result
        except GetTimeoutError:
            ray.cancel(task, force=True)
            return "it is not compiled within train.compile_timeout_s"
        except RayError as error:
            return f"the task that compiles it has failed: {first_line(error)}"

    @property
    def compiles(self) -> bool:
        """Return whether tasks compile some of the stages."""
        return bool(self._tasks)

    def close(self) -> None:
        """End the tasks that still compile.

        Those alone: to cancel a task that has just ended may end this process, by a failed check in Ray's own code.
        """
        tasks = [task for path, task in self._tasks.items() if path not in self._stored]
        _, running = ray.wait(tasks, num_returns=len(tasks), timeout=0) if tasks else ((), ())
        for task in running:
            ray.cancel(task, force=True)

    def _load(self, key: StageKey, needs: StageNeeds, stored: Stored | str) -> tuple[CompiledStage | None, StageReport]:
        reason = stored
        if not isinstance(stored, str):
            parts, kept = stored
            try:
                with _often_switching():
                    compiled = CompiledStage.of(self.executor.modules[key], parts, function_of)
                seconds = time.monotonic() - self._began
                counts = needs.lengths, needs.eager_share, len(needs.validation)
                return compiled, StageReport.of(key, seconds, kept, *counts)
            except Exception as error:  # kernels that cannot be loaded, or built again
                reason = first_line(error)
        return None, StageReport(*key, time.monotonic() - self._began, str(reason))


def function_of(source: str) -> Compiled:
    """Return the function of a module that Inductor has generated; its kernels lie in torch's cache."""
    # Whoever compiled it on this processor has tried its vector instructions.
    torch_private._inductor.config.cpp.vec_isa_ok = True
    torch_private._inductor.config.compile_threads = 1  # no processes to compile what is compiled already
    function: Compiled = torch_private.PyCodeCache.load(source).call
    return function


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


def stage_key(setup: Setup, stage: int, module: StageModule, needs: StageNeeds, device: torch.device) -> str:
    """Return the key of one stage for a device."""
    digest = hashlib.sha256(str(device).encode())  # its number is in the programs
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        digest.update(f"{properties.name} {properties.major}.{properties.minor} {torch.version.cuda}".encode())
    model = json.dumps(setup.job.model.model_dump(mode="json"), sort_keys=True)
    for one in (*_host(), _sources(), model, str(setup.job.train.dtype), str(setup.cut[stage]), *_modules(module)):
        digest.update(one.encode() + b"\0")
    for example in (*needs.examples, *needs.validation):
        loss = _described(example.loss)
        said = (example.samples, example.arrived, sorted(example.inputs.items()), example.segment, example.autocast)
        digest.update(repr((said, loss, example.lengths, example.training)).encode() + b"\0")
    needed = needs.needed
    digest.update(f"{current_group().size} tensor ranks".encode())
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
