"""A member's share of divided layers: parameters and kept bytes against the layers, sums against the formulas."""

from pathlib import Path

import pytest
import torch

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.collectives import terms
from raypipe.cost.tensor import divided_gpt, tensor_profile
from raypipe.errors import SpecError
from raypipe.job.cluster import load_cluster
from raypipe.models import GptLayers
from raypipe.tensor import Division, SoloGroup, group_of_thread
from tests.cost.test_gpt_work import DTYPES, SAMPLES, forward, inputs_of, sizes, spec

CLUSTER = Path(__file__).parents[2] / "cluster" / "devices" / "a100.yaml"


class Two(SoloGroup):
    """A member whose other one adds nothing: what is computed is wrong, what is kept is not."""

    size = 2

    def start_all_gather(self, x):
        return torch.stack([x, x]), lambda: None


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_kept_bytes_are_the_tensors_that_autograd_saves(dtype, dropout, index, sequence):
    shape = spec(dropout=dropout)
    work = divided_gpt(shape, dtype, 2, sequence=sequence)[index].work
    model = GptLayers(shape, DTYPES[dtype], Division(2, 0, sequence=sequence))
    layer = model.build(index, seed=0)
    assert sum(p.numel() for p in layer.parameters()) == work.parameters
    x, ids = inputs_of(shape, index, dtype)
    x = x[:, : x.shape[1] // (1 + sequence)].detach().contiguous().requires_grad_()
    saved = []
    with (
        group_of_thread(Two()),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        if index == 1:
            forward(shape, layer, index, dtype, x, ids)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                model.task.loss(layer(x), {"shift_labels": ids})
    result = sizes(saved, list(layer.parameters())) - work.cast_bytes
    assert result == pytest.approx(SAMPLES * work.kept_bytes, rel=0.02)


class Listening(Two):
    """Writes down what is exchanged, and how many bytes."""

    def __init__(self) -> None:
        self.bytes: list[tuple[str, float]] = []

    def start_all_reduce(self, x, operation="sum"):
        self.bytes.append(("all_reduce", float(x.nbytes)))
        return super().start_all_reduce(x, operation)

    def start_all_gather(self, x):
        self.bytes.append(("all_gather", 2.0 * x.nbytes))
        return super().start_all_gather(x)

    def start_reduce_scatter(self, x):
        self.bytes.append(("reduce_scatter", float(x.nbytes)))
        return super().start_reduce_scatter(x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_exchanges_are_as_large_as_the_layers_make_them(dtype, index, sequence):
    """Gradients of norms and biases are of parameters, so as large for one sample as for all."""
    shape = spec(dropout=0.1)
    tensor_rank = divided_gpt(shape, dtype, 2, sequence=sequence)[index]
    model = GptLayers(shape, DTYPES[dtype], Division(2, 0, sequence=sequence))
    layer, group = model.build(index, seed=0), Listening()
    x, ids = inputs_of(shape, index, dtype)
    if index:
        x = x[:, : x.shape[1] // (1 + sequence)].detach().contiguous().requires_grad_()
    with group_of_thread(group):
        if index < 3:
            y = forward(shape, layer, index, dtype, x, ids).sum()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                y = model.task.loss(layer(x), {"shift_labels": ids})
        there, group.bytes = group.bytes, []
        y.backward()
    small = shape.hidden * DTYPES[dtype].itemsize
    tables = 0 if index else shape.sequence * small
    made = [one for one in group.bytes if one[1] not in (small, tables)]
    assert sorted(there) == sorted((one.kind, SAMPLES * one.bytes) for one in tensor_rank.forward)
    large = [one for one in tensor_rank.backward if one.bytes != small]
    assert sorted(made) == sorted((one.kind, SAMPLES * one.bytes) for one in large)
    assert len(group.bytes) - len(made) - (index == 0 and sequence) == len(tensor_rank.backward) - len(large)


def test_a_group_of_one_is_the_device():
    shape, cluster = spec(dropout=0.1), load_cluster(CLUSTER)
    one, plain = tensor_profile(shape, cluster, "bfloat16", 1), analytic_profile(shape, cluster, "bfloat16")
    assert one.devices == plain.devices
    for a, b in zip(one.layers, plain.layers, strict=True):
        assert (a.parameters, a.kept_bytes) == (b.parameters, pytest.approx(b.kept_bytes))
        for size, times in b.times.items():
            for name in ("forward", "input_grad", "weight_grad", "joint", "recompute"):
                assert getattr(a.times[size], name) == pytest.approx(getattr(times, name), rel=1e-12)


def test_a_large_block_takes_its_share_and_two_sums():
    shape, cluster = spec(hidden=8192, heads=64, sequence=2048, layers=1, vocabulary=51200), load_cluster(CLUSTER)
    whole = analytic_profile(shape, cluster, "bfloat16", sizes=[4])
    size = 4
    shared = tensor_profile(shape, cluster, "bfloat16", size, sizes=[4])
    sum_s = min(
        terms("all_reduce", model, size).seconds(whole.inside, 4 * 2 * 2048 * 8192)
        for model in ("ring", "rabenseifner")
    )
    before, after = whole.layers[1].times[4], shared.layers[1].times[4]
    compute = after.forward - 2 * sum_s
    assert before.forward / size < compute < 1.15 * before.forward / size  # norms and residual sums do not divide
    half = tensor_profile(shape, cluster, "bfloat16", size, sizes=[2]).layers[1].times[2].forward
    half_sum_s = min(
        terms("all_reduce", model, size).seconds(whole.inside, 2 * 2 * 2048 * 8192)
        for model in ("ring", "rabenseifner")
    )
    beside = tensor_profile(shape, cluster, "bfloat16", size, sizes=[1, 4], sub_pipelined=True).layers[1].times
    assert set(beside) == {4}  # one sample has no halves
    assert beside[4].forward == pytest.approx(2 * max(half - 2 * half_sum_s, 2 * half_sum_s))
    assert beside[4].weight_grad > after.weight_grad  # smaller kernels, and the sum of gradients twice
    assert after.weight_grad < 1.1 * before.weight_grad / size
    assert shared.devices == whole.devices // size
    assert shared.layers[0].output_bytes == whole.layers[0].output_bytes  # every member passes the whole stream on


def test_what_does_not_divide_is_refused():
    cluster = load_cluster(CLUSTER)
    with pytest.raises(SpecError, match=r"4 heads are not divisible by 3\n  fix: use one of 1, 2, 4"):
        divided_gpt(spec(), "float32", 3)
    with pytest.raises(SpecError, match="devices do not divide into groups of 3"):
        tensor_profile(spec(heads=3, hidden=96), cluster, "float32", 3)
