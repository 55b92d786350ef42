"""Every ``raypipe`` command on a page: its options exist, its job's keys are known, and quick ones run as shown."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from raypipe.cli import VERBS, run, verb_function
from raypipe.errors import SpecError
from raypipe.job import load_job
from tests.test_docs import PAGES, ROOT

BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(raypipe [a-z][^`]*)`")
COMMAND = re.compile(r"\$ (?:[A-Z_]+=\S+ )*(.*)|(raypipe .*)")
SHELL = re.compile(r"[|&;<>]+|\d>")
REFUSED = ("train", "jobs/quickstart.yaml", "--set", "train.momentum=0.9")
"""An example of what is refused."""
QUICK = ("schedule", "hybrid")
"""Verbs that take a second at most, and no Ray."""
LEFT_OUT = ("...", "[", "]")
"""What stands for more than is written."""


class Command(NamedTuple):
    page: Path
    argv: tuple[str, ...]
    shown: tuple[str, ...] = ()
    """The output that the page shows."""
    whole: bool = True
    """In a block; a command in the text may leave out what it works on."""
    files: tuple[tuple[str, str], ...] = ()
    """Files that the page shows before it (``$ cat FILE``)."""


@cache
def commands() -> tuple[Command, ...]:
    return tuple(one for page in PAGES for one in on(page))


def on(page: Path) -> Iterator[Command]:
    """The commands of a page: of its blocks, with what they print, and in its text."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        files: dict[str, str] = {}
        for line, shown in steps(re.sub(r"\\\n\s*", " ", block)):
            if line.startswith("cat "):
                files[line.split()[1]] = "".join(f"{one}\n" for one in shown)
            elif argv := words(line):
                yield Command(page, argv, tuple(shown), files=tuple(files.items()))
    for inline in INLINE.findall(BLOCK.sub("", text)):
        if argv := words(" ".join(inline.split())):
            yield Command(page, argv, whole=False)


def steps(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command line of a block, with the lines up to the next one where it has a prompt."""
    result: list[tuple[str, list[str]]] = []
    prompt = False
    for line in block.splitlines():
        match = COMMAND.fullmatch(line)
        if match:
            prompt = match[1] is not None
            result.append((match[1] or match[2], []))
        elif result and prompt:
            result[-1][1].append(line)
    return iter(result)


def words(line: str) -> tuple[str, ...]:
    """The arguments after ``raypipe``, up to a pipe and without shell variables; nothing of an abridged line."""
    if not line.startswith("raypipe ") or any(mark in line for mark in LEFT_OUT):
        return ()
    result = []
    for word in shlex.split(line, comments=True)[1:]:
        if SHELL.fullmatch(word):
            break
        result.append(word)
    return tuple(word for word in result if not word.startswith("$"))


@cache
def parser_of(verb: str) -> Any:
    """The verb's command, which returns its values and does nothing."""
    app = typer.Typer()
    app.command(verb)(functools.wraps(verb_function(verb))(lambda **values: values))
    return typer.main.get_command(app)


def check(argv: tuple[str, ...]) -> None:
    """Parse by the verb's own parser; load the job that is named, with its keys.

    Raises:
        Exception: an option does not exist or has a value of another kind, there are too many arguments, or the job
            has no such key.
    """
    verb = argv[0]
    assert verb in VERBS, f"there is no verb {verb}"
    module = importlib.import_module(verb_function(verb).__module__)
    given = getattr(module, f"prepare_{verb}", lambda words: words)(list(argv))[1:]
    given = ["a100" if before == "--cluster" and word == "FILE" else word for before, word in pairwise(["", *given])]
    values = parser_of(verb).main(args=given, prog_name=verb, standalone_mode=False)
    job = str(values.get("job"))
    if job.endswith(".yaml") and (ROOT / job).is_file():
        # What is made on the page before is not there: the data, and the weights of a model.
        load_job(ROOT / job, [one for one in values.get("override") or () if not re.match(r"(data|model)\.", one)])


@pytest.mark.parametrize(
    "page", sorted({command.page for command in commands()}), ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    wrong = {}
    for command in commands():
        if command.page == page and not (
            len(command.argv) == 2 and command.argv[1].startswith("--")
        ):  # an option by its name
            try:
                check(command.argv)
            except Exception as error:
                if type(error).__name__ == "MissingParameter" and not command.whole:
                    continue
                wrong[" ".join(command.argv)] = getattr(error, "message", None) or str(error)
    assert {argv for argv in wrong if argv != " ".join(REFUSED)} == set(), wrong


def test_the_example_of_what_is_refused_is_refused() -> None:
    assert REFUSED in {command.argv for command in commands()}
    with pytest.raises(SpecError, match="momentum"):
        check(REFUSED)


def shape(line: str) -> str:
    """A line without its figures and spaces.

    >>> shape("1f1b:  makespan 27.5")
    'NfNb: makespan N'
    """
    return re.sub(r"\d+(\.\d+)?", "N", " ".join(line.split()))


def runs(one: Command) -> bool:
    """Return whether a command is quick, and its files are there."""
    there = {*dict(one.files), *(word for word in one.argv if (ROOT / word).exists())}
    named = {word for word in one.argv[1:] if word.endswith((".yaml", ".json", ".txt"))} - set(made(one.argv))
    return one.argv[0] in QUICK and len(one.argv) > 1 and not {"NAME", "FILE"} & set(one.argv) and named <= there


def made(argv: tuple[str, ...]) -> list[str]:
    """Files that a command writes."""
    return [word for option, word in pairwise(argv) if option in ("-o", "--plot", "--trace", "--json", "--csv")]


RUN = sorted(filter(runs, commands()), key=lambda one: (one.argv, not one.shown, str(one.page)))
"""Once each, preferably where its output is shown."""


@pytest.mark.parametrize(
    "one",
    [one for n, one in enumerate(RUN) if n == 0 or RUN[n - 1].argv != one.argv],
    ids=lambda one: " ".join(one.argv).replace("/", "."),
)
def test_quick_commands_run_and_print_what_their_page_shows(
    one: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("jobs", "cluster"):
        os.symlink(ROOT / folder, tmp_path / folder)
    for name, text in one.files:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(one.argv) == 0, capsys.readouterr().err
    printed = {shape(line) for line in capsys.readouterr().out.splitlines()}
    missing = [line for line in one.shown if line.strip() and shape(line) not in printed and "..." not in line]
    assert not missing, f"{one.page.name} shows lines that are not printed"


def test_what_is_wrong_on_a_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`raypipe schedule zb-h1 --svg x` and `raypipe trian jobs/quickstart.yaml`\n```\n$ cat a.txt\nplacement 0\n"
        "$ FOO=1 raypipe train jobs/quickstart.yaml $PLAN \\\n  --set train.stepz=3  # so\nepoch 1\n"
        "raypipe autoconfigure JOB.yaml --top many | head\n```\n"
    )
    result = list(on(page))
    assert [one.argv for one in result] == [
        ("train", "jobs/quickstart.yaml", "--set", "train.stepz=3"),
        ("autoconfigure", "JOB.yaml", "--top", "many"),
        ("schedule", "zb-h1", "--svg", "x"),
        ("trian", "jobs/quickstart.yaml"),
    ]
    assert result[0].shown == ("epoch 1",)
    assert result[0].files == (("a.txt", "placement 0\n"),)
    for one, why in zip(result, ("stepz", "valid integer", "--svg", "trian"), strict=True):
        with pytest.raises(Exception) as error:  # noqa: PT011
            check(one.argv)
        assert why in f"{error.value} {getattr(error.value, 'message', '')}"
