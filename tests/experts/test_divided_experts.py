"""Divided experts, alone: each copy's outputs and the sums of all gradients are those of the whole layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.runtime.backward.split_backward import Closure, WeightQueue, defer_weight_gradients
from raypipe.tensor import Division, divide_module, in_order, is_experts
from raypipe.tensor.experts import ExpertsParallel
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES
from tests.experts.threads import Member, run_copies

transformers = pytest.importorskip("transformers")


def model_of(family: str, **changes: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], **changes)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    for name, value in model.named_parameters():
        if (
            name.endswith("gate.weight") and not value.any()
        ):  # of Ernie in transformers 5.20: all experts alike, no choice
            nn.init.normal_(value, std=0.02)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def divided(
    family: str, size: int, rank: int, whole: nn.Module, orders: tuple[tuple[int, ...], ...] = ()
) -> tuple[nn.Module, dict[str, Any]]:
    division = Division(1, 0, None, size, rank)
    model = model_of(family)
    shards = in_order(divide_module(model, division), orders)
    for path, module in model.named_modules():
        if isinstance(module, ExpertsParallel):
            module.order = next(cut.order for name, cut in shards.items() if name.startswith(path))
    own = {name: division.cut(shards.get(name), value) for name, value in whole.state_dict().items()}
    model.load_state_dict(own)
    return model, shards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "orders"),
    [
        *((family, 2, ()) for family in FAMILIES),
        ("mixtral", 4, ()),
        ("mixtral", 2, ((2, 0, 3, 1), (0, 3, 1, 2))),
        *exhaustive(*((f, 4, ()) for f in FAMILIES if f != "mixtral")),
    ],
)
def test_copies_with_divided_experts_train_as_one_process(
    family: str, size: int, orders: tuple[tuple[int, ...], ...]
) -> None:
    """Unequal numbers of tokens."""
    whole = model_of(family)
    tokens = torch.randint(0, 257, (7, 8), generator=torch.Generator().manual_seed(2))
    rows = [tokens[:4], tokens[4:]] if size == 2 else [tokens[:3], tokens[3:4], tokens[4:6], tokens[6:]]
    expected = loss_of(whole, tokens)
    expected.backward()

    def work(rank: int, _member: Member) -> tuple[float, dict[str, Tensor | None], dict[str, Any]]:
        model, shards = divided(family, size, rank, whole, orders)
        loss = loss_of(model, rows[rank])
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}, shards

    copies = run_copies(size, work)
    for name, cut in copies[0][2].items():  # what a checkpoint holds is whole, whoever wrote it and whoever reads it
        value = whole.state_dict()[name]
        for others in (1, 2, 4):
            of = Division(1, 0, None, others)
            again = [replace(of, expert_rank=rank).cut(replace(cut, size=others), value) for rank in range(others)]
            assert torch.equal(replace(cut, size=others).join(again), value)
    assert sum(loss for loss, _, _ in copies) == pytest.approx(expected.item(), abs=1e-9, rel=0)
    shards = copies[0][2]
    assert {name.split(".")[-2] for name in shards} == {"experts"}
    for name, p in whole.named_parameters():
        gradients = [own[name] for _, own, _ in copies]
        if p.grad is None:
            assert all(g is None or not g.any() for g in gradients)
            continue
        assert all(g is not None for g in gradients if name in shards), f"{name}: a gradient is missing"
        made = shards[name].join(gradients) if name in shards else sum(g for g in gradients if g is not None)
        torch.testing.assert_close(made, p.grad, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def first_experts(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if is_experts(module))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_gets_every_token(family: str) -> None:
    """Top-1 skew: the copy without tokens takes part, and the gradients of its experts are zero and not missing."""
    whole = first_experts(model_of(family))
    tokens = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 1, dtype=torch.float64, requires_grad=True)
    numbers = torch.full((6, 1), 3)
    expected = whole(tokens, numbers, weights)
    expected.square().sum().backward()
    rows = [slice(0, 0), slice(0, 6)]  # the other copy has no tokens of its own either

    def work(rank: int, member: Member) -> tuple[Tensor, ...]:
        model, _ = divided(family, 2, rank, model_of(family))
        experts = first_experts(model)
        x, w = (t.detach()[rows[rank]].requires_grad_() for t in (tokens, weights))
        y = experts(x, numbers[rows[rank]], w)
        y.square().sum().backward()
        assert len(member.calls) == 5
        assert experts.take_loads().tolist() == [0, 0, 0, len(x)]
        assert experts.take_loads() is None
        return y.detach(), x.grad, w.grad, *(p.grad for p in experts.parameters())

    empty, full = run_copies(2, work)
    for made, wanted in zip(full[:3], (expected, tokens.grad, weights.grad), strict=True):
        torch.testing.assert_close(made, wanted, rtol=0, atol=1e-12)
    assert [tuple(t.shape) for t in empty[:3]] == [(0, 16), (0, 16), (0, 1)]
    for p, a, b in zip(whole.parameters(), empty[3:], full[3:], strict=True):
        torch.testing.assert_close(torch.cat([a, b]), p.grad, rtol=0, atol=1e-12)
        assert not a.any()


def test_experts_that_cannot_be_divided() -> None:
    with pytest.raises(SpecError, match=r"4 experts of .*experts do not divide over 3 copies") as caught:
        divide_module(model_of("mixtral"), Division(1, 0, None, 3))
    assert "use experts: 2, of which replicas is a multiple" in str(caught.value)
    with pytest.raises(SpecError, match=r"use experts: 1$"):  # 2 and 4 divide the experts, but not the copies
        divide_module(model_of("mixtral"), Division(1, 0, None, 3, copies=9))
    config = transformers.AutoConfig.for_model("switch_transformers", vocab_size=32, d_model=8, d_kv=4, d_ff=8,
                                               num_heads=2, num_layers=2, num_experts=2)  # fmt: skip
    with pytest.raises(SpecError, match="SwitchTransformersExperts, whose experts cannot be divided") as caught:
        divide_module(transformers.AutoModel.from_config(config), Division(1, 0, None, 2))
    assert "experts: 1, which trains it" in str(caught.value)
    with pytest.raises(SpecError, match="Linear has no module of experts"):
        divide_module(nn.Linear(2, 2), Division(1, 0, None, 2))
    with pytest.raises(SpecError, match=r"1 orders for 2 layers with experts"):
        divided("mixtral", 2, 0, model_of("mixtral"), ((2, 0, 3, 1),))
    with pytest.raises(SpecError, match=r"\[2, 0, 3, 2\] does not name each of the 4 experts of model.layers.1.*once"):
        divided("mixtral", 2, 0, model_of("mixtral"), ((2, 0, 3, 1), (2, 0, 3, 2)))


def test_token_rows_are_sent_once_to_each_copy() -> None:
    """Two experts of a token on one copy: one row goes there."""

    def work(rank: int, member: Member) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        model, _ = divided("mixtral", 2, rank, model_of("mixtral"))
        numbers = torch.tensor([[0, 1], [2, 3], [0, 3]])
        model.model.layers[0].mlp.experts(torch.randn(3, 16).double(), numbers, torch.ones(3, 2).double())
        return member.calls

    for calls in run_copies(2, work):
        assert calls[1:] == [((2, 2), (2, 2))] * 2


@pytest.mark.parametrize("family", [*FAMILIES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["loop", "grouped"])
def test_weight_gradients_wait_for_w(family: str, dtype: torch.dtype) -> None:
    """The backward leaves those of the experts' matrices to closures, which give what one backward gives."""

    def work(rank: int, _member: Member) -> dict[str, Tensor]:
        result = []
        for split in (False, True):
            whole = model_of(family)
            model, shards = divided(family, 2, rank, whole)
            for part in model.modules():
                if hasattr(part, "_experts_implementation") or hasattr(part, "config"):
                    part.config._experts_implementation = "grouped_mm"
            model.to(dtype)
            queue, closures = WeightQueue(), list[Closure]()
            joint = defer_weight_gradients(model, queue) if split else []
            tokens = torch.randint(0, 257, (2, 8), generator=torch.Generator().manual_seed(rank))
            with queue.collect(closures):
                loss_of(model, tokens).backward()
            own = dict(model.named_parameters())
            matrices = [name for name in shards if own[name].dim() == 3]
            if split:
                assert not {*joint} & {*matrices}
                assert all(own[name].grad is None for name in matrices)
                with torch.no_grad():
                    for closure in closures:
                        closure.compute()
            result.append({name: p.grad for name, p in own.items() if p.grad is not None})
            assert {*matrices} <= result[-1].keys()
        joined, waited = result
        assert joined.keys() == waited.keys()
        for name, gradient in joined.items():
            near = 1e-12 if dtype == torch.float64 else 2e-4
            torch.testing.assert_close(waited[name], gradient, rtol=0, atol=near, msg=lambda m, n=name: f"{n}: {m}")
        return waited

    run_copies(2, work)
