"""Names of files to write: an empty one, a folder and a URL are one error each, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.cli import run

ROOT = Path(__file__).parents[2]
JOB = str(ROOT / "jobs" / "quickstart.yaml")
OUTPUTS = [
    *(("schedule", "1f1b", option) for option in ("--json", "--text", "--plot", "--memory-plot", "--trace", "--csv")),
    *(("emulate", "1f1b", option) for option in ("--json", "--trace")),
    ("autoconfigure", JOB, "--out"),
    ("profile", JOB, "--out"),
    ("regions", JOB, "--out"),
    ("regions", JOB, "--plan"),
    ("report", "nowhere", "--out"),
    ("export", "nowhere", "--output"),
    ("train", JOB, "--run-dir"),
]


@pytest.mark.parametrize("words", OUTPUTS, ids=lambda w: f"{w[0]} {w[2]}")
def test_an_empty_name_and_a_url(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, why in (("", "is empty"), ("s3://bucket/x.svg", "s3://bucket/x.svg is a URL")):
        assert run([*words[:2], f"{words[2]}={name}"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"{words[2]}: {why}")
        assert "\n  fix: " in said.err
        assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", OUTPUTS[:-2], ids=lambda w: f"{w[0]} {w[2]}")
def test_a_folder(words, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "x.svg"
    folder.mkdir()
    assert run([*words[:2], words[2], str(folder)]) == 2
    assert f"{folder}: is a folder\n  fix: " in capsys.readouterr().err


def test_a_file_that_is_named_is_written_over(tmp_path, capsys) -> None:
    file = tmp_path / "x.csv"
    file.write_text("old")
    assert run(["schedule", "1f1b", "--csv", str(file)]) == 0
    assert file.read_text().startswith("0F0")


@pytest.mark.parametrize("name", ["", "s3://bucket/x", "/", "~", ".", "foreign", "foreign/../foreign"])
def test_a_run_directory_that_is_somebody_elses(name, tmp_path, monkeypatch, capsys) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, foreign):
        (folder / "plan.json").write_text('{"mine": 1}')
    (tmp_path / "text.txt").write_text("some words to learn from. " * 400)
    for more in ([], ["--resume"]):
        plan = ["--set", "parallel.stages=1", "--set", "parallel.schedule=1f1b", "--set", "parallel.microbatch=4"]
        text = ["--set", f"data.path={tmp_path / 'text.txt'}"]
        assert run(["train", JOB, *plan, *text, "--run-dir", name, *more]) == 2
        message, fix = capsys.readouterr().err.rstrip("\n").split("\n")
        assert "--run-dir" in message + fix
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign", "plan.json", "text.txt"]
    assert [p.name for p in foreign.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == (foreign / "plan.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [("--length", "1000000000000", "use 100000"), ("--length", "0", "use 1"), ("--temperature", "nan", "use 100"),
     ("--temperature", "1e-300", "0.0001"), ("--seed", "1" + "0" * 30, "use 9223372036854775807")],
)  # fmt: skip
def test_sampling_has_bounds(option, value, near, capsys) -> None:
    assert run(["sample", "nowhere", option, value]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{option}: ")
    assert near in said


@pytest.mark.parametrize("words", [["--forward", "1e308"], ["--comm", "1e200"], ["--load", "/dev/zero"]])
def test_schedules_of_nothing_that_is(words, capsys) -> None:
    name = [] if "--load" in words else ["1f1b"]
    assert run(["schedule", *name, *words]) == 2
    assert "\n  fix: " in capsys.readouterr().err
