"""A model without measured costs is cut by its FLOPs."""

import pytest

from raypipe.errors import SpecError
from raypipe.job import GptSpec
from raypipe.models import GptLayers, split_layers
from raypipe.plan.cut.layers import line_of
from raypipe.schedule.shape import Shape
from raypipe.search.placements import placed


def plan(layers, **changes):
    return GptLayers(GptSpec(**{"layers": layers, "hidden": 32, "heads": 4, "sequence": 16, **changes}))


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [  # layers a stage holds, embedding and head included
        (4, 1, [6]),
        (4, 2, [3, 3]),
        (4, 4, [2, 1, 1, 2]),
        (6, 4, [2, 2, 2, 2]),  # hidden 32: the head costs half a block, so the last stage gets one block
    ],
)
def test_small_models(layers, stages, sizes):
    cut = split_layers(plan(layers), line_of(stages), max)
    assert [len(part) for part in cut] == sizes
    assert [i for part in cut for i in part] == list(range(layers + 2))


def test_a_heavy_head_gets_fewer_blocks():
    cut = split_layers(plan(8, vocabulary=4096), line_of(4), max)
    assert len(cut[-1]) == 2  # one block and the head
    assert len(cut[0]) > 2


def test_the_step_decides_where_a_device_holds_two_stages():
    model, placement = plan(7, vocabulary=4096), placed("v", Shape(devices=2, microbatches=4, chunks=2))

    def slowest_device(flops):
        return max(flops[0] + flops[3], flops[1] + flops[2])

    devices = split_layers(model, placement, slowest_device)
    stages = split_layers(model, placement, lambda flops: -slowest_device(flops))
    assert slowest_device(flops_of(model, devices)) < slowest_device(flops_of(model, stages))


def flops_of(model, cut):
    return [sum(model.flops[i] for i in part) for part in cut]


@pytest.mark.parametrize("stages", [0, 5])
def test_more_stages_than_blocks_cannot_be(stages):
    with pytest.raises(SpecError, match="use 1 to 4"):
        split_layers(plan(4), [range(stages)], max)
