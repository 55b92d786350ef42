"""Any locale and home before Ray starts, and commands that messages tell people to type; no Ray is started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe import errors
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.sources.hugging_face import HuggingFace

JOB = """
name: größe
model: {type: gpt, layers: 2, hidden: 32, heads: 2, sequence: 16, vocabulary: 256}
data: {type: bytes, path: stdlib}
train: {steps: 1, batch: 2}
parallel: {schedule: 1f1b, stages: 3}
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ASCII, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}], ids=str)
def test_what_a_terminal_cannot_show_is_replaced(settings: dict[str, str], tmp_path: Path) -> None:
    job = tmp_path / "ä b" / "größe – 1.yaml"
    job.parent.mkdir()
    job.write_text(JOB, encoding="utf-8")
    environment = {**os.environ, **settings}
    for verb in (["partition", str(job)], ["schedule", "1f1b"], ["train", f"{job}x"]):
        words = [sys.executable, "-m", "raypipe", *verb]
        done = subprocess.run(words, capture_output=True, env=environment, timeout=120, check=False)
        text = (done.stdout + done.stderr).decode("latin-1")
        assert "Traceback" not in text, text
        assert "Unicode" not in text, text
        assert done.returncode == (0 if verb[0] == "schedule" else done.returncode)
        if verb[0] == "train":
            assert (done.returncode, "?" in text) == (2, True), text


@pytest.mark.slow
def test_a_home_that_ray_cannot_write_to_gets_a_token_in_the_environment(monkeypatch, tmp_path: Path) -> None:
    from raypipe.runtime.cluster.connect import _have_token

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    _have_token()
    assert "RAY_AUTH_TOKEN" not in os.environ  # Ray keeps one there
    monkeypatch.setenv("HOME", "/proc/home")
    _have_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.slow
def test_ray_trains_failures_have_a_reason() -> None:
    from ray.train.v2.api.exceptions import ControllerError

    from raypipe.runtime.recovery.failure import describe

    assert describe(ControllerError(OSError(28, "No space left on device"))).endswith("No space left on device")
    assert describe(ControllerError(ValueError())) == "ValueError"


# Commands that messages tell people to type.


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
