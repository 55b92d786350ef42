"""Layers build alone, always start the same, and together are one GPT."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raypipe.job import GptSpec
from raypipe.models import GptLayers, cross_entropy, join_tied, random_keys

MODEL = GptSpec(layers=3, hidden=32, heads=4, sequence=16, vocabulary=256, dropout=0.1)


def all_layers(plan, **kwargs):
    return [plan.build(i, **kwargs) for i in range(plan.count)]


def test_names_and_shapes():
    plan = GptLayers(MODEL)
    assert plan.names == ("embedding", "block.0", "block.1", "block.2", "head")
    x = torch.randint(256, (2, 16))
    with random_keys(0, 0, [0, 1], training=True):
        for i, layer in enumerate(all_layers(plan, seed=0)):
            x = layer(x)
            if i < plan.count - 1:
                assert plan.crossing(i, 2) == ((x.shape, x.dtype, True),)
            assert sum(p.numel() for p in layer.parameters()) == plan.parameters(i)


def test_a_layer_starts_the_same_whoever_builds_it():
    plan = GptLayers(MODEL)
    together = [layer.state_dict() for layer in all_layers(plan, seed=3)]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for i in reversed(range(plan.count)):
        alone = plan.build(i, seed=3).state_dict()
        assert all(torch.equal(alone[key], together[i][key]) for key in alone)
    assert torch.equal(state, torch.get_rng_state())


def test_start_values_differ_by_seed_and_layer_and_not_by_dtype():
    plan = GptLayers(MODEL)
    weight = plan.build(1, seed=0).qkv.weight
    assert not torch.equal(weight, plan.build(2, seed=0).qkv.weight)
    assert not torch.equal(weight, plan.build(1, seed=1).qkv.weight)
    assert torch.equal(weight.double(), GptLayers(MODEL, torch.float64).build(1, seed=0).qkv.weight)


def test_start_values_are_gpt2s():
    plan = GptLayers(MODEL)
    block = plan.build(1, seed=0)
    assert block.mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp_out.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert block.qkv.bias.eq(0).all()
    assert block.mlp_norm.weight.eq(1).all()


def test_tied_weights_start_equal_and_can_become_one():
    plan = GptLayers(MODEL)
    layers = all_layers(plan, seed=0)
    (group,) = plan.tied
    assert group.parameters == ((0, "0.token.weight"), (4, "4.project.weight"))
    first, a, last, b = 0, "token.weight", 4, "project.weight"
    assert torch.equal(layers[first].get_parameter(a), layers[last].get_parameter(b))
    join_tied(plan, {0: layers[0], 4: layers[4]})
    assert layers[first].get_parameter(a) is layers[last].get_parameter(b)
    untied = GptLayers(MODEL.model_copy(update={"tie_embeddings": False}))
    assert untied.tied == ()
    assert not torch.equal(untied.build(0, seed=0).token.weight, untied.build(4, seed=0).project.weight)


def exact_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("activation", "gelu"), [("gelu", exact_gelu), ("gelu-tanh", tanh_gelu)])
def test_the_layers_are_a_plain_gpt(activation, gelu):
    """Against the same function written out with einsum and an explicit mask, in float64."""
    plan = GptLayers(MODEL.model_copy(update={"activation": activation}), torch.float64)
    layers = all_layers(plan, seed=0)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    y = tokens
    with random_keys(0, 0, [], training=False):
        for layer in layers:
            y = layer(y)

    x = layers[0].token.weight[tokens] + layers[0].position.weight
    mask = torch.ones(16, 16).tril().bool()
    for block in layers[1:-1]:
        h = F.layer_norm(x, (32,), block.attention_norm.weight, block.attention_norm.bias)
        q, k, v = ((h @ block.qkv.weight.T + block.qkv.bias).view(2, 16, 3, 4, 8)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 16, 32)
        x = x + out @ block.attention_out.weight.T + block.attention_out.bias
        h = F.layer_norm(x, (32,), block.mlp_norm.weight, block.mlp_norm.bias)
        h = gelu(h @ block.mlp_in.weight.T + block.mlp_in.bias)
        x = x + h @ block.mlp_out.weight.T + block.mlp_out.bias
    expected = F.layer_norm(x, (32,), layers[-1].norm.weight, layers[-1].norm.bias) @ layers[-1].project.weight.T
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)


def test_no_token_sees_a_later_one():
    plan = GptLayers(MODEL)
    layers = all_layers(plan, seed=0)
    tokens = torch.randint(256, (1, 16))
    other = tokens.clone()
    other[0, 10:] = (other[0, 10:] + 1) % 256

    def run(y):
        with random_keys(0, 0, [], training=False):
            for layer in layers:
                y = layer(y)
        return y

    a, b = run(tokens), run(other)
    torch.testing.assert_close(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])


def test_flops_are_those_of_the_matrix_products():
    """Against torch's counter, which sees both halves of the scores where ours counts the causal one."""
    plan = GptLayers(MODEL)
    half_scores = 2 * MODEL.sequence**2 * MODEL.hidden
    for i, masked in ((1, half_scores), (4, 0)):
        layer = plan.build(i, seed=0).eval()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            layer(torch.randn(1, 16, 32))
        assert plan.flops[i] == counter.get_total_flops() - masked


def test_loss_is_a_sum_and_in_float32_under_bfloat16():
    logits = torch.randn(2, 3, 256)
    targets = torch.randint(256, (2, 3))
    expected = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum()
    torch.testing.assert_close(cross_entropy(logits, targets), expected)
    assert cross_entropy(logits.bfloat16(), targets).dtype == torch.float32
    assert cross_entropy(logits.double(), targets).dtype == torch.float64


def test_under_autocast_what_travels_between_layers_stays_float32():
    """Stages exchange float32 whatever the arithmetic inside, so a channel's message has one dtype."""
    plan = GptLayers(MODEL)
    x = torch.randint(256, (2, 16))
    with random_keys(0, 0, [0, 1], training=True), torch.autocast("cpu", torch.bfloat16):
        for layer in all_layers(plan, seed=0)[:-1]:
            x = layer(x)
            assert x.dtype == torch.float32
        logits = plan.build(4, seed=0)(x)
        assert logits.dtype == torch.bfloat16
        assert cross_entropy(logits, torch.zeros(2, 16, dtype=torch.int64)).dtype == torch.float32


def test_sequences_may_be_shorter_than_the_models():
    """What sampling does: the first tokens' outputs don't depend on how many follow."""
    plan = GptLayers(MODEL, torch.float64)
    layers = all_layers(plan, seed=0)
    tokens = torch.randint(256, (1, 16))

    def run(y):
        with random_keys(0, 0, [], training=False):
            for layer in layers:
                y = layer(y)
        return y

    torch.testing.assert_close(run(tokens[:, :5]), run(tokens)[:, :5], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cut", [[range(5)], [range(2), range(2, 5)], [range(1), range(1, 4), range(4, 5)]])
def test_a_stage_is_its_layers_under_names_that_no_cut_changes(cut):
    plan = GptLayers(MODEL)
    tokens = torch.randint(256, (2, 16))
    y = tokens
    with random_keys(0, 0, [0, 1], training=True):
        for layer in all_layers(plan, seed=0):
            y = layer(y)
        stages = [plan.build_stage(part, seed=0) for part in cut]
        x = ()
        for stage, part in zip(stages, cut, strict=True):
            x = stage(x, {name: tokens for name in plan.reads(part)})
    assert torch.equal(x[0], y)
    names = [name for stage in stages for name in stage.named()]
    whole = {f"{i}.{path}" for i in range(5) for path, _ in plan.build(i, 0).named_parameters()}
    assert len(names) == len(set(names))
    assert whole - set(names) == ({"4.project.weight"} if len(cut) == 1 else set())  # one parameter, the owner's name
    assert set(names) <= whole
