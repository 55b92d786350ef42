"""Times from a described machine: the limits of the roofline, what grows with the micro-batch and what does not."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.cost.analytic import SIZES, analytic_profile, update_bytes
from raypipe.cost.kernels import Kernels
from raypipe.cost.layer_work import TaskWork, newton_schulz_flops
from raypipe.cost.profile import Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import stage_costs, whole_matrices
from raypipe.errors import SpecError
from raypipe.job import GptSpec, load_cluster
from raypipe.job.cluster import cluster_from
from raypipe.schedule.ir import Sharding
from tests.cost.plain_layer import plain_layer

PRESETS = sorted(Path(__file__).parents[2].glob("cluster/devices/*.yaml"))
GPT = GptSpec(layers=3, hidden=256, heads=4, sequence=128, vocabulary=1000)
MACHINE = {
    "name": "made up",
    "hosts": 2,
    "devices_per_host": 4,
    "device": {
        "name": "one teraflop", "memory_gib": 10, "usable": 0.9, "peak_tflops": {"float32": 2}, "memory_gb_s": 100,
        "efficiency": 0.5, "layer_overhead_us": 7,
    },
    "inside": {"latency_us": 1, "bandwidth_gb_s": 50},
    "between": {"latency_us": 5, "bandwidth_gb_s": 10},
}  # fmt: skip


@pytest.fixture
def machine():
    return cluster_from(MACHINE)


def test_by_hand(machine):
    """1 TFLOP/s and 100 GB/s: 20 GFLOP take 20 ms, 3 GB take 30 ms."""
    busy = plain_layer("busy", flops=2e10, parameters=1000, kept_bytes=1e6, output_bytes=10)
    bulky = plain_layer("bulky", flops=1e6, parameters=1000, kept_bytes=3e9, output_bytes=10)
    profile = analytic_profile([busy, bulky], machine, "float32", sizes=[1, 2])
    compute, memory = profile.layers
    assert compute.times[1].forward == pytest.approx(7e-6 + 0.020)
    assert compute.times[2].input_grad == pytest.approx(7e-6 + 0.040)
    assert memory.times[2].forward == pytest.approx(7e-6 + 0.060 + 4000 / 1e11)
    assert compute.times[1].joint == compute.times[1].input_grad + compute.times[1].weight_grad
    assert profile.update_s_per_parameter == pytest.approx(28 / 1e11)
    assert (profile.memory_bytes, profile.base_bytes) == (10 * 2**30, pytest.approx(2**30))
    assert (profile.devices, profile.devices_per_host) == (8, 4)
    assert profile.inside.seconds(5e9) == pytest.approx(0.1 + 1e-6)
    assert profile.between.seconds(1e9) == pytest.approx(0.1 + 5e-6)


def test_half_of_the_efficiency_where_the_overhead_says_so():
    """A layer of x operations reaches x / (x + overhead * rate) of the rate."""
    rate, overhead = 1e12, 5e-3
    kernels = Kernels(flops_s=rate, bytes_s=1e18, overhead_s=overhead)
    for samples, share in ((1, 0.5), (3, 0.75), (9, 0.9)):
        assert kernels.seconds(TaskWork(flops=5e9), samples) == pytest.approx(5e9 * samples / (rate * share))


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_make_sensible_profiles(path):
    cluster = load_cluster(path)
    dtype = "float32" if "float32" in cluster.device.peak_tflops else "bfloat16"
    shape = GptSpec(layers=4, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
    profile = analytic_profile(shape, cluster, dtype)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    block = profile.layers[1]
    operations = 24 * 1024 * 2048**2 + 2 * 1024**2 * 2048
    reached = [operations * b / block.times[b].forward / 1e12 for b in SIZES]
    assert reached == sorted(reached)  # larger micro-batches are never less efficient
    assert 0.3 < reached[-1] / cluster.device.peak_tflops[dtype] < cluster.device.efficiency
    for times in block.times.values():
        assert 1.6 * times.forward < times.joint < 2.6 * times.forward  # Chimera and all the papers take 2
    whole = [sum(layer.times[4].forward for layer in profile.layers), 4 * block.times[4].forward]
    assert whole[0] < 2 * whole[1]


def test_wider_numbers_cost_more(machine):
    device = {**MACHINE["device"], "peak_tflops": {"float32": 2, "float64": 2, "bfloat16": 2}}
    cluster = cluster_from({**MACHINE, "device": device})
    by_dtype = [analytic_profile(GPT, cluster, d, [4]) for d in ("bfloat16", "float32", "float64")]
    kept = [p.layers[1].kept_bytes for p in by_dtype]
    assert kept == sorted(kept)
    assert by_dtype[0].update_s_per_parameter == by_dtype[1].update_s_per_parameter  # autocast: the weights stay wide


def test_layers_and_what_crosses_their_cuts(machine):
    profile = analytic_profile(GPT, machine, "float32")
    assert [layer.name for layer in profile.layers] == ["embedding", "block.0", "block.1", "block.2", "head"]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 128 * 256] * 4 + [0]
    assert profile.tied_parameters == 1000 * 256
    apart = analytic_profile(GPT.model_copy(update={"tie_embeddings": False}), machine, "float32")
    assert apart.tied_parameters == 0


@pytest.mark.parametrize(
    ("optimizer", "momentum", "expected"), [("adam", False, 28), ("sgd", False, 12), ("sgd", True, 20)]
)
def test_an_update_reads_and_writes_its_state(optimizer, momentum, expected):
    assert update_bytes(optimizer, momentum, "float32") == expected


@pytest.mark.parametrize(
    ("wrong", "where", "words"),
    [
        (lambda c: analytic_profile(GPT, c, "bfloat16"), "train.dtype", "no peak_tflops for bfloat16"),
        (lambda c: analytic_profile(GPT, c, "float32", sizes=[]), "sizes", "not valid micro-batch sizes"),
        (lambda c: analytic_profile(GPT, c, "float32", sizes=[0, 1]), "sizes", "from 1"),
        (lambda c: analytic_profile([], c, "float32"), "model", "has no layers"),
        (lambda c: analytic_profile(GPT, c, "float32", optimizer="adamx"), "train.optimizer", 'did you mean "adam'),
    ],
)
def test_bad_requests(machine, wrong, where, words):
    with pytest.raises(SpecError, match=words) as error:
        wrong(machine)
    assert error.value.where == where


def test_muons_iterations_take_their_products_time(machine):
    """At 1 TFLOP/s; where four copies divide the matrices of two blocks whole, the busiest has an MLP's and a QKV's."""
    model = GPT.model_copy(update={"tie_embeddings": False})
    muon, plain = (analytic_profile(model, machine, "float32", [1], optimizer=name) for name in ("muon", "adamw"))
    h = GPT.hidden
    block = [counted_iteration(*shape) for shape in ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))]
    assert muon.iteration_flops_s == 1e12
    counted = [[newton_schulz_flops(*shape) for shape in layer.matrices] for layer in muon.layers[1:-1]]
    assert counted == [pytest.approx(block)] * 3
    assert not any(layer.matrices for layer in (muon.layers[0], muon.layers[-1], *plain.layers))
    cut, placement = [(0, 1), (2, 3, 4)], ((0, 1),)
    costs = stage_costs(muon, cut, 1, placement, copies=4)
    values = [sum(muon.layers[i].trained for i in layers) * muon.update_s_per_parameter for layers in cut]
    assert costs.update == pytest.approx((values[0] + sum(block) / 1e12, values[1] + 2 * sum(block) / 1e12))
    shared = with_sharding(costs, muon, cut, placement, Sharding(levels=(1, 1)), 4)
    busiest = max(block) / 1e12, (max(block) + block[0]) / 1e12
    assert shared.update == pytest.approx((values[0] / 4 + busiest[0], values[1] / 4 + busiest[1]))
    # Shards are as large as that copy's, of 7 h^2 values, where 24 h^2 are to be had: 4 h^2 are padding.
    assert whole_matrices(muon, cut[1], 4).padding == 4 * h * h


class _Products(TorchDispatchMode):
    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


def counted_iteration(rows, columns):
    """Operations of the products that an update by torch.optim.Muon hands to kernels."""
    p = torch.nn.Parameter(torch.ones(rows, columns))
    p.grad = torch.ones_like(p)
    with _Products() as seen:
        torch.optim.Muon([p]).step()
    return seen.flops
