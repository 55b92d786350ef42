"""Times of kernels by hand: tiles, the power limit, bytes, attention, launches; and what no tensor can have."""

from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import MEGATRON, PYTORCH_2020, RAYPIPE, gpt_work
from raypipe.cost.kernels import Kernels, tiled_operations
from raypipe.cost.layer_work import Product, TaskWork, linear_products
from raypipe.cost.memory import device_memory
from raypipe.cost.tensor import share, tensor_profile
from raypipe.errors import SpecError
from raypipe.job import GptSpec, load_cluster
from raypipe.job.cluster import ClusterSpec, cluster_from
from raypipe.schedule import Shape, generate

DEVICES = Path(__file__).parents[2] / "cluster" / "devices"
GIB, MIB = 2**30, 2**20
GPT = GptSpec(layers=4, hidden=1024, heads=8, sequence=1024, vocabulary=1000)
SLOW = {"flops_s": 1e12, "peak_s": 2e12, "bytes_s": 1e15, "multiprocessors": 10}
"""Large products at half of the peak, ten processors, and memory that never matters."""


def h100(**device: object) -> ClusterSpec:
    """Return eight H100 whose description has these keys."""
    result = load_cluster(DEVICES / "h100.yaml").resized(8).model_dump(mode="json")
    return cluster_from({**result, "device": {**result["device"], **device}})


def test_a_partial_wave_costs_what_the_clock_does_not_make_up():
    """Ten tiles of 128 x 256 fill ten processors once; an eleventh asks for a second wave, at the peak."""
    kernels = Kernels(**SLOW)
    depth = 1 << 22  # so long that filling the pipeline does not matter
    full, more = (Product(128 * tiles, 256, depth) for tiles in (10, 11))
    assert kernels.seconds(TaskWork(flops=full.flops, products=(full,)), 1) == pytest.approx(full.flops / 1e12, 1e-3)
    # Two waves at the peak take as long as one at half of it: eleven tiles go at the rate of large products.
    assert kernels.seconds(TaskWork(flops=more.flops, products=(more,)), 1) == pytest.approx(more.flops / 1e12, 1e-3)
    alone = Product(128, 128, depth)  # one of ten processors works, on a tile that reads more for each operation
    assert kernels.seconds(TaskWork(flops=alone.flops, products=(alone,)), 1) == pytest.approx(
        10 * alone.flops / (0.85 * 2e12), rel=0.01
    )


@pytest.mark.parametrize(
    ("columns", "depth", "tflops"), [(32768, 512, 590), (24576, 1536, 990), (7168, 2048, 1025), (4096, 7168, 1304)]
)
def test_a_short_inner_dimension_waits_for_the_pipeline(columns: int, depth: int, tflops: float):
    """DeepGEMM's published FP8 products of 4,096 rows on an H800, whose large ones go at 1,400 TFLOP/s."""
    kernels = Kernels(**{**SLOW, "linear_flops_s": 1.4e15, "linear_peak_s": 1.979e15, "multiprocessors": 132})
    product = Product(4096, columns, depth, linear=True)
    result = kernels.seconds(TaskWork(flops=product.flops, products=(product,), overhead=0), 1)
    assert product.flops / result == pytest.approx(1e12 * tflops, rel=0.05)


def test_tiles_fill_whole_waves():
    assert tiled_operations(1280, 256, 256, 10) == 2 * 1280 * 256 * 256
    # Of an eleventh tile: 22 quadratic ones of 128 in three waves, which reach 0.85 of the rate.
    assert tiled_operations(1408, 256, 256, 10) == pytest.approx(2 * 3 * 1280 * 128 * 256 / 0.85)


def test_samples_add_rows_and_in_weight_gradients_depth():
    kernels = Kernels(**{**SLOW, "peak_s": 1e18})
    for product in linear_products(1280, 4096, 2560):
        once, thrice = (kernels.seconds(TaskWork(flops=product.flops, products=(product,)), n) for n in (1, 3))
        longer = (
            1 if product.grows == "rows" else (3 * 1280 + 350) / (3 * (1280 + 350))
        )  # one pipeline to fill, not three
        assert thrice == pytest.approx(3 * once * longer)


def test_each_kind_of_work_has_its_own_rate():
    kernels = Kernels(
        flops_s=1e12, peak_s=1e18, bytes_s=1e9, multiprocessors=1, attention_s=(2e12, 1e12), launch_s=1e-3,
        linear_flops_s=4e12, linear_peak_s=1e18, cast_bytes=6,
    )  # fmt: skip
    product = Product(1 << 10, 1 << 10, 1 << 20, linear=True)
    assert kernels.seconds(TaskWork(flops=product.flops, products=(product,), overhead=0), 1) == pytest.approx(
        ((1 << 31) + 2 * (1 << 20)) / 1e9  # read in FP8, written in 16 bits
    )
    assert kernels.seconds(TaskWork(quantized=1e9, overhead=0), 1) == pytest.approx(6)
    long = TaskWork(flops=1e15, attention=1e15, positions=1 << 30)
    assert kernels.seconds(long, 1) == pytest.approx(500, rel=1e-5)
    assert kernels.seconds(long, 1, backward=True) == pytest.approx(1000, rel=1e-5)
    assert kernels.attention_share(long, 1) == 1
    assert kernels.seconds(TaskWork(overhead=2.0), 1) == pytest.approx(24e-3)  # the host launches 24 kernels


@pytest.mark.parametrize("multiprocessors", [132, None])
def test_autocast_leaves_grouped_products_in_float32(multiprocessors: int | None):
    """torch's autocast has no rule for them: 15 times as long on an H100, whose tensor cores have no float32."""
    device = h100(multiprocessors=multiprocessors, communication_processors=0).device
    mixed, wide = Kernels.of(device, "bfloat16", RAYPIPE, grouped=True), Kernels.of(device, "float32", RAYPIPE)
    experts = Product(1 << 16, 4096, 4096, groups=8)
    dense, grouped = (TaskWork(flops=one.flops, products=(one,)) for one in (experts._replace(groups=0), experts))
    assert mixed.seconds(grouped, 1) == pytest.approx(wide.seconds(grouped, 1))
    assert mixed.seconds(dense, 1) == Kernels.of(device, "bfloat16", RAYPIPE).seconds(dense, 1)
    assert mixed.seconds(grouped, 1) > 10 * mixed.seconds(dense, 1)
    narrow = h100(peak_tflops={"bfloat16": 989}).device
    with pytest.raises(SpecError, match="no peak_tflops for float32"):
        Kernels.of(narrow, "bfloat16", RAYPIPE, grouped=True)


def test_attention_with_narrow_heads_takes_longer():
    """As in FlashAttention-3's figures 5 and 6: cuDNN's 388 and 433 TFLOP/s beside 539 and 516."""
    kernels = Kernels.of(h100().device, "bfloat16-true", MEGATRON)
    for backward, published in ((False, 388 / 539), (True, 433 / 516)):
        wide, narrow = (
            kernels.attention(TaskWork(flops=1e12, attention=1e12, positions=4096, head=head), 1, backward)
            for head in (128, 64)
        )
        assert wide / narrow == pytest.approx(published, abs=5e-3)


def test_compiled_layers_move_less_and_keep_what_the_eager_ones_compute_in_between():
    """What torch's min-cut keeps is in tests/runtime/compiled/test_planned_memory.py: of a block with the exact GELU as
    much as eager kernels, of the approximate one, which is a chain of operations in some, less."""
    cluster = h100()
    eager, compiled = (
        analytic_profile(GPT, cluster, "bfloat16-true", [4], compiled=c).layers[1] for c in (False, True)
    )
    assert compiled.times[4].forward < eager.times[4].forward
    assert compiled.kept_bytes == eager.kept_bytes
    chain = replace(PYTORCH_2020, fused_attention=True)
    tanh = gpt_work(GPT.model_copy(update={"activation": "gelu-tanh"}), "bfloat16-true", chain)[1]
    assert (tanh.fused_kept_bytes or 0.0) + tanh.fused_operand_bytes < tanh.kept_bytes
    old = load_cluster(DEVICES / "v100.yaml")  # without a count of its processors nothing changes
    assert analytic_profile(GPT, old, "float16", [4], compiled=True) == analytic_profile(GPT, old, "float16", [4])


def test_fp8_speeds_up_linear_layers_alone():
    cluster = h100()
    wide = GPT.model_copy(update={"hidden": 8192, "heads": 64})
    plain, narrow = (analytic_profile(wide, cluster, dtype, [4]) for dtype in ("bfloat16-true", "fp8"))
    assert 0.5 < narrow.layers[1].times[4].weight_grad / plain.layers[1].times[4].weight_grad < 0.7
    assert narrow.layers[-1].times == plain.layers[-1].times  # the head
    assert narrow.layers[1].kept_bytes == plain.layers[1].kept_bytes
    with pytest.raises(SpecError, match="no peak_tflops for float8"):
        analytic_profile(wide, load_cluster(DEVICES / "a100.yaml"), "fp8")


def test_a_tensor_rank_has_its_share_of_every_product():
    block = gpt_work(GPT, "bfloat16-true", MEGATRON)[1]
    rank = share(block, gpt_work(GPT, "bfloat16-true", MEGATRON)[0], 4)
    for task in ("forward", "input_grad", "weight_grad"):
        whole, part = (sum(p.flops for p in getattr(work, task).products) for work in (block, rank))
        assert part == pytest.approx(whole / 4)


def test_exchanges_beside_products_are_hidden_but_for_a_part():
    wide = GPT.model_copy(update={"hidden": 8192, "heads": 64})
    plain, hidden = (
        tensor_profile(wide, h100(), "bfloat16-true", 4, [4], overlapped=o).layers[1].times[4].forward
        for o in (False, True)
    )
    alone = analytic_profile([gpt_work(wide, "bfloat16-true", RAYPIPE)[1]], h100(), "bfloat16-true", [4])
    assert alone.layers[0].times[4].forward / 4 < hidden < plain


def test_what_no_tensor_can_have_is_kept_free_item_by_item():
    cluster = h100()
    profile = analytic_profile(GPT, cluster, "bfloat16-true", [4])
    cut, pipeline = [[0, 1], [2], [3], [4, 5]], generate("1f1b", Shape(devices=4, microbatches=8))
    first, second, *_ = device_memory(profile, cut, pipeline, 4, copies=2)
    reserved = cluster.device.reserved
    assert reserved is not None
    assert first.base == pytest.approx(reserved.context_mib * MIB)
    assert first.libraries == reserved.workspace_mib * MIB
    assert first.fragmentation == pytest.approx(reserved.fragmentation * profile.memory_bytes)
    assert first.headroom == pytest.approx(reserved.headroom * profile.memory_bytes)
    edge = reserved.channels * reserved.channel_mib * MIB
    # All devices, its stage's copies, holders of the tied matrix; gradients from the next stage.
    assert first.communicators == (2 + 2 + 2 + 1) * edge
    assert second.communicators == (2 + 2 + 2) * edge
    assert first.total == pytest.approx(first.planned + first.reserved)
    (alone,) = device_memory(profile, [range(6)], generate("1f1b", Shape(devices=1, microbatches=8)), 4)
    assert alone.communicators == 0


def test_a_figure_of_ones_own_wins():
    profile = analytic_profile(GPT, h100(usable_gib=70.0), "bfloat16-true", [4])
    assert profile.memory_bytes - profile.process_bytes == pytest.approx(70 * GIB)
    (device,) = device_memory(profile, [range(6)], generate("1f1b", Shape(devices=1, microbatches=8)), 4)
    assert device.reserved == device.base == pytest.approx(profile.memory_bytes - 70 * GIB)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"usable_gib": 81.0}, r"device\.usable_gib: 81 GiB of a memory of 79\.6"),
        ({"communication_processors": 132}, "device.communication_processors: 132 of 132"),
        ({"attention": {"flash3": {"forward": 0.5, "backward": 0.5}}}, "flash3"),
        ({"attention": {"flash": {"forward": 1.5, "backward": 0.5}}}, "attention.flash.forward"),
        ({"reserved": {"context_mib": 600, "fragmentation": 1.0}}, "reserved.fragmentation"),
        ({"reserved": {}}, "reserved.context_mib"),
        ({"multiprocessors": 0}, "multiprocessors"),
    ],
)
def test_bad_values_are_refused_by_name(keys, words):
    with pytest.raises(SpecError, match=words):
        h100(**keys)
