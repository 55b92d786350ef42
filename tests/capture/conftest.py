"""Each model is captured once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from raypipe.capture.capture import Captured


@pytest.fixture(scope="session")
def captured() -> Callable[[str], Captured]:
    """``captured("gpt2")``."""

    @cache
    def one(name: str) -> Captured:
        from raypipe.capture.capture import capture
        from raypipe.capture.meta import build_without_memory
        from tests.capture.models import CASES

        case = CASES[name]
        return capture(build_without_memory(case.build), case.data(2, 16))

    return one


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: threads would only wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
