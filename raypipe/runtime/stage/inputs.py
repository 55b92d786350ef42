"""Read the raw inputs of a device's micro-batches, and count the targets of a mini-batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from raypipe.data import Dataset
from raypipe.data.sample_order import Split
from raypipe.models import Inputs, Lengths, Task
from raypipe.models.host_copies import Uploads
from raypipe.models.task import ANY_LENGTH
from raypipe.schedule.microbatch_order import OWN_SAMPLES, Copies, Order


class Feed:
    """Reads a step's samples at once, which is far cheaper than one micro-batch at a time.

    Every device reads the inputs that its own stages need; a device whose stages read none reads nothing.
    Floating-point inputs are cast to ``dtype``, that of the parameters; labels, which only the task's loss reads, are
    not. ``samples`` is the size of a micro-batch.
    A GPU gets them through pinned memory on a stream of their own, and ``prefetch`` starts that a step ahead; their
    targets are counted on the host before. ``left_out`` mini-batches of the training data are not used. Where
    micro-batches run in slices, ``slices`` is their number; a micro-batch id is then that of a slice. Where ``copies``
    divide sequences into ``chunks``, this one runs those ``held`` of each. ``lengths_of_part`` is how long each raw
    input is in a slice or a chunk, where the data does not say how long it is in a micro-batch.
    """

    slices = chunks = 1
    lengths_of_part: Lengths = ANY_LENGTH
    held: tuple[int, ...] = ()
    copies = OWN_SAMPLES

    def cut(self, slices: int, lengths_of_part: Lengths) -> None:
        """Give inputs slice by slice from now on."""
        self.slices, self.lengths_of_part = slices, lengths_of_part

    def hold(self, held: tuple[int, ...], chunks: int, lengths_of_part: Lengths, copies: Copies) -> None:
        """Give these of the chunks of each sequence, together, from now on."""
        self.held, self.chunks, self.lengths_of_part, self.copies = held, chunks, lengths_of_part, copies

    def __init__(
        self,
        data: Dataset | None,
        task: Task,
        fields: Iterable[str],
        seed: int,
        batch: int,
        samples: int,
        device: torch.device,
        dtype: torch.dtype,
        left_out: int = 0,
    ) -> None:
        self._left_out = left_out
        self.data, self.task, self.fields = data, task, frozenset(fields)
        self.seed, self.batch, self.samples, self.device, self.dtype = seed, batch, samples, device, dtype
        self._exact = task.reads if task.predicts else frozenset()
        self._counts = task.reads <= self.fields
        self._uploads = Uploads(device)
        self._steps: dict[tuple[Split, int], dict[str, Tensor]] = {}
        self._targets: dict[tuple[Split, int], int] = {}
        self._arriving: set[tuple[Split, int]] = set()
        self._lengths: dict[tuple[Split, int], list[Lengths]] = {}
        self._orders: dict[int, Order] = {}
        self._waited_s = 0.0

    def _step(self, split: Split, step: int) -> dict[str, Tensor]:
        samples = self._steps.get((split, step))
        if samples is None:
            # An asynchronous program also runs micro-batches of the next step, so at most two steps are in use.
            while len(self._steps) > 1:
                self.drop(*next(iter(self._steps)))
            began, at = time.perf_counter(), self._at(split, step)
            result = self._read(split, at)
            self._waited_s += time.perf_counter() - began
            read = {name: self._cast(name, result[name]) for name in self.fields}
            if self._counts:
                self._targets[(split, step)] = self._count(split, at, read)
            samples = self._steps[(split, step)] = self._uploads.start(read)
            self._arriving.add((split, step))
        return samples

    def _read(self, split: Split, at: int) -> dict[str, Tensor]:
        """Read mini-batch ``at`` of a split, or the rows of it that this device needs."""
        assert self.data is not None
        return self.data.batch(split, self.seed, at, self.batch)

    def _rows_of(self, split: Split, mb: int) -> slice:
        """Return where the rows of a micro-batch are in what ``_read`` returns."""
        return slice(mb * self.samples, (mb + 1) * self.samples)

    def _count(self, split: Split, at: int, read: Mapping[str, Tensor]) -> int:
        """Count the targets of mini-batch ``at``, of which ``read`` has been read."""
        return self.task.targets(read)

    def take_wait_s(self) -> float:
        """Return the seconds that reading has taken since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _at(self, split: Split, step: int) -> int:
        """Return which mini-batch of the data a step takes."""
        return step + self._left_out if split == "train" else step

    def prefetch(self, split: Split, step: int) -> None:
        """Read a step's samples, and start copying them to the device."""
        if self.fields:
            self._step(split, step)

    def arrange(self, step: int, order: Order) -> None:
        """Have other micro-batches of the data take the places of a training step's, without slices."""
        self._orders[step] = order

    def of_data(self, split: Split, step: int, mb: int) -> int:
        """Return the micro-batch of the data that a micro-batch id stands for."""
        order = self._orders.get(step) if split == "train" else None
        place = self.copies.of_data(mb)
        return place if order is None else order[place]

    def drop(self, split: Split, step: int) -> None:
        """Free the samples of a finished step."""
        if split == "train":
            self._orders.pop(step, None)
        self._steps.pop((split, step), None)
        self._targets.pop((split, step), None)
        self._arriving.discard((split, step))

    def lengths(self, split: Split, step: int, mb: int) -> Lengths:
        """Return the lengths that micro-batch ``mb`` of a step is padded to, here: those of its longest sample.

        They follow from the order of the samples alone, so every device knows them for every micro-batch, even if it
        reads no raw inputs.
        """
        parts, held = max(self.slices, self.chunks), max(1, len(self.held))
        whole = self._lengths_of(split, step, self.of_data(split, step, mb // self.slices))
        own = {name: held * length for name, length in self.lengths_of_part.items()}
        return {**own, **{name: length // parts * held for name, length in whole.items()}}

    def _lengths_of(self, split: Split, step: int, mb: int) -> Lengths:
        result = self._lengths.get((split, step))
        if result is None:
            while len(self._lengths) > 1:
                del self._lengths[next(iter(self._lengths))]
            assert self.data is not None
            own = self.data.lengths(split, self.seed, self._at(split, step), self.batch)
            firsts = range(0, self.batch, self.samples)
            result = [{name: int(n[i : i + self.samples].max()) for name, n in own.items()} for i in firsts]
            self._lengths[(split, step)] = result
        return result[mb]

    def _cast(self, name: str, values: Tensor) -> Tensor:
        return values.to(self.dtype) if values.is_floating_point() and name not in self._exact else values

    def inputs(self, split: Split, step: int, mb: int) -> Inputs:
        """Return the raw inputs of micro-batch ``mb`` of a step, on the device."""
        whole, number = divmod(mb, self.slices)
        whole = self.of_data(split, step, whole)
        rows = self._rows_of(split, whole)
        lengths = self._lengths_of(split, step, whole)
        samples = self._step(split, step)
        if (split, step) in self._arriving:
            self._uploads.use(samples)
            self._arriving.discard((split, step))
        inputs = {
            name: values[rows, : lengths[name]].contiguous() if name in lengths else values[rows]
            for name, values in samples.items()
        }
        held = self.held or ((number,) if self.slices > 1 else ())
        return self.task.slice_inputs(inputs, held, max(self.slices, self.chunks)) if held else inputs

    def targets(self, split: Split, step: int) -> int:
        """Count the targets of the whole mini-batch; at least 1, because losses are divided by it."""
        self._step(split, step)
        return max(1, self._targets[(split, step)])
