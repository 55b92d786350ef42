import subprocess
import sys

import pytest

from raypipe import __version__
from raypipe.cli import VERBS, run
from raypipe.errors import RunError


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"raypipe {__version__}\n"
    assert run([]) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in VERBS)


@pytest.mark.parametrize(
    ("argv", "fix"), [(["schedul"], 'did you mean "schedule"'), (["--versio"], 'did you mean "--version"')]
)
def test_misspelt_verb_or_option(capsys, argv, fix):
    assert run(argv) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 2)
    assert fix in said.err


def test_failing_while_running_is_status_1(capsys, monkeypatch):
    def fail(*_args, **_options):
        raise RunError("device 3", "gone", "look at its log")

    monkeypatch.setattr("raypipe.cli.schedule.make", fail)
    assert run(["schedule", "1f1b"]) == 1
    assert capsys.readouterr().err == "device 3: gone\n  fix: look at its log\n"


def test_an_interruption_is_one_word_and_status_130(capsys, monkeypatch):
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypipe.job.load_job", interrupted)
    assert run(["train", "job.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m raypipe schedule 1f1b --microbatches 2000 --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
