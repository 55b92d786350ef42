"""A tighter lower bound on a step: which device has which layers, chosen as well as can be, by integer programming.

The program (CP-SAT) assigns layers to devices, any to any, in any number of stages. It asks of a step's time T what
every cut and every order must keep that have these layers on these devices. Its best proven bound is valid at any
moment, however little time it is given.

Let device d hold the layers S, the first of which is a and the last b, and let w be its work on one micro-batch (at
least ``Instance.tasks`` task overheads included). Then

- **head**: it begins no sooner than ``head(d)``: the forwards of the layers before a, and d messages, where devices are
  numbered by their first layers (``closed.start`` has the proof). Without a barrier between steps, 0.
- **work**: ``T >= head(d) + N w``; without a barrier, ``T >= N w`` and the updates of its layers.
- **way back**: let t be the moment at which its first F starts, t >= head(d). That F belongs to some layer of S, so a
  micro-batch has been at a no sooner than t. The first backward task of d, of layer j <= b and micro-batch m, comes
  after m's forwards from a to the last layer and after its way back from there to behind j. Hence it starts no sooner
  than ``t + F(a..L-1) + B(b+1..L-1)`` and the messages on this way: every device whose first layer lies behind a is met
  on the way there, and one message leads back if b is neither the last layer nor before the first trained one. Before
  it, d runs forwards alone, whose activations all are in its memory at once, unless they are recomputed, which takes as
  long again. Let P be the most forward time whose activations fit beside weights and optimizer state, with a forward's
  overhead for each micro-batch: ``T >= (this moment) + N w - P``. (Unless b is before the first trained layer: then d
  has no backward.)
- **memory**: its activations' bytes times seconds (``closed.memory_time``), less what is recomputed, fit into its
  memory beside weights and optimizer state for T, of which a lower bound is known.
- **state**: weights, gradients and optimizer state of its layers fit, where a step has two micro-batches or more.
- **updates**: what follows the last task of a step that ends with a barrier: the longest update.

Where devices differ, they are numbered as they are, and a head is only the forwards before a and one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import TYPE_CHECKING

from raypipe.plan.certificate.closed import closed_bound
from raypipe.plan.certificate.instance import Instance, Kind

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

UNITS = 10**7
"""Units of time in the step that is known: times are rounded down to them, and what is subtracted up."""
BYTES = 10**6
"""Units of memory in a device's room."""
MOST = 4_000
"""Layers times devices above which the program is not tried: it would prove nothing in a second or two."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """What the program proved, and the best assignment that it saw."""

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
    program = _Program(i, known_s, least)
    bound, devices = program.solve(seconds)
    return Assigned(max(least, min(bound, known_s)), devices)


class _Program:
    """The integer program of one instance."""

    def __init__(self, i: Instance, known_s: float, least_s: float) -> None:
        from ortools.sat.python import cp_model

        self.i, self.unit, self.cp = i, known_s / UNITS, cp_model
        self.least_s = least_s
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
            self.way_back(d, head, work)

    def way_back(self, d: int, head: object, work: object) -> None:
        """What a device cannot do before its first backward can begin."""
        i, kind, model = self.i, self.kind(d), self.model
        layers, n = range(i.layers), i.microbatches
        back = sum(self.down(i.ahead[-1] - i.ahead[s]) * self.first[d][s] for s in layers)
        messages = [(s >= i.frozen_first) + (0 if self.ordered else 1) if s < i.layers - 1 else 0 for s in layers]
        back += sum(self.down(i.behind[s + 1] + messages[s] * i.message) * self.final[d][s] for s in layers)
        if self.ordered:
            back += self.down(i.message) * sum(self.used[d + 1 :])
        early = []
        for s in layers:
            ran = model.new_int_var(0, n, "")
            model.add(ran <= n * self.holds[d][s])
            early.append(ran)
        if isfinite(i.room[d]):
            share = i.room[d] / BYTES
            kept = sum(floor(i.kept[s] / share) * early[s] for s in layers)
            state = sum(floor(i.state[s] / share) * self.holds[d][s] for s in layers)
            model.add(kept + state <= BYTES)
        gained = sum(self.up(kind.forward[s]) * early[s] for s in layers)
        gained += self.up(n * kind.overhead)
        gained += sum(self.up(n * max(0.0, kind.forward[s] - kind.recompute[s])) * self.holds[d][s] for s in layers)
        # A device that holds frozen layers alone, all before the first trained one, has no backward to wait for.
        returns = model.new_bool_var("")
        model.add(sum(self.final[d][i.frozen_first :]) == returns)
        model.add(self.step >= head + back + work - gained + self.after).only_enforce_if(returns)

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
