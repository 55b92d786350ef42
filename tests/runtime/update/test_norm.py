"""The norm's arithmetic and the exact undoing of optimizer steps, in this process."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import TransportError
from raypipe.runtime.update.collectives import wait_for
from raypipe.runtime.update.norm import Forecast, Shares, clip_factor, norm_of
from raypipe.runtime.update.optimizer import OptimizerSnapshot
from tests.exhaustive import exhaustive


@given(st.floats(0, 1e12), st.floats(1e-6, 1e6))
def test_the_factor_is_torchs(norm: float, limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    assert norm * clip_factor(limit, norm) == pytest.approx(parameter.grad.item(), rel=1e-12, abs=1e-300)


def test_norms_that_are_no_numbers() -> None:
    assert norm_of([9.0, 16.0]) == 5.0
    assert norm_of([math.inf, 1.0]) == math.inf
    assert norm_of([1.7e308, 1.7e308]) == math.inf  # their sum is beyond float64
    assert math.isnan(norm_of([math.nan, 1.0]))
    assert clip_factor(1.0, math.nan) == 1.0  # as in torch: a comparison with it is false
    assert clip_factor(1.0, math.inf) == 0.0


def test_what_is_expected_of_the_next_norm() -> None:
    auto = Forecast(1.0, "auto")
    assert not auto.optimistic()  # nothing is known yet
    for norm, expected in [(0.5, True), (2.0, False), (0.99, True), (math.nan, False), (math.inf, False)]:
        auto.saw(norm)
        assert auto.optimistic() == expected
    for rule in ("wait", "optimistic"):
        fixed = Forecast(1.0, rule)
        for norm in (0.5, 2.0):
            fixed.saw(norm)
            assert fixed.optimistic() == (rule == "optimistic")


def test_one_device_knows_the_norm_at_once() -> None:
    shares = Shares(None)
    shares.start(4.0)
    assert shares.ready()
    assert shares.wait(lambda: False) == [4.0]


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_undone_exactly(kind: str, before: int) -> None:
    """Parameters and optimizer state are those of an optimizer that never made the step, then and two steps later."""
    torch.manual_seed(0)
    used = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    unused = torch.nn.Parameter(torch.randn(4))  # never gets a gradient
    twins = [copy.deepcopy(p) for p in (*used, unused)]
    optimizer, twin = KINDS[kind]([*used, unused]), KINDS[kind](twins)

    def step(undone: bool) -> None:
        gradients = [torch.randn(5, 3) for _ in used]
        for p, q, g in zip(used, twins, gradients, strict=False):
            p.grad, q.grad = g.clone(), g.clone()
        if undone:
            undo = OptimizerSnapshot(optimizer)
            optimizer.step()
            assert not torch.equal(used[0], twins[0])
            undo.restore()
            assert same(optimizer, twin)
            for p, q in zip(used, twins, strict=False):
                p.grad.mul_(0.5)
                q.grad.mul_(0.5)
        optimizer.step()
        twin.step()
        assert same(optimizer, twin)

    for _ in range(before):
        step(undone=False)
    for _ in range(2):
        step(undone=True)


def same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    first, second = a.state_dict()["state"], b.state_dict()["state"]
    equal = first.keys() == second.keys() and all(
        first[i].keys() == second[i].keys() and all(equals(first[i][k], second[i][k]) for k in first[i]) for i in first
    )
    pairs = zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True)
    return equal and all(torch.equal(p, q) for p, q in pairs)


def equals(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


class Sum:
    """A collective that is complete once this device has pushed its own messages often enough."""

    def __init__(self, pushes: int, fails: bool = False) -> None:
        self.left, self.fails = pushes, fails

    def push(self) -> bool:
        self.left -= 1
        return True

    def is_completed(self) -> bool:
        return self.left <= 0

    def wait(self) -> None:
        assert self.is_completed(), "waited while own messages were stuck"
        if self.fails:
            raise RuntimeError("timed out")


def test_a_waiting_device_pushes_its_own_messages() -> None:
    """The last member may be waiting for just these: to sleep in the collective would be to wait for ever."""
    work = Sum(5)
    wait_for("a sum", work, work.push)
    broken = Sum(1, fails=True)
    with pytest.raises(TransportError, match="gradient sum of stage 3"):
        wait_for("gradient sum of stage 3", broken, broken.push)


# The norm's shares in lists, passed on in log2 hops: every rank has every number, whatever the number of ranks.


HERE = Path(__file__).parent


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [3, *exhaustive(2, 5, 8)])
def test_all_ranks_have_all_numbers(ranks: int, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "list_world.py"), str(rank), str(ranks), str(tmp_path / "store")],
            cwd=HERE.parents[2], env=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, [err for _, err in ended]
    assert [out.strip() for out, _ in ended] == ["told"] * (ranks - 1) + [""]
