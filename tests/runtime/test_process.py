"""What a worker's process imports, and its settings where it uses a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raypipe.runtime.process import CUDA_SETTINGS, set_up_cuda


def test_cuda_settings_are_made_and_a_users_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CUDA_SETTINGS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is restored
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    set_up_cuda()
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.slow
def test_a_worker_imports_nothing_that_only_a_capture_needs() -> None:
    """SymPy and transformers take as long to import as all of raypipe, and workers read what the driver captured."""
    code = "import sys, raypipe.runtime.worker; sys.exit(str({'sympy', 'transformers'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert not done.stderr.strip()
