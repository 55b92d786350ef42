"""The settings of a process that uses a GPU."""

from __future__ import annotations

import os

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
