"""One family of each mechanism trains exactly as eager PyTorch does; ``python -m tests.bench.zoo`` takes all."""

from __future__ import annotations

import pytest

from tests.exhaustive import exhaustive
from tests.zoo.compare import compare
from tests.zoo.families import FAMILIES, ODD

SUITE = (
    "nn.MultiheadAttention", "nn.LSTM dropout", "stochastic depth", "noise", "weight_norm", "spectral_norm",
    "expert tensors", "a dict", "a part that branches", "a model that branches",
    "mistral3",
)  # fmt: skip
MORE = (
    "nn.TransformerEncoder causal", "nn.Transformer", "nn.GRU", "orthogonal", "nn.EmbeddingBag", "U-Net", "llava",
    "paligemma", "paligemma, no types", "switch", "switch, mask", "longformer", "led", "llava_next",
    "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SUITE, *ODD, *exhaustive(*MORE)])
def test_a_family_is_exact_or_refused(name: str) -> None:
    family = FAMILIES[name]
    if "hf" in family.model:
        pytest.importorskip("transformers")
    row = compare(family)
    if family.refused:
        assert family.refused in row.refused
        return
    assert not row.refused
    assert max(row.loss, row.gradient) <= family.tolerance
    assert row.left <= family.left


def test_all_families_are_named_once() -> None:
    assert len(FAMILIES) >= 60
