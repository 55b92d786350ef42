"""Weight versions of one stage replica, for schedules whose backwards use older weights than the newest.

The optimizer works on the stage's parameters, the newest version. Forwards run on snapshots of it, so that a
backward finds the very weights its forward saw, however many updates came in between.

``stash`` (PipeDream, Narayanan et al. 2019, section 3.3): a forward takes the newest weights; they are kept until its
backward is done. ``2bw`` (PipeDream-2BW, Narayanan et al. 2021, section 3.1): step t runs on w(t-1), and its gradient
updates w(t): w(t+1) = w(t) - lr * grad(w(t-1)); two versions suffice.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from raypipe.runtime.stage.stage import StageModule

Snapshot = dict[str, Tensor]
"""Path of a trained parameter inside the stage module -> its values; leaves that collect gradients of their own. Frozen
parameters have one version, the module's own."""


class WeightVersions:
    """The snapshots of one stage replica."""

    def __init__(self, module: StageModule, rule: Literal["stash", "2bw"]) -> None:
        self.module, self.rule = module, rule
        self.paths: dict[str, nn.Parameter] = {path: p for path, p in module.named_parameters() if p.requires_grad}
        self.older = self.newest = self._snapshot()
        self.used: Snapshot | None = None
        """The version whose gradients were computed last, and not collected."""

    def _snapshot(self) -> Snapshot:
        return {path: p.detach().clone().requires_grad_() for path, p in self.paths.items()}

    def for_forward(self, ahead: bool) -> Snapshot:
        """Return the weights a forward runs on. With ``ahead`` it belongs to the step after the one not yet updated."""
        return self.newest if self.rule == "stash" or ahead else self.older

    def collect(self) -> None:
        """Hand the gradients that a version has collected to the optimizer's parameters."""
        for path, leaf in {} if self.used is None else self.used.items():
            self.paths[path].grad, leaf.grad = leaf.grad, None
        self.used = None

    def expect(self) -> None:
        """Note that the optimizer will change the parameters; the newest version becomes the previous one."""
        self.older = self.newest

    def updated(self) -> None:
        """Note that the optimizer has changed the parameters, which are a new version."""
        self.newest = self._snapshot()
        if self.rule == "stash":
            self.older = self.newest  # nothing runs on the one before: do not keep it

    def previous(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs beside the parameters: w(t-1) of 2BW, by path; nothing after a flush."""
        return dict(self.older) if self.rule == "2bw" else {}

    def restore(self, previous: dict[str, Tensor]) -> None:
        """Restart from loaded parameters and, for 2BW, the version before them."""
        self.newest = self._snapshot()
        self.older = self.newest
        if self.rule == "2bw" and previous:
            self.older = {path: t.clone().requires_grad_() for path, t in previous.items()}
