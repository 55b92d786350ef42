"""The cut of layers into stages is the best there is."""

from itertools import combinations, pairwise

import pytest

from raypipe.errors import SpecError
from raypipe.job import GptSpec
from raypipe.models import GptLayers, split_layers
from raypipe.plan.cut.balance import contiguous_split


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
    cut = split_layers(plan(layers), stages)
    assert [len(part) for part in cut] == sizes
    assert [i for part in cut for i in part] == list(range(layers + 2))


def test_a_heavy_head_gets_fewer_blocks():
    cut = split_layers(plan(8, vocabulary=4096), 4)
    assert len(cut[-1]) == 2  # one block and the head
    assert len(cut[0]) > 2


@pytest.mark.parametrize("costs", [[3, 1, 4, 1, 5, 9, 2, 6], [1.0] * 7, [0.1, 0.2, 0.3, 0.4, 5.0], [2, 2, 2, 9, 1, 1]])
def test_no_other_cut_is_better(costs):
    def key(cuts):
        sums = [sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])]
        return round(max(sums), 9), round(sum(s * s for s in sums), 9)

    for parts in range(1, len(costs) + 1):
        every = [list(cuts) for cuts in combinations(range(1, len(costs)), parts - 1)]
        assert key(contiguous_split(costs, parts)) == min(map(key, every))


@pytest.mark.parametrize("stages", [0, 5])
def test_more_stages_than_blocks_cannot_be(stages):
    with pytest.raises(SpecError, match="use 1 to 4"):
        split_layers(plan(4), stages)
