"""Shared experts compute while tokens travel, there and back, in forward and backward, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.compat.torch_private import TorchDispatchMode
from raypipe.models import LayeredModel, build_model, captured
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES
from tests.experts.test_job_key import job_of
from tests.experts.threads import Member, run_copies

pytest.importorskip("transformers")
OTHERS = ["ernie4_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
PRODUCTS = {"mm", "addmm", "bmm"}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


class Noticing(Member):
    """Notes how many products were computed while rows travelled."""

    products: Products
    meanwhile: list[int]

    def start_all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        result, wait = super().start_all_to_all(x, sends, receives)
        before = self.products.count

        def noticed() -> None:
            self.meanwhile.append(self.products.count - before)
            wait()

        return result, noticed


def run(family: str, built: LayeredModel) -> list[tuple[Tensor, dict[str, Tensor], list[int]]]:
    """Return each of two copies' loss, gradients, and products while rows travelled, exchange by exchange."""
    tokens = torch.randint(0, 257, (2, 2, 16), generator=torch.Generator().manual_seed(3))

    def work(rank: int, member: Noticing) -> tuple[Tensor, dict[str, Tensor], list[int]]:
        body = built.build_stage(range(built.count), 0)
        member.meanwhile, member.products = [], Products()
        inputs = {"input_ids": tokens[rank], "labels": tokens[rank]}
        with member.products:
            loss = built.task.loss(body((), inputs)[0], inputs)
            loss.backward()
        return loss.detach(), {n: p.grad for n, p in body.named().items() if p.grad is not None}, member.meanwhile

    return run_copies(2, work, Noticing)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", *exhaustive(*OTHERS)])
def test_shared_experts_compute_while_tokens_travel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"hf": family, "config": FAMILIES[family], "sequence": 16}
    built = build_model(job_of({"replicas": 2, "experts": 2}, {"dtype": "float64"}, model), None, 0)
    copies = run(family, built)
    monkeypatch.setattr(captured, "compute_meanwhile", lambda module: None)
    for (loss, gradients, meanwhile), (expected, wanted, waited) in zip(copies, run(family, built), strict=True):
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert not any(waited)
        gates = family == "qwen2_moe"  # of shared experts: another product, in each of two layers
        assert len(meanwhile) == 5 * (1 + gates)
        assert meanwhile[:3] == [0, 2, 1 + gates], "counts; tokens; results"
        assert meanwhile[-2:] == [2 + 2 * gates, 4], "of results and tokens: two gradients of each product"
