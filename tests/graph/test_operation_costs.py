"""What autocast makes of operations on a CPU, beside what torch does."""

import pytest
import torch
import torch.nn.functional as F

from raypipe.graph.counted import IN_FLOAT32, ON_CPU, PRODUCTS

NARROW = torch.full((2, 3, 4, 4), 0.5, dtype=torch.bfloat16)
WIDE, MATRIX, BATCH = torch.ones(2, 3, 4, 4), torch.ones(4, 4), torch.ones(2, 4, 4)
OTHERS = {
    "layer_norm": lambda: F.layer_norm(NARROW, (4,)),
    "group_norm": lambda: F.group_norm(NARROW, 3),
    "batch_norm": lambda: F.batch_norm(NARROW, torch.zeros(3), torch.ones(3)),
    "softmax": lambda: torch.softmax(NARROW, -1),
    "_softmax": lambda: torch.ops.aten._softmax(NARROW, -1, False),
    "_safe_softmax": lambda: torch.ops.aten._safe_softmax(NARROW, -1),
    "log_softmax": lambda: torch.log_softmax(NARROW, -1),
    "pow": lambda: NARROW.pow(3.0),
    "softplus": lambda: F.softplus(NARROW),
    "cumsum": lambda: NARROW.cumsum(0),
}
CONVOLVED = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
PRODUCTS_OF = {
    "linear": lambda: F.linear(MATRIX, MATRIX),
    "addmm": lambda: torch.addmm(MATRIX, MATRIX, MATRIX),
    "mm": lambda: torch.mm(MATRIX, MATRIX),
    "bmm": lambda: torch.bmm(BATCH, BATCH),
    "matmul": lambda: torch.matmul(MATRIX, MATRIX),
    "baddbmm": lambda: torch.baddbmm(BATCH, BATCH, BATCH),
    "addbmm": lambda: torch.addbmm(MATRIX, BATCH, BATCH),
    "mv": lambda: torch.mv(MATRIX, MATRIX[0]),
    "addmv": lambda: torch.addmv(MATRIX[0], MATRIX, MATRIX[0]),
    "einsum": lambda: torch.einsum("ij,jk->ik", MATRIX, MATRIX),
    "convolution": lambda: torch.convolution(WIDE, torch.ones(3, 3, 1, 1), *CONVOLVED),
    "_convolution": lambda: torch._convolution(WIDE, torch.ones(3, 3, 1, 1), *CONVOLVED, False, False, True, True),
    "conv1d": lambda: F.conv1d(BATCH, torch.ones(4, 4, 1)),
    "conv2d": lambda: F.conv2d(WIDE, torch.ones(3, 3, 1, 1)),
    "conv3d": lambda: F.conv3d(WIDE[None], torch.ones(2, 2, 1, 1, 1)),
    "conv_transpose1d": lambda: F.conv_transpose1d(BATCH, torch.ones(4, 4, 1)),
    "conv_transpose2d": lambda: F.conv_transpose2d(WIDE, torch.ones(3, 3, 1, 1)),
    "conv_transpose3d": lambda: F.conv_transpose3d(WIDE[None], torch.ones(2, 2, 1, 1, 1)),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(WIDE, WIDE, WIDE),
    "_scaled_dot_product_attention_math": lambda: torch.ops.aten._scaled_dot_product_attention_math(
        WIDE, WIDE, WIDE
    )[0],
}  # fmt: skip


def under_autocast(run):
    with torch.autocast("cpu", torch.bfloat16):
        return run().dtype


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_products_run_in_16_bits_where_a_cpu_has_them_so(name):
    assert (under_autocast(PRODUCTS_OF[name]) is torch.bfloat16) == (name in ON_CPU.products)


@pytest.mark.parametrize("name", sorted(IN_FLOAT32))
def test_a_cpu_runs_few_operations_in_float32(name):
    run = OTHERS.get(name, lambda: getattr(NARROW, name)())
    assert (under_autocast(run) is torch.float32) == (name in ON_CPU.in_float32)
