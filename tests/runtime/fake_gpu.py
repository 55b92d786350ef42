"""A GPU without a GPU: a device that computes on the CPU, and a list of where the host waited for it.

Tensors on ``FakeGpu.device`` hold their values on the CPU, and every operator on them passes through
``__torch_dispatch__``, so a whole step runs as on a GPU, with its numbers. Recorded as waits are: reading a value on
the host, copying between the devices in a way in which CUDA makes the host wait, and operators whose result's shape
depends on values. The device lags behind its host: an event is passed, and a copy to the host has its values, only
once ``advance`` says so or the host waits.

Kernels are issued to the current stream, and streams run beside each other but for the events they wait for. Two
accesses of one tensor's memory from two streams, of which one writes, and which no event orders, are a race; ``races``
lists them (vector clocks, as in torch's CUDA sanitizer).

torch allows one such device per process, for good. So tests that use it run in a process of their own.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

import raypipe

READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item")
SHAPED_BY_VALUES = ("aten.nonzero", "aten.masked_select", "aten._unique", "aten.unique")
PACKAGE = Path(raypipe.__file__).parent


class OnDevice(Tensor):
    """A tensor of the fake GPU; ``value`` is the CPU tensor that holds its values."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, device: torch.device) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, value.size(), value.stride(), value.storage_offset(), dtype=value.dtype, device=device
        )
        made.value = value
        return made

    def __init__(self, value: Tensor, device: torch.device) -> None:
        pass

    @property
    def data(self) -> Any:
        """See ``torch.Tensor.data``."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: OnDevice) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.value = new.value

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the values, so that it can be freed and filled again."""
        return self.value.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert FakeGpu.current is not None
        return FakeGpu.current.run(func, args, kwargs or {})


class FakeEvent:
    """As ``torch.cuda.Event``."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 0
        self.clock: dict[int, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.gpu.issued += 1
        self.at = self.gpu.issued
        self.clock = dict((stream or self.gpu.stream).clock)

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def synchronize(self) -> None:
        if not self.query():
            self.gpu.note("Event.synchronize")
        self.gpu.advance(max(self.at, self.gpu.done))

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "not complete yet: torch raises here"
        return float(end.at - self.at)


SETUP: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
"""Lets a device be written in Python; None where torch is older than that."""


class FakeStream:
    """As ``torch.cuda.Stream``: what has happened before its next kernel, per stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock: dict[int, int] = {number: 0}

    def wait_event(self, event: FakeEvent) -> None:
        for number, at in event.clock.items():
            self.clock[number] = max(at, self.clock.get(number, 0))


class FakeGpu(TorchDispatchMode):
    """The device; use it as a context manager around all that runs on it."""

    current: FakeGpu | None = None

    def __init__(self) -> None:
        super().__init__()
        if FakeGpu.current is None:
            SETUP("fakegpu")
        FakeGpu.current = self
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(list, device=...) shows its copy
        self.device = torch.device("fakegpu", 0)
        self.sites: list[str] = []
        """``file:line operator`` of every wait."""
        self.issued = self.done = 0
        """Numbers of the last event that the host recorded, and of the last that the device has passed."""
        self.stream = FakeStream(0)
        """The current one."""
        self.races: list[str] = []
        """``file:line operator`` of every access that races with an earlier one."""
        self._streams = 1
        self._written: dict[int, tuple[int, int]] = {}
        """Address of memory -> stream and time of its last write."""
        self._read: dict[int, dict[int, int]] = {}
        """Address of memory -> time of the last read since then, per stream."""
        self._pinned: Any = WeakIdKeyDictionary()
        self._copies: list[tuple[int, Tensor, Tensor]] = []

    def event(self) -> FakeEvent:
        """Stand in for ``torch.cuda.Event``."""
        return FakeEvent(self)

    def new_stream(self, device: torch.device) -> FakeStream:
        """Stand in for ``torch.cuda.Stream``."""
        self._streams += 1
        return FakeStream(self._streams - 1)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Stand in for ``torch.cuda.stream``."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def pin(self, tensor: Tensor) -> Tensor:
        """Stand in for ``Tensor.pin_memory``."""
        made = tensor.clone()
        self._pinned[made] = True
        return made

    def advance(self, until: int) -> None:
        """Let the device come to the event of this number."""
        self.done = until
        for copy in [c for c in self._copies if c[0] <= until]:
            self._copies.remove(copy)
            copy[1].copy_(copy[2])

    def note(self, what: str) -> None:
        self._note(self.sites, what)

    def _note(self, into: list[str], what: str) -> None:
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
        at = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "elsewhere"
        into.append(f"{at} {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose arguments may be on either device."""
        result: list[OnDevice] = []

        def inner(x: Any) -> Any:
            if isinstance(x, OnDevice):
                result.append(x)
                return x.value
            return torch.device("cpu") if isinstance(x, torch.device) and x == self.device else x

        name = str(func)
        self._access(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(inner, args), tree_map(inner, kwargs)
        wanted = kwargs.get("device")
        if name.startswith("aten.copy_.") or (wanted is not None and name.startswith("aten._to_copy")):
            return self._copy(func, args, kwargs, plain_args, plain_kwargs)
        if result and name.startswith(READS + SHAPED_BY_VALUES):
            self.note(name)
        if result and name.startswith("aten.index.Tensor") and any(_costs_a_wait(i) for i in args[1]):
            self.note(f"{name} by a mask, or by indices of the host")
        out = func(*plain_args, **plain_kwargs)
        if not result and wanted not in (self.device, str(self.device)):
            return out
        made = tree_map(lambda x: OnDevice(x, self.device) if isinstance(x, Tensor) else x, out)
        self._fresh(func, [x.value for x in result], out)
        return return_and_correct_aliasing(func, args, kwargs, made) if result else made

    def _access(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what a kernel reads and writes, and whether that races with what another stream does."""
        if func.is_view:
            return
        mine = self.stream.clock
        mine[self.stream.number] += 1
        for n, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[n] if n < len(args) else None)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for x in given if isinstance(given, (list, tuple)) else (given,):
                if not isinstance(x, OnDevice):
                    continue
                at = x.value.untyped_storage().data_ptr()
                stream, when = self._written.get(at, (self.stream.number, 0))
                earlier = {stream: when, **(self._read.get(at, {}) if writes else {})}
                if any(mine.get(number, 0) < time for number, time in earlier.items()):
                    self._note(self.races, f"{func} {'writes' if writes else 'reads'}")
                if writes:
                    self._written[at], self._read[at] = (self.stream.number, mine[self.stream.number]), {}
                else:
                    self._read.setdefault(at, {})[self.stream.number] = mine[self.stream.number]

    def _fresh(self, func: Any, inputs: list[Tensor], out: Any) -> None:
        """Note that new memory was written; whoever had it before has freed it."""
        known = {x.untyped_storage().data_ptr() for x in inputs}
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, Tensor) and (at := x.untyped_storage().data_ptr()) not in known:
                self._written[at] = self.stream.number, self.stream.clock[self.stream.number]
                self._read[at] = {}

    def _copy(self, func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        """Copy between the devices, or within one; ``aten.copy_(to, source)`` or ``aten._to_copy(source, device=)``."""
        if func is torch.ops.aten.copy_.default:
            to, source = args[0], args[1]
            after = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            crosses = isinstance(to, OnDevice) != isinstance(source, OnDevice)
            host = source if isinstance(to, OnDevice) else to
            if crosses and (not after or host not in self._pinned):
                self.note(f"{func} {source.device.type} -> {to.device.type}")
            elif crosses and host is to:  # the values come when the device is there
                self._copies.append((self.issued + 1, to, plain_args[1].clone()))
                to.fill_(math.nan if to.is_floating_point() else -1)
                return to
            func(*plain_args, **plain_kwargs)
            return to
        (source,), there = args, torch.device(kwargs["device"]).type == self.device.type
        if there != isinstance(source, OnDevice) and not (
            there and kwargs.get("non_blocking") and source in self._pinned
        ):
            self.note(f"{func} {source.device.type} -> {kwargs['device'].type}")
        out = func(*plain_args, **plain_kwargs)
        if there:
            self._fresh(func, [], out)
        return OnDevice(out, self.device) if there else out


def _costs_a_wait(index: Tensor | None) -> bool:
    return index is not None and (index.dtype == torch.bool or not isinstance(index, OnDevice))
