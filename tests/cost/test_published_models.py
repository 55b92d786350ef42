"""The models of ``tests.bench.published``: every block is counted once, with all of its parameters."""

import pytest

from tests.bench.published.models import works


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671.026),  # "671B" on its card
        ("qwen3-30b-a3b", 30.532),  # "30.5B"
    ],
)
def test_parameters(name, billions):
    """The first blocks of DeepSeek-V3 have an MLP, the others experts, and all the same attention."""
    layers = works(name, 4096)
    assert sum(work.parameters for work in layers) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert len({work.forward.attention for work in layers[1:-1]}) == 1
    assert layers[1].forward.attention > 0
