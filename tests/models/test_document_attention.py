"""Attention document by document equals torch's with the mask of a packed row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.models.attention import document_attention, documents_of

LENGTHS = ((3, 1, 5, 1, 1), (4, 7), (11,))


def mask_of(*lengths: tuple[int, ...]) -> Tensor:
    rows = []
    for row in lengths:
        number = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        rows.append((number[:, None] == number).tril())
    return torch.stack(rows).unsqueeze(1)


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["rows", "row"])
@pytest.mark.parametrize("groups", [1, 2])
def test_it_computes_what_the_mask_says(lengths: tuple[tuple[int, ...], ...], groups: int) -> None:
    torch.manual_seed(0)
    shape = (len(lengths), 4, 11, 8)
    made = []
    given = [torch.randn(shape[0], heads, *shape[2:], dtype=torch.float64) for heads in (4, 4 // groups, 4 // groups)]
    wanted = torch.randn(shape, dtype=torch.float64)
    mask = mask_of(*lengths)
    for attend in (document_attention, F.scaled_dot_product_attention):
        inputs = [t.clone().requires_grad_() for t in given]
        output = attend(*inputs, mask, scale=0.3, enable_gqa=groups > 1)  # type: ignore[operator]
        output.backward(wanted)
        made.append([output.detach(), *(t.grad for t in inputs)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_documents_are_found() -> None:
    assert documents_of(mask_of(*LENGTHS)) == ((0, 3, 4, 9, 10, 11), (0, 4, 11), (0, 11))


@pytest.mark.parametrize(
    "mask",
    [
        mask_of((11,)) | mask_of((11,)).mT,  # both directions
        mask_of((11,)).triu(-3),  # a window
        torch.zeros(1, 1, 11, 11),  # added to scores
        mask_of((11,)).expand(1, 4, 11, 11),  # one for each head
        torch.zeros(1, 1, 11, 11, dtype=torch.bool),
        mask_of((1, 10)) | (torch.arange(11) == 10).unsqueeze(1),  # the last token sees all
    ],
)
def test_other_masks_are_the_kernels(mask: Tensor) -> None:
    assert documents_of(mask) is None
    given = [torch.randn(1, 4, 11, 8, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(document_attention(*given, mask), F.scaled_dot_product_attention(*given, mask))
