"""Requests that wait start in the order of their models, and those of one kind together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.runtime.session.session import Call
from raypipe.service.futures import AHEAD, Accepted, Answer, BusyError, Requests


class Done:
    """A call that has ended."""

    def result(self) -> None: ...


class Started:
    """Notes what is started, once it may."""

    def __init__(self, fails: str = "") -> None:
        self.order: list[list[str]] = []
        self.fails, self.may = fails, threading.Event()
        self.requests = Requests(lambda error: error, self.wait, self.together)

    def wait(self) -> None:
        assert self.may.wait(10)

    def together(self, kind: str, calls: Sequence[Call]) -> list[Done]:
        names = [str(call.loss) for call in calls]
        if self.fails in names:
            raise SpecError(self.fails, "fails", "")
        self.order.append(names)
        return [Done() for _ in calls]

    def send(self, model: str, number: int, kind: Any = None) -> Accepted:
        name = f"{model}:{number}"

        def start() -> Done:
            return self.together(kind, [Call((), name)])[0]

        joins = None if kind is None else (kind, Call((), name))
        one = Accepted(name, "s", name, start, lambda _: Answer({}), 0, joins=joins)
        if number:
            self.requests.accept(model, one)
        else:
            self.requests.accept_first(model, one)
        return one

    def all(self, *names: str, fails: Sequence[str] = ()) -> list[list[str]]:
        """Send ``MODEL:NUMBER:KIND`` and let them start; return what started together."""
        sent = [self.send(model, int(number), kind or None) for model, number, kind in (n.split(":") for n in names)]
        self.may.set()
        for one in sent:
            if one.id in fails:
                with pytest.raises(SpecError):
                    one.future.result(10)
            else:
                assert one.future.result(10).json == {}
        self.requests.close()
        return self.order


def test_the_next_calls_of_several_models_start_together() -> None:
    first = ("a:0:", "b:0:", "c:0:")
    order = Started().all(
        *first, "a:1:backward", "a:2:", "b:1:backward", "b:2:", "c:1:forward", "c:2:backward", "a:3:backward"
    )
    assert order[:3] == [["a:0"], ["b:0"], ["c:0"]]
    assert order[3:] == [["a:1", "b:1"], ["a:2"], ["b:2"], ["c:1"], ["c:2", "a:3"]]


def test_a_refused_number_that_came_early_is_used_up() -> None:
    """The client sends three requests at once; the second, which is wrong, arrives first."""
    started = Started()
    recorded: list[int] = []
    started.send("a", 0)
    started.requests.refuse("a", 2, lambda: recorded.append(2))
    started.requests.refuse("a", 2, lambda: recorded.append(2))
    with pytest.raises(SpecError, match="number 2 has been used"):
        started.send("a", 2)
    with pytest.raises(BusyError):
        started.requests.refuse("a", 1 + AHEAD, lambda: recorded.append(1 + AHEAD))
    assert started.all("a:1:", "a:3:") == [["a:0"], ["a:1"], ["a:3"]]
    assert recorded == [2]


def test_a_call_that_fails_does_not_fail_those_that_it_would_have_joined() -> None:
    order = Started("b:1").all("a:0:", "b:0:", "a:1:backward", "b:1:backward", "b:2:", fails=["b:1"])
    assert order[2:] == [["a:1"], ["b:2"]]
