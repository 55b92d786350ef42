"""A device that leaves the others holds none of their groups any more: only then do the others' waits end."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.update.shards import Holders, ShardedStage


class Group:
    """A group of two, as far as a stage asks before its first collective."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def test_sharded_stages_let_go_of_their_groups() -> None:
    model = GptLayers(GptSpec(layers=1, hidden=8, heads=1, sequence=4, vocabulary=256), torch.float32)
    module = StageModule(model, range(model.count), 0, torch.device("cpu"), False)
    dividing, others = Group(), Group()
    stage = ShardedStage(module, 0, 3, Holders(cast(Any, dividing), cast(Any, others)))
    sync = GradientSync(0, {(0, 0): module}, ((0,), (1,)), (), {}, sharded={(0, 0): stage})
    refs = [weakref.ref(dividing), weakref.ref(others)]
    held = sync.leave()
    assert held == [dividing, others]
    del dividing, others
    held.clear()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
