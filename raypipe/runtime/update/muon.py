"""Muon for a stage's matrices and AdamW for its other parameters, as one optimizer.

Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is Scalable for LLM Training, arXiv:2502.16982), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from raypipe.job.train_spec import TrainSpec

MUON = "muon"
"""Key of a parameter group: whether Muon updates it."""


def takes_muon(train: TrainSpec, name: str, dims: int) -> bool:
    """Return whether Muon updates a parameter of this name and number of dimensions.

    >>> train = TrainSpec(steps=1, batch=1, optimizer="muon")
    >>> [takes_muon(train, name, 2) for name in ("h.0.mlp.weight", "wte.weight")], takes_muon(train, "h.0.ln.weight", 1)
    ([True, False], False)
    """
    return dims == 2 and not any(fnmatchcase(name, pattern) for pattern in train.muon_excludes)


class MuonAndAdamW(torch.optim.AdamW):
    """Updates the parameter groups with a true ``muon`` by torch.optim.Muon, and the others by AdamW.

    Both keep their state here, so that checkpoints, snapshots and moves to other devices see one optimizer.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], made_by: Callable[[Any], Any], train: TrainSpec) -> None:
        """Make both.

        Args:
            groups: parameter groups, each with ``muon``.
            made_by: makes the class of torch to use of a class (``untraced``).
            train: says the options.
        """
        options: dict[str, Any] = {
            "momentum": train.momentum,
            "nesterov": train.momentum > 0,
            "adjust_lr_fn": train.muon_rate,
        }
        matrices = [dict(group) for group in groups if group[MUON] and group["params"]]
        others = [dict(group) for group in groups if not group[MUON] or not group["params"]]
        super().__init__(others, train.lr, train.betas, train.eps, train.weight_decay)
        self._step_others = made_by(torch.optim.AdamW).step
        self._muon = made_by(torch.optim.Muon)(matrices, train.lr, train.weight_decay, **options) if matrices else None
        if self._muon is not None:
            self.param_groups += self._muon.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group[MUON]]
            self._step_others(self)
        finally:
            self.param_groups = groups
        if self._muon is not None:
            self._muon.state = self.state
            self._muon.param_groups = [group for group in groups if group[MUON]]
            self._muon.step()
