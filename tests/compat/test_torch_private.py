"""Private names of torch: each is there, and in one module alone."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from raypipe.compat import PrivateName, torch_private
from raypipe.compat.torch_private import CHECKED, NAMES


@pytest.mark.parametrize("one", NAMES, ids=lambda one: one.name)
def test_the_installed_torch_has_it(one: PrivateName) -> None:
    result = getattr(importlib.import_module(one.where), one.name, None)
    assert result is not None, f"torch {torch.__version__}, checked with {CHECKED}: {one.without}"
    assert getattr(torch_private, one.name) is result


def test_a_name_that_moved_says_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private._BY_NAME, "Moved", torch_private._BY_NAME["FakeTensor"])
    with pytest.raises(ImportError, match=r"has no torch\._subclasses\.fake_tensor\.Moved .*no model can be captured"):
        torch_private.Moved  # noqa: B018
    with pytest.raises(AttributeError):
        torch_private.Unknown  # noqa: B018


def test_importing_the_module_brings_no_torch() -> None:
    code = "import sys; import raypipe.compat.torch_private; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
