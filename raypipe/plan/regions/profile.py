"""The region profile: what layers cost on one device, and how much faster two streams run what one runs in turn.

``raypipe regions JOB.yaml -o REGIONS.json`` records one. A region is a run of layers, forward or backward, whose
kernels are alike; layers in it are stages of the plan, one model layer each.

Source: Oh et al. 2022 (OOO backprop), section 4.1.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from raypipe.cost.profile import Bytes, Seconds, TakenFor
from raypipe.errors import SpecError
from raypipe.job.field_types import Count, Positive, Spec
from raypipe.job.reading import load_json

MADE_BY = "raypipe regions JOB.yaml -o REGIONS.json"
"""The command that writes a region profile."""


class LayerCost(Spec):
    """One layer's tasks for one micro-batch, each alone on the device."""

    name: str
    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    """W and the layer's update."""
    kept_bytes: Bytes
    """Activations from the layer's forward to its input gradient."""
    waiting_bytes: Bytes
    """What its weight gradient waits for after that: inputs of products and gradients of their outputs."""


class Region(Spec):
    """Tasks of the main stream that are alike."""

    kind: Literal["B", "F"]
    layers: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    """In the order in which they run: from the last to the first in a backward."""

    @property
    def name(self) -> str:
        """For people: ``B 5-8``."""
        first, last = min(self.layers), max(self.layers)
        return f"{self.kind} {first}" if first == last else f"{self.kind} {first}-{last}"


class Together(Spec):
    """A region and a layer's weight gradient that began at the same time on two streams."""

    region: Count
    layer: Count
    main_s: Seconds
    """From then to the end of the region."""
    sub_s: Seconds
    """From then to the end of the weight gradient."""


class Rates(NamedTuple):
    """Speeds of the two streams while both are busy, in shares of that of each alone."""

    main: float
    sub: float


ALONE = Rates(1.0, 1.0)
SLOWEST = 0.02
"""Where noise would say that a stream stands still."""


class RegionProfile(Spec):
    """All that multi-region joint scheduling knows of a job on a device."""

    format: Literal[1] = 1
    """Version of the file format."""
    device: str
    """Name of the device for which the times are valid."""
    taken_for: TakenFor | None = None
    """The job that it was measured for."""
    microbatch: Positive
    """Samples of the micro-batch that it was measured with."""
    layers: Annotated[tuple[LayerCost, ...], Field(strict=False, min_length=1)]
    tied: Annotated[tuple[tuple[Count, ...], ...], Field(strict=False)] = ()
    """Layers that share parameters, which are updated together."""
    regions: Annotated[tuple[Region, ...], Field(strict=False, min_length=2)]
    """In the order of a step that begins with its backward and ends with the next forward."""
    together: Annotated[tuple[Together, ...], Field(strict=False)]
    """Every pair of a region and a layer but the first."""

    @model_validator(mode="after")
    def _whole(self) -> RegionProfile:
        """Check that the regions are one backward and one forward, and that every pair was measured once.

        Raises:
            SpecError: otherwise.
        """
        count = len(self.layers)
        run = [(r.kind, layer) for r in self.regions for layer in r.layers]
        step = [("B", layer) for layer in reversed(range(count))] + [("F", layer) for layer in range(count)]
        if run != step:
            why = "are not a backward from the last layer to the first, and then a forward"
            raise SpecError("regions", why, f"make it with: {MADE_BY}")
        pairs = sorted((one.region, one.layer) for one in self.together)
        if pairs != [(r, layer) for r in range(len(self.regions)) for layer in range(1, count)]:
            why = "does not have every region with every layer but the first, once each"
            raise SpecError("together", why, f"make it with: {MADE_BY}")
        if any(layer >= count for layer in chain.from_iterable(self.tied)):
            raise SpecError("tied", f"names a layer of {count} that there is not", f"make it with: {MADE_BY}")
        return self

    def main_s(self, region: int) -> float:
        """Return the time of a region alone: T_main."""
        one = self.regions[region]
        layers = [self.layers[n] for n in one.layers]
        return sum(layer.input_grad if one.kind == "B" else layer.forward for layer in layers)

    def pairs(self) -> dict[tuple[int, int], Together]:
        """Return what was measured of each region with each layer."""
        return {(one.region, one.layer): one for one in self.together}

    def group(self, layer: int) -> tuple[int, ...]:
        """Return the layers that are updated together with this one, itself included, in order."""
        result = {layer}
        for tied in self.tied:
            if result & set(tied):
                result |= set(tied)
        return tuple(sorted(result))

    def speed_up(self, region: int, layer: int, pair: Together) -> float:
        """Return how often faster a region and a weight gradient are on two streams than in turn."""
        both = max(pair.main_s, pair.sub_s)
        return (self.main_s(region) + self.layers[layer].weight_grad) / both if both > 0 else 1.0

    def rates(self, region: int, layer: int, pair: Together) -> Rates:
        """Return the streams' speeds while both are busy, from when each has ended: the later one ends alone."""
        main, sub = self.main_s(region), self.layers[layer].weight_grad
        both = min(pair.main_s, pair.sub_s)
        if both <= 0:
            return ALONE
        rest = max(pair.main_s, pair.sub_s) - both
        did_main, did_sub = (main, sub - rest) if pair.main_s <= pair.sub_s else (main - rest, sub)
        return Rates(*(min(1.0, max(SLOWEST, did / both)) for did in (did_main, did_sub)))


def load_regions(path: Path) -> RegionProfile:
    """Read what ``raypipe regions -o`` wrote.

    Raises:
        SpecError: the file is missing, empty, no JSON, or no region profile; names the first wrong key.
    """
    return load_json(path, RegionProfile, MADE_BY)
