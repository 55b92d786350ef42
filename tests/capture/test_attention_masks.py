"""Masks that are causal or show everything are replaced, no others, and nothing that the model computes changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.capture import capture as capturing
from raypipe.capture.capture import capture
from raypipe.capture.captured import Captured
from raypipe.capture.meta import build_without_memory
from raypipe.errors import RunError
from raypipe.graph.dims import evaluate_all
from raypipe.graph.operations import ATTENTION, Operation
from raypipe.graph.positions import varying_dims
from raypipe.graph.subgraphs import shard
from raypipe.models import build_model
from raypipe.models.keyed_random import random_keys
from tests.capture.chain import build_chain, parameters, run_chain
from tests.capture.models import ALIKE, CASES, FAMILIES, GROUPED, family
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job

INFINITY = float("inf")
WITHOUT_MASK = {
    "gpt2": {"causal": 3}, "opt": {"causal": 2}, "llama": {"causal": 2}, "qwen3": {"causal": 2}, "gemma": {"causal": 2},
    "mistral": {"masked": 2},  # a sliding window of 6
    "bert": {"none": 2}, "roberta": {"none": 2}, "vit": {"none": 2},
    "t5": {"masked": 4, "none": 2},  # the position bias; between decoder and encoder there is none
}  # fmt: skip
"""How the attentions of each family are called where no padding mask is fed."""


def kind(operation: Operation) -> str:
    if operation.mask is not None:
        return "masked"
    return "causal" if operation.causal else "none"


def in_order(captured: Captured) -> list[str]:
    return [kind(o) for o in captured.graph.operations if o.target == ATTENTION]


def heads(captured: Captured) -> list[tuple[int, ...]]:
    """Return how many heads of queries, keys and values each attention has."""
    attends = [o for o in captured.graph.operations if o.target == ATTENTION]
    return [tuple(captured.graph.operations[i].type.shape[1] for i in o.inputs[:3]) for o in attends]


def kinds(captured: Captured) -> Mapping[str, int]:
    return Counter(in_order(captured))


def inputs(name: str, batch: int, size: int) -> dict[str, Tensor]:
    data = CASES[name].data(batch, size)
    data.pop("attention_mask", None)
    return data


@cache
def with_all_masks(name: str) -> Captured:
    """Capture a family without a padding mask, and leave its masks as they are."""
    with mock.patch.object(capturing, "replace_masks", lambda captured, _: captured):
        return capture(build_without_memory(CASES[name].build), inputs(name, 2, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in WITHOUT_MASK if name not in ALIKE), *exhaustive(*ALIKE)])
def test_without_a_padding_mask(name):
    build = CASES[name].build
    captured = capturing.replace_masks(with_all_masks(name), pytest.fail)
    assert kinds(captured) == WITHOUT_MASK[name]
    graph = captured.graph
    if FAMILIES[name].get("num_key_value_heads") and "masked" not in WITHOUT_MASK[name]:
        assert set(heads(captured)) == {(4, 2, 2)}
    if "masked" not in WITHOUT_MASK[name]:  # what computed the masks is gone
        masks = [o.name for o in graph.operations if o.type is not None and o.type.dtype == "bool" and o.type.shape[2:]]
        assert not masks
    torch.manual_seed(0)
    whole = build()
    cut = shard(graph)
    assert list(cut.labels) == CASES[name].subgraphs
    chain = build_chain(
        captured, [cut.operations(range(i, i + 1)) for i in range(cut.count)], dict(whole.named_parameters())
    )
    for batch, size in ((2, 16), (5, 13), (3, 4)):
        data = inputs(name, batch, size)
        wanted, got = whole(**data), run_chain(captured, chain, data)
        torch.testing.assert_close(got["logits"], wanted["logits"], rtol=0, atol=1e-12)
        torch.testing.assert_close(got["loss"], wanted["loss"], rtol=0, atol=1e-12)
        whole.zero_grad()
        for parameter in parameters(chain).values():
            parameter.grad = None
        wanted["loss"].backward()
        got["loss"].backward()
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(parameters(chain)[key].grad, parameter.grad, rtol=0, atol=1e-12, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "t5", "bert", *exhaustive(*ALIKE)])
def test_a_padding_mask_stays(name, captured):
    assert set(kinds(captured(name))) == {"masked"}
    assert not captured(name).graph.at_most


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mixtral(monkeypatch):
    monkeypatch.setitem(FAMILIES, "mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2})
    assert kinds(capture(build_without_memory(family("mixtral")), inputs("llama", 2, 16))) == {"causal": 2}


@pytest.mark.slow
def test_a_micro_batch_longer_than_the_capture_is_refused():
    config = {**GROUPED, "vocab_size": 256, "max_position_embeddings": 64}
    job = minimal_job({"hf": "llama", "config": config, "sequence": 16})
    model = build_model(job, None)
    assert model.captured.graph.at_most
    stage = model.build_stage(range(model.count), 0)
    tokens = torch.zeros(2, 17, dtype=torch.int64)
    with random_keys(0, 0, [0, 1], training=False):
        stage((), {"input_ids": tokens[:, :16]})
        with pytest.raises(RunError, match="has length 17, but the model was captured for 16 at most"):
            stage((), {"input_ids": tokens})


@pytest.mark.slow
def test_a_window_longer_than_the_sequence_hides_nothing_more(monkeypatch):
    def captured(window: int) -> Captured:
        monkeypatch.setitem(FAMILIES, "mistral", {**GROUPED, "sliding_window": window})
        return capture(build_without_memory(family("mistral")), inputs("mistral", 2, 16))

    assert kinds(captured(15)) == {"masked": 2}
    wide = captured(16)
    assert kinds(wide) == {"causal": 2}
    (tokens,) = {wide.graph.sources["input_ids"].type.shape[1]}
    assert wide.graph.at_most == {tokens: 16}  # at 17, the window would hide something


# ---- masks that people write

Mask = Callable[[Tensor], Tensor]


class Attends(nn.Module):
    """Attention with a mask that a function makes of the input ``[batch, length, 8]``; ``more`` keys than queries."""

    def __init__(self, mask: Mask, more: int = 0) -> None:
        super().__init__()
        self.project, self.mask, self.more = nn.Linear(8, 24, dtype=torch.float64), mask, more
        self.register_buffer("seen", torch.ones(9, 9, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        k, v = F.pad(k, (0, 0, 0, self.more)), F.pad(v, (0, 0, 0, self.more))
        mask = self.seen[: x.shape[1], : x.shape[1]] if self.mask is buffer else self.mask(x)
        return F.scaled_dot_product_attention(q, k, v, mask)


def places(x: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
    length = x.shape[1]
    return torch.arange(length)[:, None], torch.arange(length + more)[None]


def additive(x: Tensor, low: float) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), low, dtype=torch.float64).triu(1)


def inverted(x: Tensor) -> Tensor:
    """As in older models: 1 - mask, times the lowest value."""
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.float64).tril()[None, None]
    return (1.0 - seen).masked_fill((1.0 - seen).to(torch.bool), torch.finfo(torch.float64).min)


def looked_up(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[:, None, None, None]
    return torch.ones(x.shape[0], x.shape[1], dtype=torch.bool)[rows, places(x)[1]] & (places(x)[1] <= places(x)[0])


def buffer(x: Tensor) -> Tensor:
    raise NotImplementedError


LOWEST = torch.finfo(torch.float64).min
TABLE: dict[str, tuple[Mask, str]] = {
    "compared": (lambda x: places(x)[1] <= places(x)[0], "causal"),
    "tril": (lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), "causal"),
    "not above": (lambda x: ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), "causal"),
    "per sample": (lambda x: torch.ones_like(x[:, None, :, :1]).bool() & (places(x)[1] <= places(x)[0]), "causal"),
    "looked up": (looked_up, "causal"),
    "summed": (lambda x: torch.ones(x.shape[1], x.shape[1]).cumsum(1) <= torch.arange(x.shape[1])[:, None] + 1,
               "causal"),
    "-inf": (lambda x: additive(x, -INFINITY), "causal"),
    "lowest": (lambda x: additive(x, LOWEST), "causal"),
    "inverted": (inverted, "causal"),
    "all": (lambda x: places(x)[1] >= 0, "none"),
    "zeros": (lambda x: torch.zeros(1, 1, x.shape[1], x.shape[1], dtype=torch.float64), "none"),
    "one row": (lambda x: torch.ones(1, x.shape[1], dtype=torch.bool), "none"),
    "-1e4": (lambda x: additive(x, -1e4), "masked"),  # a score of 1e4 would show through
    "strictly below": (lambda x: places(x)[1] < places(x)[0], "masked"),  # the first row sees nothing
    "anti-causal": (lambda x: places(x)[1] >= places(x)[0], "masked"),
    "window": (lambda x: (places(x)[1] <= places(x)[0]) & (places(x)[1] > places(x)[0] - 5), "masked"),
    "prefix": (lambda x: (places(x)[1] <= places(x)[0]) | (places(x)[1] < 3), "masked"),
    "blocks": (lambda x: places(x)[1] // 3 <= places(x)[0] // 3, "masked"),
    "alibi": (lambda x: additive(x, -INFINITY) + 0.5 * (places(x)[1] - places(x)[0]), "masked"),
    "from the end": (lambda x: places(x)[1] - x.shape[1] < 0, "masked"),  # all true, but it depends on the size
    "last": (lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)[torch.arange(x.shape[1])[:, None] - 1,
                                                                            places(x)[1]], "masked"),
    "first sample": (lambda x: torch.arange(x.shape[0])[:, None, None, None] + places(x)[0] >= places(x)[1], "masked"),
    "data": (lambda x: x[:, None, None, :, 0] < 1e9, "masked"),
    "buffer": (buffer, "masked"),  # a checkpoint may hold another
}  # fmt: skip


class Table(nn.Module):
    """All of them, each with a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.every = nn.ModuleList(Attends(make) for make, _ in TABLE.values())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([attends(x) for attends in self.every])


@cache
def as_people_write_them() -> tuple[Captured, Table]:
    torch.manual_seed(0)
    model = Table()
    with mock.patch.object(capturing, "replace_masks", lambda captured, _: captured):
        return capture(model, {"x": torch.randn(2, 9, 8, dtype=torch.float64)}, dynamic={"x": (0, 1)}), model


@pytest.mark.slow
def test_masks_as_people_write_them():
    before, model = as_people_write_them()
    captured = capturing.replace_masks(before, pytest.fail)
    assert dict(zip(TABLE, in_order(captured), strict=True)) == {name: wanted for name, (_, wanted) in TABLE.items()}
    chain = build_chain(captured, [range(len(captured.graph.operations))], dict(model.named_parameters()))
    for batch, length in ((2, 9), (1, 1), (4, 2), (3, 6)):
        x = torch.randn(batch, length, 8, dtype=torch.float64)
        torch.testing.assert_close(run_chain(captured, chain, {"x": x})["output"], model(x), rtol=0, atol=1e-12)


class Shares(nn.Module):
    """Four heads of queries, and two of keys and values that a function copies; the mask is causal."""

    def __init__(self, copied: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.queries, self.pairs = (nn.Linear(8, 16, dtype=torch.float64) for _ in range(2))
        self.keys, self.values = copied, values or copied

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.pairs(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, self.keys(k), self.values(v), places(x)[1] <= places(x)[0])


def each_twice(x: Tensor) -> Tensor:
    """As ``transformers`` does."""
    batch, count, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, count, 2, length, width).reshape(batch, count * 2, length, width)


def all_twice(x: Tensor) -> Tensor:
    batch, count, length, width = x.shape
    return x[:, None].expand(batch, 2, count, length, width).reshape(batch, count * 2, length, width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copied", "values", "wanted"),
    [
        (each_twice, None, (4, 2, 2)),
        (all_twice, None, (4, 4, 4)),
        (each_twice, all_twice, (4, 4, 4)),
    ],
)
def test_shared_keys_and_values_are_read_as_they_are(copied, values, wanted):
    torch.manual_seed(0)
    model = Shares(copied, values)
    captured = capture(model, {"x": torch.randn(2, 9, 8, dtype=torch.float64)}, dynamic={"x": (0, 1)})
    assert heads(captured) == [wanted]
    chain = build_chain(captured, [range(len(captured.graph.operations))], dict(model.named_parameters()))
    for batch, length in ((2, 9), (1, 1), (3, 6)):
        x = torch.randn(batch, length, 8, dtype=torch.float64)
        torch.testing.assert_close(run_chain(captured, chain, {"x": x})["output"], model(x), rtol=0, atol=1e-12)


def test_more_keys_than_queries():
    """``is_causal`` would count from the first key; a mask that shows everything may go."""
    for make, wanted in (
        (lambda x: places(x, 4)[1] <= places(x)[0], "masked"),
        (lambda x: places(x, 4)[1] >= 0, "none"),
    ):
        captured = capture(Attends(make, 4), {"x": torch.randn(2, 9, 8, dtype=torch.float64)}, dynamic={"x": (0, 1)})
        assert kinds(captured) == {wanted: 1}


def test_a_mask_too_large_to_compute_stays(monkeypatch):
    monkeypatch.setattr(capturing, "LONGEST", 8)
    said: list[str] = []
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    captured = capture(Attends(TABLE["tril"][0]), {"x": x}, dynamic={"x": (0, 1)}, notify=said.append)
    assert kinds(captured) == {"masked": 1}
    (sentence,) = said
    assert "at length 9" in sentence


# ---- positional results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as people write them", "mistral", "t5", *exhaustive("llama", "gpt2", "bert")])
def test_positional_results_against_every_smaller_size(name):
    """A result for small sizes is the corner of that for large ones, and constant where it is said to be."""
    captured = with_all_masks(name) if name in CASES else as_people_write_them()[0]
    graph = captured.graph
    length = max(graph.example.values())
    for number, dims in enumerate(varying_dims(graph)):
        if dims is None:
            continue
        kind = graph.operations[number].type
        assert kind is not None
        large = capturing.computed(captured, number, graph.example)
        if large is None:
            continue
        for d in set(range(large.dim())) - dims:
            torch.testing.assert_close(large, large.narrow(d, 0, 1).expand_as(large), rtol=0, atol=0)
        for size in range(1, length):
            sizes = {n: min(value, size) for n, value in graph.example.items()}
            small = capturing.computed(captured, number, sizes)
            corner = large[tuple(slice(n) for n in evaluate_all(kind.shape, sizes))]
            torch.testing.assert_close(small, corner, rtol=0, atol=0)


class _Shifted(nn.Module):
    """Attention to all positions up to so many ahead."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x = self.linear(x)[:, None]
        mask = torch.arange(n)[:, None] + self.ahead >= torch.arange(n)[None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_is_computed_once_and_told_from_others(monkeypatch):
    """Two that differ in one number alone are made by the same operations."""
    calls: list[int] = []
    monkeypatch.setattr(capturing, "_known", {})
    computed = capturing.computed
    monkeypatch.setattr(capturing, "computed", lambda *a: calls.append(a[1]) or computed(*a))
    result = [in_order(capture(_Shifted(n), {"x": torch.randn(2, 5, 8)})) for n in (0, 1, 0, 4)]
    assert result == [["causal"], ["masked"], ["causal"], ["none"]]
    assert len(calls) == 3
