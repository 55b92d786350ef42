"""Commands that messages tell people to type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe import errors
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.sources.hugging_face import HuggingFace


def test_a_missing_extra_is_installed_from_the_clone(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(errors.CLONE)
    with pytest.raises(SpecError, match="needs transformers, which is not installed") as caught:
        HuggingFace(HfSpec(hf="gpt2"))
    assert caught.value.fix.endswith(" -m pip install -e '.[hf]'")
    python = shlex.split(caught.value.fix)[0]
    assert subprocess.run([python, "-c", "import raypipe"], cwd=errors.CLONE).returncode == 0
    monkeypatch.chdir(tmp_path)
    assert f"{errors.CLONE}[hf]" in errors.install("hf")


def test_without_a_clone_it_is_installed_by_name(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "CLONE", tmp_path)
    assert errors.install("gpu").endswith(" -m pip install 'raypipe[gpu]'")
