"""A tighter lower bound on a step: which device has which layers, chosen as well as can be, by integer programming.

The program (CP-SAT) assigns layers to devices, any to any, in any number of stages. It asks of a step's time T what
every cut and every order must keep that have these layers on these devices. Its best proven bound is valid at any
moment, however little time it is given.

Let device d hold the layers S, the first of which is a and the last b, and let w be its work on one micro-batch (at
least ``Instance.tasks`` task overheads included). Then

- **head**: it begins no sooner than ``head(d)``: the forwards of the layers before a, and d messages, where devices are
  numbered by their first layers (``closed.start`` has the proof). Without a barrier between steps, 0.
- **work**: ``T >= head(d) + N w``; without a barrier, ``T >= N w`` and the updates of its layers.
- **late layers**: its first F is of layer a, so one of layer l > a starts no sooner than ``head(d) + F(a..l-1)``, and
  so does every backward task of d, which comes after the forwards of all layers. Hence, for every l, ``T >= head(d) +
  F(a..l-1) + N (forwards of the layers of S from l on + backwards of S)``: what runs before is forwards of earlier
  layers alone. (That is the one-machine bound with heads, at each of them.)
- **way back**: let t be the moment at which its first F starts, t >= head(d). That F belongs to some layer of S, so a
  micro-batch has been at a no sooner than t. The first backward task of d, of layer j <= b and micro-batch m, comes
  after m's forwards from a to the last layer and after its way back from there to behind j. Hence it starts no sooner
  than ``t + F(a..L-1) + B(b+1..L-1)`` and the messages on this way: every device whose first layer lies behind a is met
  on the way there, and one message leads back if b is neither the last layer nor before the first trained one. Before
  it, d runs forwards alone, whose activations all are in its memory at once, unless they are recomputed, which takes as
  long again. Let P be the most forward time whose activations fit beside weights and optimizer state, with a forward's
  overhead for each micro-batch: ``T >= (this moment) + N w - P``. (Unless b is before the first trained layer: then d
  has no backward.)
- **way out**: the last B or joint backward of d is of layer a, and from there it is ``B(0..a-1)`` and d messages to the
  first layer. After it d runs weight gradients alone, whose memory all waits at once. Let Q be the most such time that
  fits: ``T >= head(d) + N w - Q + (this way)``; and both ways together, ``T >= (the moment above) + N w - P - Q + (this
  way)``. With a barrier between steps alone, as a device's own step ends with its own last task.
- **memory**: its activations' bytes times seconds (``closed.memory_time``), less what is recomputed, fit into its
  memory beside weights and optimizer state for T, of which a lower bound is known.
- **state**: weights, gradients and optimizer state of its layers fit, where a step has two micro-batches or more.
- **updates**: what follows the last task of a step that ends with a barrier: the longest update.

Where devices differ, they are numbered as they are, and a head is only the forwards before a and one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, isfinite
from typing import TYPE_CHECKING

from raypipe.plan.certificate.closed import closed_bound
from raypipe.plan.certificate.instance import Instance, Kind

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

UNITS = 10**7
"""Units of time in the step that is known: times are rounded down to them, and what is subtracted up."""
BYTES = 10**6
"""Units of memory in a device's room."""
MOST = 4_000
"""Layers times devices above which the program is not tried: it would prove nothing in a second or two."""

MOST_LEVELS = 8_000
"""Late layers times layers times devices up to which all layers are taken as such."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The bound that the program proved, and the best assignment that it saw."""

    bound_s: float
    devices: tuple[int, ...] | None
    """Per layer, its device; None if no assignment was found."""


def assigned_bound(i: Instance, known_s: float, seconds: float) -> Assigned:
    """Return a lower bound on the step, in seconds; never below ``closed_bound``.

    Args:
        i: the instance.
        known_s: a step time that some plan reaches: the bound need not rise above it.
        seconds: of CP-SAT's deterministic time, so that the result depends on the work done and not on the machine.
    """
    least = closed_bound(i)
    if seconds <= 0 or i.devices == 1 or i.layers * i.devices > MOST or not 0 < least < known_s:
        return Assigned(min(least, known_s) if least > 0 else 0.0, None)
    devices = None
    for late in (False, True):  # most is often proved by the small program, in a fraction of the time
        if late and not i.flushes:
            break
        bound, result = _Program(i, known_s, least, late).solve(seconds / 2)
        least, devices = max(least, min(bound, known_s)), result or devices
        if least >= known_s:
            break
    return Assigned(least, devices)


class _Program:
    """The integer program of one instance."""

    def __init__(self, i: Instance, known_s: float, least_s: float, late: bool) -> None:
        from ortools.sat.python import cp_model

        self.i, self.unit, self.cp = i, known_s / UNITS, cp_model
        self.least_s, self.late = least_s, late
        """Whether it asks for late layers and the way out, too."""
        model: CpModel = cp_model.CpModel()
        self.model = model
        self.ordered = i.alike
        """Devices are numbered by their first layers."""
        layers, devices = range(i.layers), range(i.devices)
        self.step = model.new_int_var(self.down(least_s), UNITS + 1, "T")
        self.holds = [[model.new_bool_var("") for _ in layers] for _ in devices]
        self.first = [[model.new_bool_var("") for _ in layers] for _ in devices]
        self.final = [[model.new_bool_var("") for _ in layers] for _ in devices]
        self.used = [model.new_bool_var("") for _ in devices]
        self.longest = model.new_int_var(0, UNITS, "longest update")
        for s in layers:
            model.add_exactly_one(self.holds[d][s] for d in devices)
        for d in devices:
            self.ends_of(d)
        if self.ordered:
            for d in devices:
                if d + 1 < i.devices:
                    model.add_implication(self.used[d + 1], self.used[d])
                    model.add(
                        sum(s * self.first[d + 1][s] for s in layers)
                        >= sum((s + 1) * self.first[d][s] for s in layers) - (i.layers + 1) * (1 - self.used[d + 1])
                    )
        for d in devices:
            self.time_of(d)
            if isfinite(i.room[d]):
                self.memory_of(d)
        model.minimize(self.step)

    def down(self, seconds: float) -> int:
        """In units, rounded down."""
        return floor(seconds / self.unit)

    def up(self, seconds: float) -> int:
        """In units, rounded up."""
        return ceil(seconds / self.unit)

    def kind(self, d: int) -> Kind:
        """The device's own times."""
        return self.i.kinds[self.i.kind_of[d]]

    def ends_of(self, d: int) -> None:
        """Say which layers of a device are its first and its last one."""
        model, holds, first, final = self.model, self.holds[d], self.first[d], self.final[d]
        layers = self.i.layers
        model.add(sum(first) == self.used[d])
        model.add(sum(final) == self.used[d])
        for s in range(layers):
            model.add_implication(first[s], holds[s])
            model.add_implication(final[s], holds[s])
            model.add_implication(holds[s], self.used[d])
            model.add(sum(first[: s + 1]) >= holds[s])
            model.add(sum(final[s:]) >= holds[s])

    def time_of(self, d: int) -> None:
        """Head, work and updates."""
        i, kind, model = self.i, self.kind(d), self.model
        layers, n = range(i.layers), i.microbatches
        barrier = i.barrier and i.flushes
        work = sum(self.down(n * kind.work[s]) * self.holds[d][s] for s in layers)
        work += self.down(i.tasks * n * kind.overhead) * self.used[d]
        update = sum(self.down(kind.update[s]) * self.holds[d][s] for s in layers)
        head = 0
        self.after = self.longest + self.down(i.after) if barrier else update
        if barrier:
            messages = [d if self.ordered else min(1, s) for s in layers]
            head = sum(self.down(i.ahead[s] + messages[s] * i.message) * self.first[d][s] for s in layers)
            model.add(self.longest >= update)
            if i.all_reduce_per_update:
                sums = sum(self.down(kind.update[s] * i.all_reduce_per_update) * self.holds[d][s] for s in layers)
                model.add(self.step >= sums + self.after)
        model.add(self.step >= head + work + self.after)
        if i.flushes:
            for layer in self.levels if self.late else ():
                self.late_layers(d, head, layer)
            self.ways(d, head, work)

    @cached_property
    def levels(self) -> list[int]:
        """Layers from which on the work of devices is bounded; L is for their backwards alone. Where the program is
        large, some: the last and the longest ones."""
        i = self.i
        some = max(4, MOST_LEVELS // (i.layers * i.devices))
        longest = sorted(range(1, i.layers), key=lambda s: (-i.least.work[s], -s))[:some]
        return sorted({*longest, max(1, i.layers - 1), i.layers})

    def late_layers(self, d: int, head: LinearExprT, level: int) -> None:
        """The forwards of a device's layers from ``level`` on, and all its backwards, begin late."""
        i, kind, n = self.i, self.kind(d), self.i.microbatches
        layers, holds, first = range(i.layers), self.holds[d], self.first[d]
        rest = sum(self.down(i.ahead[level] - i.ahead[s]) * first[s] for s in layers[:level])
        rest += sum(self.down(n * kind.backward[s]) * holds[s] for s in layers[:level])
        rest += sum(self.down(n * kind.work[s]) * holds[s] for s in layers[level:])
        rest += self.down((i.tasks - 1) * n * kind.overhead) * self.used[d]
        self.model.add(self.step >= head + rest + self.after)
        if self.ordered and level == i.layers - 1:  # all devices with a later first layer come before it, and one back
            met = self.down(i.message) * sum(self.used[d + 1 : d + 2] + self.used[d + 1 :])
            self.model.add(self.step >= head + rest + met + self.after).only_enforce_if(holds[level])

    def ways(self, d: int, head: LinearExprT, work: LinearExprT) -> None:
        """Return what a device cannot do before its first backward can begin, and after its last B."""
        i, kind, model = self.i, self.kind(d), self.model
        layers, n = range(i.layers), i.microbatches
        back = sum(self.down(i.ahead[-1] - i.ahead[s]) * self.first[d][s] for s in layers)
        messages = [(s >= i.frozen_first) + (0 if self.ordered else 1) if s < i.layers - 1 else 0 for s in layers]
        back += sum(self.down(i.behind[s + 1] + messages[s] * i.message) * self.final[d][s] for s in layers)
        if self.ordered:
            back += self.down(i.message) * sum(self.used[d + 1 :])
        early = self.fitting(d, i.kept)
        gained = sum(self.up(kind.forward[s]) * early[s] for s in layers)
        gained += self.up(n * kind.overhead)
        gained += sum(self.up(n * max(0.0, kind.forward[s] - kind.recompute[s])) * self.holds[d][s] for s in layers)
        # A device that holds frozen layers alone, all before the first trained one, has no backward to wait for.
        returns = model.new_bool_var("")
        model.add(sum(self.final[d][i.frozen_first :]) == returns)
        model.add(self.step >= head + back + work - gained + self.after).only_enforce_if(returns)
        if not (i.barrier and self.late):
            return
        late = self.fitting(d, [min(w, k) for w, k in zip(i.waiting, i.kept, strict=True)])
        weight = [b - g for b, g in zip(kind.backward, kind.input_grad, strict=True)]
        out = [self.out(s, d) for s in layers]
        way = sum(out[s] * self.first[d][s] for s in layers) - sum(self.up(weight[s]) * late[s] for s in layers)
        model.add(self.step >= head + work + way + self.after).only_enforce_if(returns)
        model.add(self.step >= head + back + work - gained + way + self.after).only_enforce_if(returns)

    def out(self, first: int, d: int) -> int:
        """The way from a device's first layer to the model's, and what that still does for its weights."""
        i = self.i
        if not first:
            return 0
        messages = 0 if i.frozen_first else d if self.ordered else 1
        last = i.least.backward[0] - i.least.input_grad[0]
        return self.down(i.behind[0] - i.behind[first] + messages * i.message + max(0.0, last))

    def fitting(self, d: int, sizes: Sequence[float]) -> list[IntVar]:
        """Per layer, how many micro-batches of so many bytes a device may hold at once, beside weights."""
        i, model = self.i, self.model
        result = []
        for s in range(i.layers):
            result.append(model.new_int_var(0, i.microbatches, ""))
            model.add(result[s] <= i.microbatches * self.holds[d][s])
        if isfinite(i.room[d]):
            share = i.room[d] / BYTES
            held = sum(floor(sizes[s] / share) * result[s] for s in range(i.layers))
            state = sum(floor(i.state[s] / share) * self.holds[d][s] for s in range(i.layers))
            model.add(held + state <= BYTES)
        return result

    def memory_of(self, d: int) -> None:
        """Memory-time, recomputation and what a device holds at the end of a step."""
        i, kind, model = self.i, self.kind(d), self.model
        layers, n = range(i.layers), i.microbatches
        share = i.room[d] / BYTES
        if n >= 2:
            model.add(sum(floor(i.full_state[s] / share) * self.holds[d][s] for s in layers) <= BYTES)
        # Bytes times seconds, in shares of (room * known step); the smaller the less exact, but never too much.
        whole = i.room[d] * self.unit * UNITS
        area, again = [], []
        for s in layers:
            weight = max(0.0, kind.backward[s] - kind.input_grad[s])
            held = n * i.kept[s] * i.life(s) / whole
            rest = n * min(i.waiting[s], i.kept[s]) * weight / whole + i.state[s] * self.least_s / whole
            dropped = model.new_int_var(0, n, "")
            model.add(dropped <= n * self.holds[d][s])
            area.append(floor((held + rest) * UNITS) * self.holds[d][s] - ceil(held / n * UNITS) * dropped)
            again.append(self.down(kind.recompute[s]) * dropped)
        barrier = i.barrier and i.flushes
        model.add(sum(area) <= self.step)
        work = sum(self.down(n * kind.work[s]) * self.holds[d][s] for s in layers)
        after = self.longest if barrier else sum(self.down(kind.update[s]) * self.holds[d][s] for s in layers)
        model.add(self.step >= work + sum(again) + after)

    def solve(self, seconds: float) -> tuple[float, tuple[int, ...] | None]:
        """The proven bound in seconds, and per layer its device in the best assignment."""
        solver = self.cp.CpSolver()
        solver.parameters.max_deterministic_time = seconds
        solver.parameters.max_time_in_seconds = 3 * seconds
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        if status == self.cp.INFEASIBLE:  # nothing is below the known step: it is optimal, to rounding
            return UNITS * self.unit, None
        bound = max(0.0, solver.best_objective_bound) * self.unit
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return bound, None

        def device(s: int) -> int:
            return next(d for d in range(self.i.devices) if solver.boolean_value(self._at(d, s)))

        return bound, tuple(device(s) for s in range(self.i.layers))

    def _at(self, d: int, s: int) -> IntVar:
        return self.holds[d][s]
