"""Published times and memory against the presets: GPT-3 on H100 in FP8, one BERT-Large block."""

from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import PYTORCH_2020, RAYPIPE, gpt_work
from raypipe.cost.kernels import WITHOUT_MASK, Kernels
from raypipe.cost.layer_work import ExpertsWork, LayerWork, TaskWork
from raypipe.job import GptSpec, load_cluster
from tests.bench.published.models import works
from tests.bench.published.predict import chosen, layout, predict, reserved_gib, rows, side_streams, tokens_per_gpu
from tests.bench.published.trainers import BIASES, EAGER, ROTATED, attending, biased, divided, rotated


@pytest.mark.parametrize(("model", "limit"), [("gpt3-175b", 0.06), ("gpt3-5b", 0.22)])
def test_predicted_beside_published(model, limit):
    row = next(row for row in rows() if row.model == model)
    asked = layout(row)
    result = predict(asked)
    assert tokens_per_gpu(asked, result) == pytest.approx(row.tokens_per_s_per_gpu, rel=limit)
    assert result.fits
    assert 40 < reserved_gib(asked, result) < 60


def test_every_row_is_expressed():
    assert [row.model for row in rows() if row.refused] == []
    (divided,) = (layout(row) for row in rows() if row.context > 1)
    assert (divided.context, divided.replicas, divided.microbatches) == (2, 64, 4)


def test_another_layout_is_chosen_for_the_same_devices():
    asked = layout(next(row for row in rows() if row.model == "gpt3-5b"))
    best = chosen(asked, seconds=2).best
    assert best.fits
    assert best.candidate.devices == asked.devices
    assert best.batch == asked.batch


def test_a_pipeline_that_is_filled_twice_idles_longer():
    asked = layout(next(row for row in rows() if row.model == "gpt3-175b"))
    once, twice = predict(asked), predict(replace(asked, rounds=2))
    assert twice.busy_s == pytest.approx(once.busy_s, rel=1e-3)
    idle = [result.compute_s - result.busy_s for result in (once, twice)]
    assert idle[1] > 1.2 * idle[0]  # the rest is uneven stages, whose idle time follows the micro-batches


def test_torch_holds_buffers_for_all_microbatches():
    asked = layout(next(row for row in rows() if row.model == "gpt3-175b"))
    result = predict(asked)
    assert reserved_gib(replace(asked, torch_pipeline=True), result) > reserved_gib(asked, result) + 1


def test_fsdp_holds_its_sums_and_what_it_gathered_on_other_streams():
    """A float32 sum for each of AdamW's values that a rank has, and two blocks in bfloat16, of the rank's share."""
    asked = layout(next(row for row in rows() if row.model == "gpt3-175b"))
    result = predict(asked)
    assert side_streams(asked, result) == 0  # not FSDP2's
    values = result.memory[result.fullest].optimizer / 12
    block = works(asked.model, asked.sequence)[1].parameters / asked.tensor
    own = replace(asked, float32_sums=True)
    assert side_streams(own, result) == pytest.approx(4 * values + 2 * 2 * block)
    assert side_streams(replace(own, shard="zero3"), result) < 4 * values  # gathers are in the plan's own memory


def test_how_many_copies_divide_experts_is_chosen_too():
    asked = layout(next(row for row in rows() if row.model == "gpt-oss-20b"))
    best = chosen(asked, seconds=1).best
    assert best.fits
    assert best.candidate.replicas % best.candidate.experts == 0
    assert best.candidate.experts > 1


BLOCK = LayerWork(
    name="block",
    parameters=0,
    forward=TaskWork(flops=5e9, attention=4e9, positions=4096, head=128, traffic=1e6),
    input_grad=TaskWork(flops=11e9, attention=10e9, positions=4096, head=128, traffic=1e6),
    weight_grad=TaskWork(),
    kept_bytes=9e6,
    output_bytes=4e6,
)


def test_a_mask_that_is_read_doubles_attention_at_the_rate_of_its_kernel():
    device = Kernels.of(load_cluster("cluster/devices/h100.yaml").device, "bfloat16-true", RAYPIPE)
    plain, masked = BLOCK, attending(BLOCK, (0.5, 0.25), masked=True)
    for name, rate in (("forward", 0.5), ("input_grad", 0.25)):
        before, after = (device.attention(getattr(work, name), 1, name != "forward") for work in (plain, masked))
        assert after == pytest.approx(before * 2 / rate / WITHOUT_MASK)
    assert attending(BLOCK, (1.0, 1.0), masked=False) == BLOCK


def test_what_lies_between_products_is_on_each_tensor_rank_without_sequence_parallelism():
    """Two million values of the stream, of which one of four ranks would have a quarter."""
    shared, whole = (divided(BLOCK, 4, copied=False, scattered=scattered) for scattered in (True, False))
    assert whole[1:] == shared[1:]  # as many sums
    for name, moved in zip(("forward", "input_grad"), EAGER, strict=True):
        more = getattr(whole.work, name).traffic - getattr(shared.work, name).traffic
        assert more == pytest.approx(moved * 2e6 * 3 / 4)


def test_eager_kernels_of_trainers_move_bytes_for_each_value():
    """Queries and keys of 4,096 positions, 100 wide; biases of 20 rows of 30 values, and of 60 in between."""
    experts = ExpertsWork(experts=4, per_token=2, rows=20, row_bytes=60, parameters=0)
    turned, summed = rotated(BLOCK, 100), biased(replace(BLOCK, experts=experts), megatron=False)
    for i, name in enumerate(("forward", "input_grad")):
        more = [getattr(work, name).traffic - getattr(BLOCK, name).traffic for work in (turned, summed)]
        assert more == [ROTATED[i] * 4096 * 100, 20 * (60 * BIASES[False][0][i] + 30 * BIASES[False][1][i])]
    assert biased(BLOCK, megatron=True) == BLOCK


def test_rows_of_mixtures_have_their_recipes():
    """AutoModel's GPT-OSS has eight ranks that divide experts, FlexAttention, and computes activations again."""
    asked = {(row.model, row.gpus): layout(row) for row in rows() if row.experts}
    own, bridge = asked["gpt-oss-20b", 8], asked["gpt-oss-120b", 64]
    assert (own.experts, own.recompute, own.te, own.by_nccl) == (8, "full", False, False)
    assert (bridge.experts, bridge.recompute, bridge.te, bridge.by_nccl) == (8, "none", True, True)
    assert [one.eager_rotary for one in asked.values()] == [not one.megatron for one in asked.values()]


# The models of ``tests.bench.published``: every block is counted once, with all of its parameters.


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


# The presets against published times and memory of one BERT-Large block on those very devices.
#
# Hidden 1024, 16 heads, 128 tokens, float32 (on the RTX 3090 with PyTorch's TF32 default of the time): milliseconds of
# a forward and of a joint backward by micro-batch size. Source: Osawa, Li, Hoefler 2023 (PipeFisher,
# arXiv:2211.14133), ``prof/bert-large_time_memory_*.csv`` in the authors' repository.


SIZES = (1, 2, 4, 8, 16, 32, 64)
FORWARD = {
    "p100": (1.1625, 1.5150, 2.5176, 4.5000, 9.2986, 16.1004, 31.0692),
    "v100": (1.3056, 1.5839, 1.9019, 2.9013, 5.4378, 10.3864, 19.9766),
    "rtx3090": (0.8505, 0.8574, 1.0400, 1.3435, 2.4597, 4.8538, 9.0997),
}
BACKWARD = {
    "p100": (1.6712, 2.5648, 4.1982, 7.6532, 14.8756, 26.9529, 52.8838),
    "v100": (1.2356, 1.5566, 2.6045, 4.5482, 8.6031, 16.2849, 32.2890),
    "rtx3090": (0.9843, 0.9887, 1.3376, 2.2560, 4.1509, 7.7770, 14.8202),
}
KEPT_MIB = 11.001953125
"""Memory that a forward of one sample leaves behind, its output included."""
BERT_BLOCK = gpt_work(
    GptSpec(layers=1, hidden=1024, heads=16, sequence=128, vocabulary=30522, dropout=0.1), "float32", PYTORCH_2020
)[1]


@pytest.mark.parametrize(
    ("preset", "typical", "worst"), [("p100", 0.05, 0.14), ("v100", 0.105, 0.20), ("rtx3090", 0.095, 0.21)]
)
def test_times(preset, typical, worst):
    """Root mean square and worst relative error over both tasks and all sizes."""
    cluster = load_cluster(Path(__file__).parents[2] / "cluster" / "devices" / f"{preset}.yaml")
    (layer,) = analytic_profile([BERT_BLOCK], cluster, "float32", SIZES).layers
    errors = []
    for size, forward, backward in zip(SIZES, FORWARD[preset], BACKWARD[preset], strict=True):
        times = layer.times[size]
        errors += [1e3 * times.forward / forward - 1, 1e3 * times.joint / backward - 1]
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < typical
    assert max(map(abs, errors)) < worst


def test_memory():
    """To the byte."""
    assert (BERT_BLOCK.kept_bytes + BERT_BLOCK.output_bytes) / 2**20 == KEPT_MIB
