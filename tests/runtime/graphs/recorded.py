"""Graphs on a CPU with the semantics of CUDA graphs: what goes wrong with those goes wrong with these.

A capture records every ATen operation with the memory that it reads and writes, and returns tensors in memory of a
pool. As capturing runs nothing on a GPU, all results are garbage (NaN) after it, and memory outside of the pool
is as it was before. A replay runs the recorded operations on the same memory, with the host's numbers of that time.

- Memory of a pool that nobody refers to any more is given to later captures, and is garbage after every replay.
- Memory outside of the pool is known by its address alone: a replay that reads freed memory raises ``FreedMemoryError``
  (a GPU would read whatever lies there).
- Reading a value on the host during a capture raises, as does creating a tensor from the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from raypipe.runtime.compiled import layout
from raypipe.runtime.graphs.device_graphs import GraphError
from raypipe.runtime.update.side_stream import Done

HOST_READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item", "aten.nonzero",
              "aten.masked_select", "aten._unique", "aten.unique")  # fmt: skip
FROM_HOST = ("aten.lift_fresh", "aten._pin_memory")
READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__, Tensor.pin_memory}
GARBAGE = 0xFF
"""Every byte of memory that has no value: NaN in floating point."""
OPAQUE: dict[Any, Callable[..., Any]] = {}
"""Operators of Python, which launch kernels of their own: what they run is recorded, not they."""


class FreedMemoryError(RuntimeError):
    """A replay reads or writes memory that was freed since the capture."""


class Block:
    """Memory of a pool, and which allocation has it."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.held: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return self.held is None or self.held.expired()

    def view(self) -> Tensor:
        return torch.frombuffer(self.bytes, dtype=torch.uint8)

    def spoil(self) -> None:
        self.view().fill_(GARBAGE)


class Place(NamedTuple):
    """A tensor by its memory."""

    memory: Block | StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor on that memory, as it is now."""
        if isinstance(self.memory, Block):
            storage = self.memory.view().untyped_storage()
        else:
            if self.memory.expired():
                raise FreedMemoryError(f"{self.dtype} {self.size} was freed after the capture")
            storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Recorded(NamedTuple):
    """An operation, with places instead of tensors, and where its results go; None for those that it wrote in place."""

    func: Any
    arguments: list[Any]
    spec: Any
    results: list[Place | None]


class Pool:
    """Memory of graphs; ``by_address``: the blocks of all pools."""

    def __init__(self, by_address: dict[int, Block]) -> None:
        self.blocks: list[Block] = []
        self.by_address = by_address

    def place(self, x: Tensor) -> tuple[Tensor, Block]:
        """Move a new tensor into the pool."""
        size = max(1, x.untyped_storage().nbytes())
        block = next((b for b in self.blocks if b.free and len(b.bytes) == size), None)
        if block is None:
            block = Block(size)
            self.blocks.append(block)
        storage = block.view().untyped_storage()
        block.held = StorageWeakRef(storage)
        self.by_address[storage.data_ptr()] = block
        placed = torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())
        placed.copy_(x)
        return placed, block

    def spoil_free(self) -> None:
        for block in self.blocks:
            if block.free:
                block.spoil()


class NoHostReads(TorchFunctionMode):
    """Refuses methods that read values without an ATen operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_METHODS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records operations while they run."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.tape: list[Recorded] = []
        self.blocks: list[Block] = []
        self.before: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        """Memory outside of the pool that was written, with what was in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(HOST_READS + FROM_HOST):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name.startswith("aten.index.Tensor") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} by a mask")
        if func in OPAQUE:
            with self:
                return OPAQUE[func](*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        given = [self._place(x) if isinstance(x, Tensor) else x for x in flat]
        for x in _written(func, args, kwargs):
            self._keep(x)
        out = func(*args, **kwargs)
        aliased = {x.untyped_storage().data_ptr() for x in flat if isinstance(x, Tensor)}
        results: list[Place | None] = []

        def put(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.untyped_storage().nbytes() and x.untyped_storage().data_ptr() in aliased:
                results.append(None)
                return x
            placed, block = self.pool.place(x)
            self.blocks.append(block)
            results.append(Place(block, x.dtype, tuple(x.size()), tuple(x.stride()), x.storage_offset()))
            return placed

        made = tree_map(put, out)
        if any(results) or _written(func, args, kwargs):
            self.tape.append(Recorded(func, given, spec, results))
        return made

    def _place(self, x: Tensor) -> Place:
        storage = x.untyped_storage()
        block = self.pool.by_address.get(storage.data_ptr())
        memory: Block | StorageWeakRef = StorageWeakRef(storage) if block is None else block
        return Place(memory, x.dtype, tuple(x.size()), tuple(x.stride()), x.storage_offset())

    def _keep(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        at = storage.data_ptr()
        if at not in self.before and at not in self.pool.by_address:
            self.before[at] = StorageWeakRef(storage), _bytes(storage).clone()

    def undo(self) -> None:
        """Leave all memory as if nothing had run."""
        for reference, values in self.before.values():
            if not reference.expired():
                _bytes(torch.UntypedStorage._new_with_weak_ptr(reference.cdata)).copy_(values)
        for block in self.blocks:
            block.spoil()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    result: list[Tensor] = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name, args[n] if n < len(args) else None)
        result += [x for x in (given if isinstance(given, (list, tuple)) else (given,)) if isinstance(x, Tensor)]
    return result


class LateStream:
    """A second stream that does nothing before it is waited for; so whoever does not wait is found out."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None], keep: Sequence[object] = ()) -> Done:
        self.waiting.append(work)

        def wait() -> None:
            while any(one is work for one in self.waiting):
                with torch.no_grad():
                    self.waiting.pop(0)()

        def synchronize() -> None:
            raise RuntimeError("operation not permitted when stream is capturing: synchronize")

        return Done(wait, synchronize)

    def close(self) -> None:
        self.waiting.clear()


class RecordedGraph:
    """See ``raypipe.runtime.graphs.device_graphs.Graph``."""

    def __init__(self, graphs: RecordedGraphs, pool: Pool, tape: Sequence[Recorded]) -> None:
        self.graphs, self.pool, self.tape = graphs, pool, tape

    @torch.no_grad()
    def replay(self) -> None:
        self.graphs.replays += 1
        for one in self.tape:
            given = [x.tensor() if isinstance(x, Place) else x for x in one.arguments]
            args, kwargs = tree_unflatten(given, one.spec)
            made = [x for x in tree_flatten(one.func(*args, **kwargs))[0] if isinstance(x, Tensor)]
            for x, place in zip(made, one.results, strict=True):
                if place is not None:
                    place.tensor().copy_(x)
        self.pool.spoil_free()


class RecordedGraphs:
    """See ``raypipe.runtime.graphs.device_graphs.DeviceGraphs``."""

    def __init__(self) -> None:
        self._by_address: dict[int, Block] = {}
        self._streams: list[LateStream] = []
        self.captures = self.replays = self.operations = 0
        self.capturing = False
        OPAQUE[torch.ops.raypipe.keyed_halves.default] = layout._keyed_halves

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def side_stream(self) -> LateStream:
        self._streams.append(LateStream())
        return self._streams[-1]

    def new_pool(self) -> Pool:
        return Pool(self._by_address)

    @contextmanager
    def _modes(self, recorder: Recorder) -> Iterator[None]:
        assert not self.capturing, "one capture at a time"
        self.capturing = True
        try:
            with NoHostReads(), recorder:
                yield
        finally:
            self.capturing = False

    def capture(self, work: Callable[[], Any], pool: Pool) -> tuple[RecordedGraph, Any]:
        recorder = Recorder(pool)
        try:
            with self._modes(recorder):
                made = work()
            if self._streams and self._streams[-1].waiting:
                raise RuntimeError("capturing stream has unjoined work")
        except Exception as error:
            raise GraphError(*error.args) from error
        finally:
            recorder.undo()
        self.captures += 1
        self.operations += len(recorder.tape)
        return RecordedGraph(self, pool, recorder.tape), made
