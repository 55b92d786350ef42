"""What a float64 model computes in float32 rounds as in eager mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from raypipe.runtime.compiled.compiler import compile_graph
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.runtime.compiled.trace import FALLS_BACK, fall_back, keeps_rounding, undecomposed


def router_and_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A router's softmax and a norm in float32, between products in float64."""
    logits = (x @ w).float()
    chosen = torch.softmax(logits, -1).to(x.dtype)
    narrow = x.float()
    normed = (narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return (chosen @ w.t()).tanh() * normed, chosen


@pytest.mark.slow
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
def test_float32_parts_of_a_float64_graph_round_as_in_eager_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, dtype=torch.float64, generator=draw) for shape in ((33, 24), (24, 7)))
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with fake:
        given = [torch.empty(t.shape, dtype=t.dtype) for t in (x, w)]
        graph = make_fx(router_and_norm, decomposition_table=undecomposed(select_decomp_table()))(*given)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"aten._softmax.default", "aten.rsqrt.default", "aten.mean.dim"} <= names
    assert fall_back(graph.graph) >= 5
    assert not any(FALLS_BACK in n.meta for n in graph.graph.nodes if str(n.target) in ("aten.mm.default", "aten.tanh"))
    made = compile_graph(graph, fake, False)([x, w])
    eager = router_and_norm(x, w)
    assert torch.equal(made[1], eager[1])
    assert (made[0] - eager[0]).abs().max() <= 1e-15


def test_models_in_one_precision_are_decomposed() -> None:
    double, single = torch.ones(2, dtype=torch.float64), torch.ones(2)
    assert keeps_rounding([double, torch.ones(2, dtype=torch.int64)])
    assert not keeps_rounding([single])
    assert not keeps_rounding([double, single])


@pytest.mark.slow
def test_what_traces_imports_what_decompositions_take_for_granted() -> None:
    """Max pooling's looks for Inductor's lowerings without importing them; nothing else has in a process of its own."""
    code = "import torch, raypipe.runtime.compiled.trace; torch._inductor.lowering"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
