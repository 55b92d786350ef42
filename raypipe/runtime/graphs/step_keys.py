"""Random keys in fixed memory: a captured step draws from tables, which the host fills anew before every replay.

While steps still run uncaptured, it is noted at which places each micro-batch draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypipe.models.keyed_random import Keys, RandomKeys
from raypipe.runtime.compiled.traced_keys import Places

Samples = tuple[int, ...]
"""Numbers of a micro-batch's samples in their step."""


class StepKeys:
    """The keys of all micro-batches of a step; ``noting`` and ``fixed`` take the place of ``RandomKeys``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[Samples, Places] = {}
        self._tables: dict[Samples, list[Tensor]] = {}

    def noting(self, seed: int, step: int, samples: Sequence[int], training: bool) -> RandomKeys:
        """Return keys that note where they are drawn from."""
        places = self._places.setdefault(tuple(samples), Places())
        return _Noting(places, seed, step, samples, training)

    def fixed(self, seed: int, step: int, samples: Sequence[int], training: bool) -> RandomKeys:
        """Return keys in the tables.

        Raises:
            LookupError: no such micro-batch has been noted.
        """
        at = tuple(samples)
        return _Fixed(self._places[at], self._tables[at], seed, step, samples, training)

    def fill(self, seed: int, step: int) -> None:
        """Fill the tables with the keys of a step; what is captured reads these very tensors."""
        for samples, places in self._places.items():
            made = places.tables(RandomKeys(seed, step, samples, True), self._device)
            known = self._tables.get(samples)
            if known is None or [x.shape for x in known] != [x.shape for x in made]:  # more places were noted
                self._tables[samples] = made
                continue
            for table, values in zip(known, made, strict=True):
                table.copy_(values)


class _Noting(RandomKeys):
    """Notes the places that draw."""

    def __init__(self, places: Places, *args: Any) -> None:
        super().__init__(*args)
        self._places = places
        self._inside = False

    def _note(self, sites: Sequence[int], per_sample: bool) -> None:
        known = self._places.own if per_sample else self._places.shared
        known += [site for site in sites if site not in known]

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """See RandomKeys.seeds."""
        self._note([site], per_sample)
        self._inside = True
        try:
            return super().seeds(site, per_sample, device)
        finally:
            self._inside = False

    def table(self, sites: Sequence[int], per_sample: bool, device: torch.device) -> Tensor:
        """See RandomKeys.table; compiled stages ask for one."""
        if not self._inside:
            self._note(sites, per_sample)
        return super().table(sites, per_sample, device)


class _Fixed(RandomKeys):
    """Draws from tables."""

    def __init__(self, places: Places, tables: Sequence[Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._sites: Callable[[bool], list[int]] = lambda own: places.own if own else places.shared
        self._fixed = {own: table for own, table in zip(_kinds(places), tables, strict=True)}

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """See RandomKeys.seeds."""
        return self._fixed[per_sample][self._sites(per_sample).index(site)]

    def table(self, sites: Sequence[int], per_sample: bool, device: torch.device) -> Tensor:
        """See RandomKeys.table."""
        own = self._sites(per_sample)
        return torch.stack([self._fixed[per_sample][own.index(site)] for site in sites])


def _kinds(places: Places) -> list[bool]:
    """Return of which kinds ``Places.tables`` returns a table."""
    return [kind for kind, sites in ((True, places.own), (False, places.shared)) if sites]
