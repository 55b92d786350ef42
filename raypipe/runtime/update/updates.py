"""Updates behind a barrier, those of two weight versions (PipeDream-2BW), and those of every micro-batch (PipeDream).

``Updates`` come to the same weights in two ways, bit for bit (``schedule.lowering.norm_policy``):

``wait``        The update waits until the last device's gradients are complete, then clips and steps.
``optimistic``  It steps at once, as if nothing had to be clipped, and keeps what the step overwrote. When the norm says
                otherwise, it puts that back, clips and steps again; what ran on the wrong weights is run again. This is
                zero bubble's post-validation (Qi et al. 2024, section 4), with a copy in place of an inverted step, so
                that nothing is lost to rounding and any optimizer will do. It costs a copy of the parameters and the
                optimizer state from the update to the next step's first backward.

Where the norm stays on the device (``norm.DeviceShares``), the host waits for none: ``wait`` queues clipping and
update. Only an optimistic update needs the host to read its norm, after the tasks that run ahead have been queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypipe.runtime.process.clock import HostClock
from raypipe.runtime.stage.stage import MicrobatchState
from raypipe.runtime.update.buckets import BucketedAllReduce
from raypipe.runtime.update.ledger import Ledger, Standing
from raypipe.runtime.update.norm import DeviceShares, Forecast, Shares, clip_factor, norm_of
from raypipe.runtime.update.optimizer import OptimizerSnapshot, round_all, set_rate
from raypipe.runtime.update.policy import Trained, WeightUpdates
from raypipe.runtime.update.weight_versions import Snapshot, WeightVersions
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.sharding import StageKey


class Updates(WeightUpdates):
    """Updates behind a barrier: once a step, when all sums are there and, where it matters, the global norm.

    Args:
        trained: what they are about.
        shares: exchanges the shares of the norm.
        clip: largest norm; None clips nothing.
        requested: what the job asks for.
        skips: whether there is no update where the norm is not finite. All devices see the same norm, so they agree;
            where nothing is clipped, the norm is exchanged for that alone.
    """

    defers = False
    """Whether an update that does not wait for its norm is made when that is known, and need not be undone."""

    def __init__(
        self,
        trained: Trained,
        shares: Shares | DeviceShares,
        clip: float | None,
        requested: RequestedNormPolicy,
        skips: bool = False,
    ) -> None:
        super().__init__(trained)
        self.shares = shares
        self.limit = math.inf if clip is None and skips else clip
        self.skipping = False
        """Whether the newest step makes no update, as far as the host knows."""
        self._skips = skips
        self._no_update: Tensor | None = None
        """On a GPU whose host does not read the norm: 1.0 if it is not finite, else 0.0."""
        self._forecast = Forecast(self.limit or 0.0, requested)
        self._snapshots: list[OptimizerSnapshot] = []
        self._unclipped = False
        """Whether the step's gradients are complete, but what the norm says of them is not known."""
        self._updated: set[StageKey] = set()
        """The stage replicas whose update of the newest step has been made."""
        if isinstance(shares, Ledger):
            self.ledger = shares

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Wait for the sums; choose how the updates are made, and clip if that is to wait for the norm."""
        began = time.perf_counter()
        ends = self.sync.finish(self.push, self.clock)
        if isinstance(self.clock, HostClock):  # else the device waits, and not the host
            self.sums_wait_s = time.perf_counter() - began
        self.mark_sums(self.program, times, ends)
        share = self.sync.norm_squared()
        self.squares.append(share)
        self._choose(share)

    def _choose(self, share: Tensor) -> None:
        self.optimistic, self.skipping, self._no_update = False, False, None
        if self.limit is None and self.ledger is None:
            return
        # Whether the program has tasks that need no certain updates is the same on all devices.
        ahead = self.program.ahead is not None and self.limit is not None
        if isinstance(self.shares, DeviceShares):
            # Where the norm needs no other device, waiting costs nothing, and nothing is read back.
            ahead = ahead and (self.defers or self.shares.ranks > 1)
            for earlier in self.shares.earlier():
                self._forecast.saw(norm_of(earlier))
        # Where each device knows the norm by itself, nobody tells anybody: ``shares`` has this device alone. The share
        # of the one that counts for all is the whole already, those of the others are nothing.
        known = self.sync.known_norm_squared(share) if self.shares.ranks == 1 else share
        self.pending = ahead and (self.defers or self._forecast.optimistic())
        self.optimistic = self.pending and not self.defers
        self._unclipped = True
        self._updated.clear()
        self.shares.start(known)
        if not self.pending:  # else ``commit`` waits: until then the update can be taken back
            self._clip()

    def update(self, key: StageKey) -> None:
        """Update one stage replica, in the way that ``before_updates`` chose."""
        self.weights_change()
        set_rate(self.optimizers[key], self.lr)
        if self.pending:
            self._step_early(key)
        else:
            self._step(key)
        if self.skipping:
            self.sync.totals.pop(key, None)
            for one in self.modules[key].statistics:
                one.forget(self.step)
        else:
            self.move_statistics(key, self.step)
        self._updated.add(key)

    def _step_early(self, key: StageKey) -> None:
        """Make an update before its norm is known."""
        self._snapshots.append(OptimizerSnapshot(self.optimizers[key]))
        self.optimizers[key].step()

    def commit(self, wait: bool = True) -> bool | None:
        """See UpdatePolicy.commit. Where the norm is not finite (``skips``), undone updates are not made again."""
        if not self.pending:
            return True
        if not wait and not self.shares.ready():
            return None
        stands = self._settle()
        self.weights_change()
        return stands

    def _settle(self) -> bool:
        """Wait for the norm, and make pending updates final; return whether those that were made stand."""
        clipped = self._clip(decides=True)
        self.pending = False
        stands = not (clipped or self.skipping)
        if not stands:
            self._take_back(again=clipped)
        for key in self.optimizers:
            self.sync.drop(key)
        self._snapshots.clear()
        return stands

    def _take_back(self, again: bool) -> None:
        """Undo the updates that were made early; ``again``: and make them with the gradients as they are now."""
        for undo in self._snapshots:
            undo.restore()
            if again:
                undo.optimizer.step()
            else:
                round_all(undo.optimizer)

    def leave(self) -> list[dist.ProcessGroup]:
        """See WeightUpdates.leave."""
        self.shares.leave()
        return super().leave()

    def standing(self) -> Standing:
        """Say how far this device is, after ``leave``; only where there is a ledger."""
        assert self.ledger is not None
        return self.ledger.standing(self.step + 1, self._updated == self.modules.keys() and not self.pending)

    def finish_alone(self, norms: Sequence[float] | None) -> None:
        """Finish the step whose gradients are complete, after ``leave``; or forget it.

        ``norms``: the devices' shares of the squared norm; None to forget it.
        """
        assert self.ledger is not None
        if norms is None:
            self._take_back(again=False)
            self._snapshots.clear()
            self.pending = False
        else:
            self.ledger.take(norms)
            if self._unclipped and not self.pending:
                self._clip()
            for key in self.modules:
                if key not in self._updated:
                    self.update(key)
            self.commit()
        for key in self.modules:
            self.sync.drop(key)

    def _step(self, key: StageKey) -> None:
        optimizer: Any = self.optimizers[key]
        if self._no_update is not None:  # as torch's GradScaler has it: a fused step does nothing where this is 1
            optimizer.found_inf = self._no_update
        if not self.skipping:
            optimizer.step()
        if self._no_update is not None:
            del optimizer.found_inf
        self.sync.drop(key)

    def _clip(self, decides: bool = False) -> bool:
        """Clip by the global norm.

        Returns True if the gradients were too large and have been scaled; False if that is known on the device alone,
        which ``decides`` rules out.
        """
        if isinstance(self.shares, DeviceShares) and not decides:
            assert self.limit is not None
            if self._skips:
                self._no_update = self.shares.not_finite()
            if self.limit < math.inf:
                self.sync.scale(self.shares.factor(self.limit))
            return False
        norm = norm_of(self.shares.wait(self.push))
        self._unclipped = False
        if self.limit is None:
            return False
        self.skipping = self._skips and not math.isfinite(norm)
        factor: float | Tensor = clip_factor(self.limit, norm)
        too_large = bool(factor < 1.0)
        if isinstance(self.shares, DeviceShares):  # ``_choose`` hands it to the forecast, in the same step everywhere
            factor = self.shares.factor(self.limit)
        else:
            self._forecast.saw(norm)
        if too_large:
            self.sync.scale(factor)
        return too_large


class _OnVersions(WeightUpdates):
    """The part of policies whose forwards run on snapshots of the weights, which gather the gradients."""

    versions: Mapping[StageKey, WeightVersions]

    def weights(self, key: StageKey, ahead: bool) -> Snapshot | None:
        """See WeightUpdates.weights."""
        return self.versions[key].for_forward(ahead)

    def open(self, key: StageKey) -> None:
        """See WeightUpdates.open: a version's gradients are its own until they are collected."""

    def early(self, key: StageKey) -> BucketedAllReduce | None:
        """See WeightUpdates.early."""
        return None

    def weight_gradients(self, key: StageKey, saved: MicrobatchState, compute: Callable[[], None]) -> None:
        """See WeightUpdates.weight_gradients."""
        compute()
        self.versions[key].used = saved.weights

    def sum(self, key: StageKey) -> None:
        """See WeightUpdates.sum."""
        self.versions[key].collect()
        super().sum(key)


class DeferredUpdates(_OnVersions, Updates):
    """PipeDream-2BW: an update can wait for the norm as long as it likes, for the step after next is the first to use
    its weights. That costs nothing, and there is nothing to undo. The arguments are those of ``Updates``.
    """

    defers = True

    def __init__(self, versions: Mapping[StageKey, WeightVersions], trained: Trained, *given: Any) -> None:
        super().__init__(trained, *given)
        self.versions = versions

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """See Updates.before_updates."""
        for one in self.versions.values():
            one.collect()
        super().before_updates(times)

    def update(self, key: StageKey) -> None:
        """See Updates.update."""
        self.versions[key].expect()
        super().update(key)

    def _step_early(self, key: StageKey) -> None:
        """Leave it to ``commit``."""

    def _settle(self) -> bool:
        self._clip()
        self.pending = False
        for key in self.optimizers:
            self._step(key)
        return True

    def _step(self, key: StageKey) -> None:
        super()._step(key)
        self.versions[key].updated()


class StashedUpdates(_OnVersions):
    """PipeDream: an update after every micro-batch, so that there are no sums over devices and no norm to wait for."""

    each_microbatch = True

    def __init__(self, versions: Mapping[StageKey, WeightVersions], trained: Trained) -> None:
        super().__init__(trained)
        self.versions = versions

    def update(self, key: StageKey) -> None:
        """See WeightUpdates.update."""
        self.versions[key].collect()
        self.weights_change()
        self.squares.append(self.step_optimizer(key, self.lr))
        self.sync.drop(key)
        self.versions[key].updated()
        for one in self.modules[key].statistics:
            one.move_on()
