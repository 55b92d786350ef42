"""Build a stage from what the driver sends."""

from __future__ import annotations

import torch

from raypipe.models import LayeredModel
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.shapes import StageIOSpecs
from raypipe.runtime.stage.stage import StageModule


def io_specs_of(setup: Setup, plan: LayeredModel) -> StageIOSpecs:
    """Return the specs of what the stages exchange."""
    return StageIOSpecs(plan, setup.cut, setup.samples_per_microbatch, setup.graph, setup.placement[0])


def build_stage(setup: Setup, plan: LayeredModel, specs: StageIOSpecs, stage: int, device: torch.device) -> StageModule:
    """Build a stage of a device; its programs say whether its weight gradients are deferred."""
    split = any(a.task.kind == "W" for program in setup.train.values() for a in program.actions)
    return StageModule(
        plan,
        setup.cut[stage],
        setup.job.train.seed,
        device,
        split or setup.parallel.postpones,
        setup.recomputed,
        setup.search_recompute or setup.parallel.by_layer,
        specs.ends_of(stage),
    )
