"""Times of stages of any consecutive layers, as tables that the kernels read; filled in as stages are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.kinds import room_bytes
from raypipe.cost.memory import parameter_bytes, stage_memory
from raypipe.cost.profile import Profile
from raypipe.cost.stages import Placed, message_seconds, split_seconds, trained_parameters
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate

if TYPE_CHECKING:
    from raypipe.plan.joint.walk_kernel import Tables


class Stages(NamedTuple):
    """The stages of one arrangement, as ``search.chains`` takes them."""

    times: NDArray[np.float64]
    sizes: NDArray[np.float64]
    lag: NDArray[np.float64]
    cap: NDArray[np.float64]
    frozen: tuple[int, ...]


class StageTables:
    """Stages of one candidate: seconds as in ``stage_costs``, and bytes."""

    def __init__(self, profile: Profile, train: TrainSpec, c: Candidate) -> None:
        from raypipe.plan.joint.walk_kernel import Tables

        self.profile, self.c = profile, c
        self._each = parameter_bytes(profile.dtype, train.optimizer, train.momentum)
        layers, devices = len(profile.layers), c.stages
        placed = Placed.of([range(devices)], c.replicas, profile.placed, c.innermost)
        self._busy = placed.busy
        kinds = [placed.kinds((d,)) for d in range(devices)]
        self._known = sorted(set().union(*kinds))
        uses = np.array([[kind in own for kind in self._known] for own in kinds])
        message = message_seconds(profile, devices, c.replicas, c.innermost, float(c.microbatch))
        self.tables: Tables = Tables(
            np.full((layers, layers + 1, len(self._known), 3), np.nan),
            np.zeros((layers, layers + 1), np.bool_),
            np.zeros((layers, layers + 1, 5)),
            uses,
            np.array(message),
            np.array(room_bytes(profile, devices, c.replicas)),
        )

    def of(self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int) -> Stages | None:
        """The stages of an arrangement; None where its weights and one micro-batch do not fit."""
        from raypipe.plan.joint import walk_kernel as kernel

        layers = len(self.profile.layers)
        for s in kernel.unknown(self.tables, starts, row, count).tolist():
            self._fill(int(starts[s]), int(starts[s + 1]) if s + 1 < count else layers)
        fits, times, sizes, lag, cap, frozen = kernel.stages(self.tables, starts, row, count, self.c.microbatches)
        return Stages(times, sizes, lag, cap, tuple(frozen.tolist())) if fits else None

    def _fill(self, x: int, y: int) -> None:
        own, profile, tables = range(x, y), self.profile, self.tables
        for k, kind in enumerate(self._known):
            tables.seconds[x, y, k] = split_seconds(profile.kinds[kind], own, self.c.microbatch, self._busy)
        tables.frozen[x, y] = not trained_parameters(profile, own)
        m = stage_memory(profile, own, self.c.microbatch, self._each, split=True)
        reads = self.c.microbatch * self.c.microbatches * self.c.replicas
        tables.memory[x, y] = (
            m.kept,
            m.kept_for_w,
            m.state + m.gradients + m.casts,
            m.workspace + m.messages,
            reads * max(profile.layers[i].read_bytes for i in own),
        )
