"""Two pieces of work in turns: the order of things, failures, and the state each of them sees."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from raypipe.models.keyed_random import KeyedDropout, current_keys, random_keys
from raypipe.runtime.stage.alternate import Alternation
from raypipe.tensor import group_of_thread
from raypipe.tensor.operators import copy_to_group, reduce_from_group


class Journal:
    """A group of one that writes down when its collectives begin and are waited for."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.name = threading.local()

    def note(self, what: str) -> None:
        self.lines.append(f"{self.name.is_} {what}")

    def start_all_reduce(self, x: torch.Tensor, operation: str = "sum") -> Callable[[], object]:
        name = f"{int(x.flatten()[0])}"
        self.note(f"start {name}")
        return lambda: self.note(f"wait {name}")

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def work(journal: Journal, name: str, layers: int) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        journal.name.is_ = name
        x = torch.zeros(1)
        for layer in range(layers):
            journal.note(f"compute {layer}")
            x = reduce_from_group(torch.full_like(x, layer))
        return x

    return run


def test_one_computes_while_the_others_collective_runs() -> None:
    journal = Journal()
    with group_of_thread(journal):
        Alternation().run(work(journal, "a", 2), work(journal, "b", 2))
    assert journal.lines == [
        "a compute 0", "a start 0",
        "b compute 0", "b start 0",
        "a wait 0", "a compute 1", "a start 1",
        "b wait 0", "b compute 1", "b start 1",
        "a wait 1", "b wait 1",
    ]  # fmt: skip


@pytest.mark.parametrize("layers", [(0, 3), (3, 0), (1, 3), (3, 1)])
def test_the_longer_one_goes_on_alone(layers: tuple[int, int]) -> None:
    journal = Journal()
    with group_of_thread(journal):
        a, b = Alternation().run(work(journal, "a", layers[0]), work(journal, "b", layers[1]))
    assert (a.item(), b.item()) == (max(0, layers[0] - 1), max(0, layers[1] - 1))
    assert sum("compute" in line for line in journal.lines) == sum(layers)


def test_backward_passes_take_turns_too() -> None:
    journal = Journal()

    def backward(name: str, scale: float) -> Callable[[], torch.Tensor]:
        x = torch.ones(1, requires_grad=True)
        y = scale * copy_to_group(2 * copy_to_group(x))

        def run() -> torch.Tensor:
            journal.name.is_ = name
            y.backward()
            assert x.grad is not None
            return x.grad

        return run

    with group_of_thread(journal):
        a, b = Alternation().run(backward("a", 3.0), backward("b", 5.0))
    assert (a.item(), b.item()) == (6.0, 10.0)
    assert journal.lines == [
        "a start 3", "b start 5", "a wait 3", "a start 6", "b wait 5", "b start 10", "a wait 6", "b wait 10",
    ]  # fmt: skip


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", [0, 1])
def test_a_failure_ends_both(who: int, when: int) -> None:
    journal = Journal()

    def fails() -> torch.Tensor:
        journal.name.is_ = "failing"
        if when:
            reduce_from_group(torch.zeros(1))
        raise BrokenError

    works = [work(journal, "other", 3), work(journal, "other", 3)]
    works[who] = fails
    alternation = Alternation()
    with group_of_thread(journal):
        with pytest.raises(BrokenError):
            alternation.run(*works)
        begun = len(journal.lines)
        assert alternation.run(work(journal, "a", 1), work(journal, "b", 1))  # and the next pair runs
    assert len(journal.lines) == begun + 6
    assert sum("compute" in line for line in journal.lines[:begun]) < 3


def test_each_sees_its_own_keys_and_the_callers_modes() -> None:
    dropout = KeyedDropout(0.5, site=3)

    def forward(sample: int) -> Callable[[], tuple[torch.Tensor, bool, bool]]:
        def run() -> tuple[torch.Tensor, bool, bool]:
            with random_keys(1, 2, [sample], training=True):
                reduce_from_group(torch.zeros(1))
                y = dropout(torch.ones(1, 64))
                reduce_from_group(torch.zeros(1))
                z = dropout(torch.ones(1, 64))
            assert torch.equal(y, z)
            return y, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        return run

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        result = Alternation().run(forward(4), forward(5))
    for (y, gradients, cast), sample in zip(result, [4, 5], strict=True):
        with random_keys(1, 2, [sample], training=True):
            assert torch.equal(y, dropout(torch.ones(1, 64)))
        assert (gradients, cast) == (False, True)
    assert current_keys() is None
