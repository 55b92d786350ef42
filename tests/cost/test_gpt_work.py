"""The counted work of a GPT's layers against the layers themselves: parameters, operations, and every kept tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.cost.gpt_work import Software, gpt_work
from raypipe.job import GptSpec
from raypipe.models import gpt
from raypipe.models.keyed_random import random_keys
from raypipe.runtime.backward.split_backward import WeightQueue, defer_weight_gradients

SAMPLES = 2
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


def spec(**changes):
    # Heads of 32 values: the fused attention on CPU needs no padding then.
    return GptSpec(**{"layers": 2, "hidden": 128, "heads": 4, "sequence": 64, "vocabulary": 320, **changes})


@pytest.mark.parametrize(
    ("hidden", "layers", "vocabulary", "sequence", "published"),
    [
        (1280, 64, 50257, 1024, 1_389_327_360),  # Chimera's GPT-2 (table 4); its learned positions reach to 1,024
        (768, 12, 50257, 1024, 124_439_808 + 768 * 50257),  # GPT-2 small, whose head is tied
    ],
)
def test_published_parameter_counts(hidden, layers, vocabulary, sequence, published):
    shape = spec(hidden=hidden, layers=layers, vocabulary=vocabulary, sequence=sequence, tie_embeddings=False)
    assert sum(work.parameters for work in gpt_work(shape, "float32")) == published


def layer_of(shape, index, dtype, split):
    torch.manual_seed(0)
    layer = gpt.make_layer(shape, index).to(DTYPES[dtype])
    queue = WeightQueue()
    if split:
        defer_weight_gradients(layer, queue)
    return layer, queue


def inputs_of(shape, index, dtype):
    ids = torch.randint(shape.vocabulary, (SAMPLES, shape.sequence))
    if index == 0:
        return ids, ids
    x = torch.randn(SAMPLES, shape.sequence, shape.hidden, dtype=DTYPES[dtype])
    return x.requires_grad_(), ids


def forward(shape, layer, index, dtype, x, ids):
    with random_keys(0, 0, range(SAMPLES), True), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        y = layer(x)
        if index == shape.layers + 1:
            y = F.cross_entropy((y if dtype == "float64" else y.float()).flatten(0, 1), ids.flatten(), reduction="sum")
    return y


def sizes(tensors, but):
    """Bytes behind the tensors, each storage once, those in ``but`` not at all."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(n for at, n in storages.items() if at not in {t.untyped_storage().data_ptr() for t in but})


CASES = [
    (dtype, dropout, split, index)
    for dtype in ("float32", "float64", "bfloat16")
    for dropout in (0.0, 0.1)
    for split in (False, True)
    for index in (0, 1, 3)
]


@pytest.mark.parametrize(("dtype", "dropout", "split", "index"), CASES)
def test_kept_bytes_are_the_tensors_that_autograd_saves(dtype, dropout, split, index):
    shape = spec(dropout=dropout)
    work = gpt_work(shape, dtype)[index]
    layer, queue = layer_of(shape, index, dtype, split)
    x, ids = inputs_of(shape, index, dtype)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = forward(shape, layer, index, dtype, x, ids)
    places = 8 * shape.sequence  # position numbers, once a micro-batch: left out of the account
    expected = SAMPLES * work.kept_bytes + work.cast_bytes
    assert sizes(saved, list(layer.parameters())) == pytest.approx(expected, abs=places)
    if not split:
        return
    closures = []
    with queue.collect(closures):
        torch.autograd.backward([y], [torch.ones_like(y)])
    cells = [cell.cell_contents for closure in closures for cell in closure.compute.__closure__]
    waiting = [held for held in cells if isinstance(held, torch.Tensor)]
    positions = places + 4 * (2 if dtype == "float64" else 1) * shape.sequence * shape.hidden
    result = sizes(waiting, list(layer.parameters()))
    assert result == pytest.approx(SAMPLES * work.waiting_bytes, abs=positions if index == 0 else 0)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products, from the shapes that reach the kernels."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            a, b = args[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        elif "scaled_dot_product" in name and "backward" not in name:
            batch, heads, sequence, width = args[0].shape
            self.flops += 2 * batch * heads * sequence * sequence * width  # two products, masked half left out
        return result


@pytest.mark.parametrize("index", [0, 1, 3])
def test_operations_are_those_of_the_products(index):
    shape = spec()
    work = gpt_work(shape, "float32")[index]
    layer, _ = layer_of(shape, index, "float32", split=False)
    x, ids = inputs_of(shape, index, "float32")
    with Products() as counted:
        y = forward(shape, layer, index, "float32", x, ids)
    assert counted.flops == SAMPLES * work.forward.flops
    with Products() as back:
        y.backward(torch.ones_like(y))
    attention = 5 * SAMPLES * shape.sequence**2 * shape.hidden if index == 1 else 0  # inside one kernel
    assert back.flops + attention == SAMPLES * (work.input_grad.flops + work.weight_grad.flops)


def test_written_scores_are_korthikantis_formula():
    """Section 4.1: s*h*(34 + 5*a*s/h) bytes a block in 16 bits, byte masks and dropout on the scores included."""
    shape = spec(dropout=0.1, hidden=2048, heads=16, sequence=1024)
    s, h, a = shape.sequence, shape.hidden, shape.heads
    narrow = Software(fused_attention=False, keyed_dropout=False, autocast=False)
    statistics = 4 * 4 * s
    assert gpt_work(shape, "bfloat16", narrow)[1].kept_bytes - statistics == s * h * (34 + 5 * a * s / h)


def test_what_frameworks_of_2020_keep():
    """Attention and GELU written out in elementary operations, and every tensor that autograd then saves."""
    shape = spec(dropout=0.0, activation="gelu-tanh")
    b, s, h, a = SAMPLES, shape.sequence, shape.hidden, shape.heads
    q, k, v = (torch.randn(b * a, s, h // a, requires_grad=True) for _ in range(3))
    inner = torch.randn(b, s, 4 * h, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        scores = q.bmm(k.transpose(1, 2)) / (h // a) ** 0.5
        weights = torch.softmax(scores.masked_fill(torch.ones(s, s).triu(1).bool(), -1e4), -1)
        weights.bmm(v)
        0.5 * inner * (1 + torch.tanh(0.79788456 * (inner + 0.044715 * torch.pow(inner, 3))))
    extra = sizes(seen, []) - s * s  # the causal mask, a byte each
    fused = gpt_work(shape, "float32")[1].kept_bytes - 4 * a * s
    written = gpt_work(shape, "float32", Software(fused_attention=False, fused_tanh_gelu=False))[1].kept_bytes
    # q, k, v and GELU's own input are kept either way; so is the MLP's second input.
    assert written - fused == pytest.approx((extra - 4 * (3 + 4) * b * s * h) / b)
