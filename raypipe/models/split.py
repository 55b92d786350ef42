"""Cut a model's layers into the stages of a schedule by their FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypipe.models.layered import LayeredModel
from raypipe.plan.cut.layers import LayerCut, Placement, fastest_cut

Cut = tuple[tuple[int, ...], ...]


def split_layers(model: LayeredModel, placement: Placement, step: Callable[[Sequence[float]], float]) -> Cut:
    """Return the layer numbers of each stage. A cut assigns whole units of the model to stages.

    Args:
        model: the model; its ``flops`` are the costs of its layers.
        placement: the device of every stage, one row per replica of the pipeline.
        step: returns the time of a step, in any unit, given the FLOPs of each stage. It is asked only where balancing
            stages and balancing devices give different cuts, and decides between the two.

    Raises:
        SpecError: there are more stages than units.
    """
    units = model.units
    flops = [float(sum(model.flops[i] for i in unit)) for unit in units]
    found: LayerCut = fastest_cut(flops, placement, lambda cut: step(cut.stage_cost))
    return tuple(tuple(range(units[part[0]].start, units[part[-1]].stop)) for part in found.stages)
