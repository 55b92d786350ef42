"""The optimizer steps of one device, with gradients clipped by their global norm, if possible without a stall.

There are three ways to come to the same weights, bit for bit (``schedule.lowering.norm_policy``):

``wait``        The update waits until the last device's gradients are complete, then clips and steps.
``optimistic``  A synchronous schedule steps at once, as if nothing had to be clipped, and keeps what the step
                overwrote. When the norm says otherwise, it puts that back, clips and steps again; what ran on the wrong
                weights is run again. This is zero bubble's post-validation (Qi et al. 2024, section 4), with a copy in
                place of an inverted step, so that nothing is lost to rounding and any optimizer will do. It costs a
                copy of the parameters and the optimizer state from the update to the next step's first backward.
                PipeDream-2BW defers the update until the norm is there, because the step after next is the first to
                use these weights. That costs nothing.

Where the norm stays on the device (``device_norm``), the host waits for none: ``wait`` queues clipping and update, and
2BW's deferred update is queued likewise. Only an optimistic update needs the host to read its norm, after the tasks
that run ahead have been queued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raypipe.runtime.update.collective import Push
from raypipe.runtime.update.device_norm import DeviceShares
from raypipe.runtime.update.gradients import GradientSync, StageKey
from raypipe.runtime.update.master_weights import ROUNDED, round_all
from raypipe.runtime.update.norm import Forecast, Shares, clip_factor, norm_of
from raypipe.runtime.update.optimizer import set_rate
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.schedule.lowering.norm_policy import NormPolicy, RequestedNormPolicy


class OptimizerSnapshot:
    """A copy of what the next step of an optimizer overwrites.

    Parameters that are rounded from master weights are not in it: after ``restore``, the next step rounds them again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        held = [
            master
            for group in optimizer.param_groups
            for p, master in zip(group.get(ROUNDED, group["params"]), group["params"], strict=True)
            if p.grad is not None
        ]
        self._values = [(p, p.detach().clone()) for p in held]
        self._states = [
            (p, {key: v.clone() if isinstance(v, Tensor) else v for key, v in optimizer.state[p].items()})
            for p in held
            if p in optimizer.state
        ]
        self._fresh = [p for p in held if p not in optimizer.state]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copy. It can be used once."""
        for parameter, value in self._values:
            parameter.copy_(value)
        self.optimizer.state.update(self._states)
        for parameter in self._fresh:
            self.optimizer.state.pop(parameter, None)


class KnownShares(Shares):
    """The shares of the norm, where they are known already: nobody needs to be asked."""

    def __init__(self, shares: list[float]) -> None:
        super().__init__(None)
        self._known = shares

    def wait(self, push: Push) -> list[float]:
        """Return the shares."""
        return self._known


class Updates:
    """Makes the updates of a device, and knows whether the last ones are still pending."""

    def __init__(
        self,
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        versions: Mapping[StageKey, WeightVersions],
        sync: GradientSync,
        shares: Shares | DeviceShares,
        clip: float | None,
        requested: RequestedNormPolicy,
        skips: bool = False,
    ) -> None:
        """Take what a device updates.

        Args:
            optimizers: by stage replica.
            versions: the weight versions of the stage replicas, where the schedule keeps some.
            sync: has the gradients.
            shares: exchanges the shares of the norm.
            clip: largest norm; None clips nothing.
            requested: what the job asks for.
            skips: whether there is no update where the norm is not finite. All devices see the same norm, so they
                agree; where nothing is clipped, the norm is exchanged for that alone.
        """
        self.optimizers, self.versions = optimizers, versions
        self.sync, self.shares = sync, shares
        self.limit = math.inf if clip is None and skips else clip
        self._skips = skips
        self._no_update: Tensor | None = None
        """On a GPU whose host does not read the norm: 1.0 if it is not finite, else 0.0."""
        self._forecast = Forecast(self.limit or 0.0, requested)
        self._policy: NormPolicy = "none"
        self._snapshots: list[OptimizerSnapshot] = []
        self.pending = False
        """Whether the last updates are not final yet: see ``commit``."""
        self.skipping = False
        """Whether the newest step makes no update, as far as the host knows."""

    def begin(self, may_run_ahead: bool, push: Push) -> Tensor:
        """All this device's gradients are complete: choose how its updates are made, and clip if that is to wait.

        ``may_run_ahead``: the program has tasks that do not depend on the updates being certain; the same on all
        devices. Returns this device's share of the squared norm, float64 scalar on the device.

        Raises:
            TransportError: a device did not hand in its share in time.
        """
        share = self.sync.norm_squared()
        self._policy, self.skipping, self._no_update = "none", False, None
        if self.limit is None:
            return share
        if isinstance(self.shares, DeviceShares):
            may_run_ahead = may_run_ahead and (bool(self.versions) or not self.shares.alone)
            for earlier in self.shares.earlier():
                self._forecast.saw(norm_of(earlier))
        ahead = may_run_ahead and (bool(self.versions) or self._forecast.optimistic())
        self._policy = "optimistic" if ahead else "wait"
        # Where each device knows the norm by itself, nobody tells anybody: ``shares`` has this device alone. The share
        # of the one that counts for all is the whole already, those of the others are nothing.
        self.shares.start(self.sync.known_norm_squared(share))
        self.pending = self._policy == "optimistic"
        if not self.pending:
            self._clip(push)
        return share

    @property
    def optimistic(self) -> bool:
        """Return whether the last updates were made before their norm was known."""
        return self._policy == "optimistic" and not self.versions

    def make(self, key: StageKey, lr: float) -> None:
        """Update one stage replica, by the policy that ``begin`` chose."""
        optimizer = self.optimizers[key]
        set_rate(optimizer, lr)
        if key in self.versions:
            self.versions[key].expect()
        if self._policy != "optimistic":
            self._step(key)
        elif self.optimistic:
            self._snapshots.append(OptimizerSnapshot(optimizer))
            optimizer.step()

    def commit(self, push: Push, wait: bool = True) -> bool | None:
        """Make the last updates final. Returns False if they had to be undone, and made again with clipped gradients.

        They are not made again where the norm is not finite (``skips``). Returns None, and does nothing, if the norm is
        not known yet and the caller does not ``wait`` for it.

        Raises:
            TransportError: a device did not hand in its share in time.
        """
        if not self.pending:
            return True
        if not wait and not self.shares.ready():
            return None
        clipped = self._clip(push, decides=not self.versions)
        self.pending = False
        if self.versions:
            for key in self.optimizers:
                self._step(key)
            return True
        if clipped or self.skipping:
            for undo in self._snapshots:
                undo.restore()
                if clipped:
                    undo.optimizer.step()
                else:
                    round_all(undo.optimizer)
        for key in self.optimizers:
            self.sync.drop(key)
        self._snapshots.clear()
        return not (clipped or self.skipping)

    def undo(self) -> None:
        """Take back the last updates where they are pending: the parameters are those before them."""
        for undo in self._snapshots:
            undo.restore()
            round_all(undo.optimizer)
        self._snapshots.clear()
        self.pending = False

    def _step(self, key: StageKey) -> None:
        optimizer: Any = self.optimizers[key]
        if self._no_update is not None:  # as torch's GradScaler has it: a fused step does nothing where this is 1
            optimizer.found_inf = self._no_update
        if not self.skipping:
            optimizer.step()
        if self._no_update is not None:
            del optimizer.found_inf
        self.sync.drop(key)
        if key in self.versions:
            self.versions[key].updated()

    def _clip(self, push: Push, decides: bool = False) -> bool:
        """Clip by the global norm.

        Returns True if the gradients were too large and have been scaled; False if that is known on the device alone,
        which ``decides`` rules out.
        """
        assert self.limit is not None
        if isinstance(self.shares, DeviceShares) and not decides:
            if self._skips:
                self._no_update = self.shares.not_finite()
            if self.limit < math.inf:
                self.sync.scale(self.shares.factor(self.limit))
            return False
        norm = norm_of(self.shares.wait(push))
        self.skipping = self._skips and not math.isfinite(norm)
        factor: float | Tensor = clip_factor(self.limit, norm)
        too_large = bool(factor < 1.0)
        if isinstance(self.shares, DeviceShares):  # ``begin`` hands it to the forecast, in the same step on all devices
            factor = self.shares.factor(self.limit)
        else:
            self._forecast.saw(norm)
        if too_large:
            self.sync.scale(factor)
        return too_large
