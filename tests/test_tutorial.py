"""Every command of the tutorial, in its order, with fewer steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEW = ["--set", "train.eval_batches=1", "--set", "train.batch=8"]
GIVEN = ["--set", "parallel.schedule=1f1b", "--set", "parallel.stages=2", "--set", "parallel.microbatch=4"]
STEPS = {"2000": "3", "3000": "5"}
"""The tutorial's numbers of steps, and those of the test."""


def commands() -> list[list[str]]:
    """The lines of the tutorial's blocks that call raypipe, with the variables that lines before them set."""
    result: list[list[str]] = []
    variables: dict[str, str] = {}
    for line in (ROOT / "docs" / "tutorial.md").read_text("utf-8").splitlines():
        line = line.removeprefix("$ ")
        if (given := re.fullmatch(r'(\w+)="(.*)"', line)) is not None:
            variables[given[1]] = given[2]
        elif line.startswith("raypipe "):
            text = re.sub(r"\$(\w+)", lambda m: variables[m[1]], line)
            result.append(shlex.split(text, comments=True)[1:])
    return result


def fewer(words: list[str], home: Path) -> list[str]:
    """The same command with less to do, in the test's folder."""
    words = [word.replace("~", str(home)) for word in words]
    words = [re.sub(r"(train\.steps=)(\d+)", lambda m: m[1] + STEPS[m[2]], word) for word in words]
    if words[0] == "autoconfigure":
        return [*words, "--search", "0"]
    if words[0] != "train":
        return words
    steps = [] if any("train.steps" in word for word in words) else ["--set", "train.steps=2"]
    # The session's Ray has many CPUs: measuring on all of them would take minutes.
    plan = GIVEN if "jobs/quickstart.yaml" in words and "parallel" not in " ".join(words) else []
    return [*words, *steps, *FEW, *([] if "--resume" in words else plan)]


@pytest.mark.runs
def test_every_command_of_the_tutorial(driver_here, text_folder, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    from raypipe.cli import run

    for folder in ("jobs", "cluster"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for folder in ("my-project", "my-text"):
        (tmp_path / folder).symlink_to(text_folder)
    monkeypatch.chdir(tmp_path)
    every = commands()
    assert [words[0] for words in every].count("train") == 5
    assert every[-1][0] == "emulate"
    for words in every:
        status = run(fewer(words, tmp_path))
        assert status == 0, f"raypipe {shlex.join(words)}: {capsys.readouterr().err}"
    assert (tmp_path / "models" / "base" / "model.safetensors").is_file()
    assert (tmp_path / "plan.json").is_file()
