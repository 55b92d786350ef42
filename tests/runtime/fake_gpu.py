"""A GPU without a GPU: a device that computes on the CPU, and a list of where the host waited for it.

Tensors on ``FakeGpu.device`` hold their values on the CPU, and every operator on them passes through
``__torch_dispatch__``, so a whole step runs as on a GPU, with its numbers. Recorded as waits are: reading a value on
the host, copying between the devices in a way in which CUDA makes the host wait, and operators whose result's shape
depends on values. The device lags behind its host: an event is passed, and a copy to the host has its values, only
once ``advance`` says so or the host waits.

torch allows one such device per process, for good. So tests that use it run in a process of their own.
"""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
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

    def record(self, stream: object = None) -> None:
        self.gpu.issued += 1
        self.at = self.gpu.issued

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def synchronize(self) -> None:
        if not self.query():
            self.gpu.note("Event.synchronize")
        self.gpu.advance(max(self.at, self.gpu.done))

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "not complete yet: torch raises here"
        return float(end.at - self.at)


class FakeGpu(TorchDispatchMode):
    """The device; use it as a context manager around all that runs on it."""

    current: FakeGpu | None = None

    def __init__(self) -> None:
        super().__init__()
        if FakeGpu.current is None:
            _setup_privateuseone_for_python_backend("fakegpu")
        FakeGpu.current = self
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(list, device=...) shows its copy
        self.device = torch.device("fakegpu", 0)
        self.sites: list[str] = []
        """``file:line operator`` of every wait."""
        self.issued = self.done = 0
        """Numbers of the last event that the host recorded, and of the last that the device has passed."""
        self._pinned: Any = WeakIdKeyDictionary()
        self._copies: list[tuple[int, Tensor, Tensor]] = []

    def event(self) -> FakeEvent:
        """Stand in for ``torch.cuda.Event``."""
        return FakeEvent(self)

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
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
        at = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "elsewhere"
        self.sites.append(f"{at} {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose arguments may be on either device."""
        found: list[OnDevice] = []

        def inner(x: Any) -> Any:
            if isinstance(x, OnDevice):
                found.append(x)
                return x.value
            return torch.device("cpu") if isinstance(x, torch.device) and x == self.device else x

        name = str(func)
        plain_args, plain_kwargs = tree_map(inner, args), tree_map(inner, kwargs)
        wanted = kwargs.get("device")
        if name.startswith("aten.copy_.") or (wanted is not None and name.startswith("aten._to_copy")):
            return self._copy(func, args, kwargs, plain_args, plain_kwargs)
        if found and name.startswith(READS + SHAPED_BY_VALUES):
            self.note(name)
        if found and name.startswith("aten.index.Tensor") and any(_costs_a_wait(i) for i in args[1]):
            self.note(f"{name} by a mask, or by indices of the host")
        out = func(*plain_args, **plain_kwargs)
        if not found and wanted not in (self.device, str(self.device)):
            return out
        made = tree_map(lambda x: OnDevice(x, self.device) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, made) if found else made

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
        return OnDevice(out, self.device) if there else out


def _costs_a_wait(index: Tensor | None) -> bool:
    return index is not None and (index.dtype == torch.bool or not isinstance(index, OnDevice))
