"""Commands that messages tell people to type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe import installation
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.sources.hugging_face import HuggingFace


def test_a_missing_extra_is_installed_from_the_clone(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(installation.CLONE)
    with pytest.raises(SpecError, match="needs transformers, which is not installed") as caught:
        HuggingFace(HfSpec(hf="gpt2"))
    assert caught.value.fix.endswith(" -m pip install -e '.[hf]'")
    python = shlex.split(caught.value.fix)[0]
    assert subprocess.run([python, "-c", "import raypipe"], cwd=installation.CLONE).returncode == 0
    monkeypatch.chdir(tmp_path)
    assert f"{installation.CLONE}[hf]" in installation.install("hf")


def test_without_a_clone_it_is_installed_by_name(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "CLONE", tmp_path)
    assert installation.install("gpu").endswith(" -m pip install 'raypipe[gpu]'")
