"""Generated functions lose their checks, and nothing else, after a call that was checked."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from raypipe.runtime.compiled.inductor.compile_graph import compile_graph
from raypipe.runtime.compiled.inductor.toolchain import missing_toolchain
from raypipe.runtime.compiled.inductor.unchecked import CHECKS, unchecked
from raypipe.runtime.compiled.layout import InputSlot, Interface
from raypipe.runtime.compiled.program import CompiledPiece

GENERATED = """
from contextlib import nullcontext
import torch
guards = torch._C._dynamo.guards
assert_size_stride, assert_alignment = guards.assert_size_stride, guards.assert_alignment
factor = 2.0

class Runner:
    def __init__(self, offset):
        self.offset = offset

    def call(self, args):
        x, y = args
        args.clear()
        assert_size_stride(x, (2, 3), (3, 1), 'input')
        with nullcontext():
            assert_size_stride(y, (3, ), (1, ), 'input')
            made = x * factor
        with nullcontext():
            assert_alignment(made, 16, 'mul')
        return (made + y + self.offset, )

call = Runner(1.0).call

def alone(args):
    assert_size_stride(args[0], (2, ), (1, ))
    return (args[0] + factor, )

def checks_nothing(args):
    return args
"""
PIECE = Interface(slots=(InputSlot("given", 0), InputSlot("given", 1)), gradients=(), back=(), hands=0)


def generated(folder: Path) -> Any:
    """The module above, read from a file as stored programs are."""
    path = folder / "generated.py"
    path.write_text(GENERATED)
    spec = importlib.util.spec_from_file_location("generated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(call: Any) -> set[str]:
    return {*call.__code__.co_names}


def test_only_checks_are_left_out(tmp_path: Path) -> None:
    module = generated(tmp_path)
    plain = unchecked(module.call)
    x, y = torch.randn(2, 3), torch.randn(3)
    given = [x, y]
    assert torch.equal(plain(given)[0], module.call([x, y])[0])
    assert given == []
    wide = torch.randn(2, 6)[:, ::2]
    with pytest.raises(AssertionError, match="expected"):
        module.call([wide, y])
    assert torch.equal(plain([wide, y])[0], wide * 2 + y + 1)
    assert names_of(module.call) - names_of(plain) == CHECKS
    assert torch.equal(unchecked(module.alone)([torch.zeros(3)])[0], torch.full((3,), 2.0))


def test_what_is_not_generated_stays(tmp_path: Path) -> None:
    module = generated(tmp_path)

    def inner(args: list[Tensor]) -> list[Tensor]:
        return args

    made = torch.nn.Linear(2, 2)
    for call in (module.checks_nothing, inner, made, len):
        assert unchecked(call) is call
    read: dict[str, Any] = {}
    exec(GENERATED, read)  # its source is not at hand
    assert unchecked(read["alone"]) is read["alone"]


def test_the_first_call_of_a_piece_is_checked(tmp_path: Path) -> None:
    module = generated(tmp_path)
    piece = CompiledPiece(PIECE, module.call)
    y = torch.randn(3)
    wide = torch.randn(2, 6)[:, ::2]
    for _ in range(2):
        with pytest.raises(AssertionError, match="expected"):
            piece({"given": [wide, y]})
    x = torch.randn(2, 3)
    first, second = piece({"given": [x, y]})[0], piece({"given": [x, y]})[0]
    assert torch.equal(first, x * 2 + y + 1)
    assert torch.equal(second, first)
    assert not CHECKS & names_of(piece.run)


@pytest.mark.slow
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
def test_inductors_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fake = FakeTensorMode(static_shapes=True)
    with fake:
        example = [torch.empty(8, 4), torch.empty(4, 4)]
        graph = make_fx(lambda x, w: (torch.relu(x @ w).sum(0),))(*example)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()
    compiled: Any = compile_graph(graph, fake, False)
    piece = CompiledPiece(PIECE, compiled)
    x, w = torch.randn(8, 4), torch.randn(4, 4)
    with pytest.raises(AssertionError):
        piece({"given": [x.t(), w]})
    first = piece({"given": [x, w]})
    assert CHECKS & names_of(compiled.current_callable)
    assert not CHECKS & names_of(piece.run)
    runner: Any = piece.run.__self__  # type: ignore[attr-defined]
    del compiled
    gc.collect()
    assert hasattr(runner, "partitions")  # which a graph that ends would take away
    assert torch.equal(piece({"given": [x, w]})[0], first[0])
    assert torch.allclose(first[0], torch.relu(x @ w).sum(0), atol=1e-6)
