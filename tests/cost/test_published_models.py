"""The models of ``tests.bench.published``: as many parameters as their publishers count."""

import pytest

from tests.bench.published.models import works


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        (
            "deepseek-v3",
            671.026,
        ),  # Hugging Face's model card: 671B, of 685B with the block that predicts one token more
        ("qwen3-30b-a3b", 30.532),  # "30.5B" on its card
    ],
)
def test_parameters(name: str, billions: float) -> None:
    """Count every layer once: the first blocks of DeepSeek-V3 have an MLP, the others experts, all have attention."""
    layers = works(name, 4096)
    assert sum(work.parameters for work in layers) / 1e9 == pytest.approx(billions, abs=1e-3)
    blocks = layers[1:-1]
    assert all(work.forward.attention for work in blocks)
    assert len({work.forward.attention for work in blocks}) == 1
