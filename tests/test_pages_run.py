"""Every command in a block of a page, run by a shell as it is written, page by page; and the output that blocks show.

Runs are shortened (``fewer``), and what pages leave to the reader stands in (``PREPARED``); figures, times and paths of
the output are compared in shape alone. What can't run on any machine is in ``LEFT_OUT``, with where it is checked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.exhaustive import ONLY
from tests.job_files import write_text
from tests.ray_environment import without_ray
from tests.test_docs import PAGES, ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"(raypipe|python|make|pip|ray|sbatch|prometheus|grafana) .*|[A-Z_]+=.*")
SECONDS = 600
"""Most that one command takes, with all that it starts."""

LEFT_OUT = {
    r"make gpu|pip install": "installs; `make matrix` and tests/test_installed.py do",
    r"raypipe serve|TINKER_BASE_URL": "stays up until it is ended; tests/service",
    r"ray (start|job)|raypipe (submit|dashboards)": "a Ray that stays up; tests/runtime/runs/test_ray_head.py",
    r"prometheus|grafana": "stay up; tests/dashboards",
    r"sbatch": "needs Slurm; tests/cluster/test_slurm.py",
    r"python -m tests\.bench": "benches, which take minutes",
}
"""Commands that no page runs here, by how they begin, and why."""

SHOWN_ALONE = {
    "docs/evidence/benchmarks.md": "tables of benches",
    "docs/evidence/planner.md": "tables of benches",
    "docs/guides/experts.md": "an error for a model of Switch Transformers; tests/experts",
    "docs/guides/failures.md": "lines of runs with a fault; tests/runtime",
    "docs/guides/long-sequences.md": "two drawings beside one another",
    "docs/reference/how-it-works.md": "a drawing",
}
"""Pages with blocks that show what no command above them prints, and why."""

VARIES = re.compile(
    r"planned: |.* a step expected; |step planned"  # which plan is the fastest
    r"|(warm-up|straggler|host|sync|link|norm|data|imbalance) |[ :@.\d-]+$|Best change: |or: "  # what is slow
    r"| *device +warm-up "  # a column for each reason that there is
)
"""Lines that say what was measured: another machine, or the same one a minute later, has others."""

GPT = "{type: gpt, layers: 4, hidden: 32, heads: 2, sequence: 64, vocabulary: 256}"
SMALL = f"""name: small
model: {GPT}
data: {{type: bytes, path: my-text}}
train: {{steps: 2, batch: 8}}
"""


class Step(NamedTuple):
    """A command of a block and the lines below it; no command where a block begins with output."""

    line: str
    shown: tuple[str, ...]


def blocks(text: str, *kinds: str) -> list[str]:
    return [block for kind, block in FENCE.findall(text) if kind in kinds]


def steps(text: str) -> Iterator[Step]:
    """Yield what the blocks of a page run and show."""
    for block in blocks(text, "", "bash"):
        line, shown, prompts = "", [], "\n$ " in f"\n{block}"
        for one in re.sub(r"\\\n\s*", " ", block).splitlines():
            if one.startswith("$ ") if prompts else PROGRAM.fullmatch(one):
                if line or shown:
                    yield Step(line, tuple(shown))
                line, shown = one.removeprefix("$ "), []
            else:
                shown.append(one)
        yield Step(line, tuple(shown))


def fewer(words: list[str]) -> list[str]:
    """Return a command with less to do: two steps of training, or of many that are written one for every six hundred.

    >>> fewer(["train", "a.yaml", "--set", "train.steps=3000"])[3:]
    ['train.steps=5', '--set', 'train.eval_batches=1']
    """
    if words[0] == "autoconfigure" and "--budget" not in words:
        return [*words, "--budget", "60"]  # of this machine's time, however busy it is
    if words[0] == "epochs":
        return [*words, "--seeds", "1"]
    words = [
        re.sub(
            r"^(train\.steps=)(\d+)$",
            lambda m: m[1] + str(max(2, int(m[2]) // 600 if int(m[2]) > 100 else int(m[2]))),
            word,
        )
        for word in words
    ]
    if words[0] not in ("train", "quickstart"):
        return words
    few = ["--set", "train.eval_batches=1"]
    if not any(word.startswith("train.steps=") for word in words):
        few += ["--set", "train.steps=2"]
    return [*words, *few]


def shape(line: str) -> str:
    """Return a line without its figures, units of time and spaces.

    >>> shape("step   600  took 1,204.5 ms (-0.3%)") == shape("step 2  took 1.4 s (+1%)")
    True
    """
    line = re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "N", " ".join(line.split()))
    return re.sub(r"\bN (s|ms|us|µs|min)\b", "N T", line)


def is_printed(line: str, printed: set[str]) -> bool:
    """Return whether a line of a page is printed; "..." stands for anything, and last columns may be left out."""
    pattern = re.compile(".*".join(map(re.escape, shape(line).split("..."))) + r"(\b.*)?")
    return not line.strip(" .") or VARIES.match(line) is not None or any(map(pattern.fullmatch, printed))


WRAPPER = """#!/bin/sh
exec {python} -c 'import os, sys
from tests.test_pages_run import fewer
os.execv(sys.executable, [sys.executable, "-m", "raypipe", *fewer(sys.argv[1:])])' "$@"
"""


def scratch(folder: Path) -> dict[str, str]:
    """Fill a folder with what pages take for granted; return the environment of their commands."""
    for name in ("jobs", "cluster", "docs"):
        (folder / name).symlink_to(ROOT / name)
    write_text(folder / "my-text")
    write_text(folder / "home" / "my-project")
    (folder / "bin").mkdir()
    make = '#!/bin/sh\ntest "$1" = train && exec raypipe train jobs/quickstart.yaml\n'  # without its installation
    for name, text in {"raypipe": WRAPPER, "python": '#!/bin/sh\nexec {python} "$@"\n', "make": make}.items():
        (folder / "bin" / name).write_text(text.format(python=shlex.quote(sys.executable)))
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return without_ray(HOME=str(folder / "home"), PATH=path, PYTHONPATH=str(ROOT), COLUMNS="200")


class Page(NamedTuple):
    """What a page leaves to its reader."""

    files: Mapping[str, str] = MappingProxyType({})
    """Their text by name; ``json 0`` is the page's first block of that language, and yaml is added to a job."""
    before: tuple[str, ...] = ()
    """Commands that come first."""


PLAN = "--set parallel.schedule=1f1b --set parallel.stages=2 --set parallel.microbatch=4"
MINE = f"raypipe train jobs/quickstart.yaml {PLAN} --set data.path=my-text --run-dir runs/mine"
QUICKSTART = "cp jobs/quickstart.yaml JOB.yaml"
PREPARED = {
    "README.md": Page(before=(QUICKSTART,)),
    "docs/guides/branches.md": Page(),
    "docs/guides/experts.md": Page({"job.yaml": "yaml 0"}),
    "docs/guides/failures.md": Page(before=(MINE,)),
    "docs/guides/hybrid.md": Page(
        {"epochs.yaml": "yaml 0", "graph.json": "json 0"},
        ("sed -i /scaling_efficiency/d epochs.yaml", "sed 's/eval_every/early_stop: {target: 0.25}\\n  eval_every/' "
         "jobs/digits.yaml > job.yaml"),
    ),
    "docs/guides/long-sequences.md": Page({"job.yaml": SMALL + "parallel: {schedule: 1f1b, microbatch: 2}\n"}),
    "docs/guides/one-device.md": Page({"JOB.yaml": SMALL + "parallel: {microbatch: 2}\n"}),
    "docs/guides/plan.md": Page(
        {"job.yaml": "name: big\nmodel: {type: gpt, layers: 32, hidden: 2048, heads: 16, sequence: 1024, "
         "vocabulary: 50304}\ndata: {type: bytes, path: my-text}\ntrain: {steps: 2, batch: 64}\nparallel: auto\n"},
        (QUICKSTART, "raypipe profile JOB.yaml -o profile.json --quick", "raypipe autoconfigure JOB.yaml -o plan.json"),
    ),
    "docs/guides/train.md": Page(),
    "docs/guides/why-slow.md": Page(before=(f"{MINE} --set train.steps=24",)),
}  # fmt: skip


def prepare(page: Path, folder: Path) -> None:
    """Write the files that a page speaks of."""
    text = page.read_text("utf-8")
    for name, content in PREPARED.get(str(page.relative_to(ROOT)), Page()).files.items():
        kind, _, number = content.partition(" ")
        if number.isdigit():
            content = blocks(text, kind)[int(number)]
            if name == "job.yaml":
                content = "name: small\ndata: {type: bytes, path: my-text}\ntrain: {steps: 2, batch: 8}\n" + content
        (folder / name).write_text(content)


def why_left_out(line: str) -> str | None:
    return next((why for begins, why in LEFT_OUT.items() if re.match(begins, line)), None)


WITH_COMMANDS = [
    page for page in PAGES
    if page.name != "CONTRIBUTING.md" and any(one.line or one.shown for one in steps(page.read_text("utf-8")))
]  # fmt: skip
"""CONTRIBUTING.md has a developer's commands: what runs the tests."""


def test_few_commands_are_left_out() -> None:
    lines = [one.line for page in WITH_COMMANDS for one in steps(page.read_text("utf-8")) if one.line]
    left = [line for line in lines if why_left_out(line)]
    assert len(left) <= 18, left
    assert len(lines) - len(left) >= 60
    assert all(any(re.match(begins, line) for line in left) for begins in LEFT_OUT)


def test_what_no_command_prints_is_shown_on_few_pages() -> None:
    alone = {
        str(page.relative_to(ROOT))
        for page in WITH_COMMANDS
        for one in steps(page.read_text("utf-8"))
        if one.shown and (not one.line or why_left_out(one.line))
    }
    assert alone == set(SHOWN_ALONE)


@ONLY
@pytest.mark.runs
@pytest.mark.own_ray
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    environment = scratch(tmp_path)
    prepare(page, tmp_path)
    set_before: list[str] = []
    wrong: list[str] = []
    first = [Step(line, ()) for line in PREPARED.get(str(page.relative_to(ROOT)), Page()).before]
    for line, shown in [*first, *steps(page.read_text("utf-8"))]:
        if re.fullmatch(r"[A-Z_]+=(\S+|\".*\")", line):
            set_before.append(line)
        elif line.startswith("cat "):
            (tmp_path / line.split()[1]).write_text("".join(f"{one}\n" for one in shown))
        elif line and why_left_out(line) is None:
            script = "\n".join([*set_before, line])
            done = subprocess.run(
                ["timeout", str(SECONDS), "bash", "-ec", script], cwd=tmp_path, env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            print(f"$ {line}\n{done.stdout}")
            refused = done.returncode == 2 and any(one.startswith("  fix: ") for one in shown)
            if done.returncode and not refused:
                wrong.append(f"{line}: status {done.returncode}: {done.stdout[-2000:]}")
            printed = {shape(one) for one in done.stdout.splitlines()}
            wrong += [f"{line}: does not print: {one}" for one in shown if not is_printed(one, printed)]
    assert not wrong, "\n".join(wrong)


def test_what_is_wrong_on_a_page_is_found() -> None:
    text = "```\n$ raypipe schedule 1f1b  # so\ndevice 0  01\n```\n```yaml\na: 1\n```\n"
    text += '```\nP="a b"\nraypipe train \\\n  x $P\n```\n'
    assert list(steps(text)) == [
        Step("raypipe schedule 1f1b  # so", ("device 0  01",)), Step('P="a b"', ()), Step("raypipe train  x $P", ()),
    ]  # fmt: skip
    assert is_printed("took 3.1 s, ... in all", {shape("took 4 ms, or so in all")})
    assert not is_printed("took 3.1 s", {shape("was 3.1 s")})
    assert why_left_out("make gpu")
    assert why_left_out("raypipe train JOB.yaml") is None


FEATURES = (ROOT / "docs" / "reference" / "features.md").read_text("utf-8")
ROWS = set(re.findall(r"`(--set (?:parallel|train)\.[^`]*)`", FEATURES))
SHOWS = sorted(row for row in ROWS if not re.search(r"NAME|FILE|\.\.\.|//|MyLoop|experts", row))
"""What features.md says to set to see a feature, where it says all of it and means any model."""


@ONLY
@pytest.mark.runs
@pytest.mark.parametrize("row", SHOWS)
def test_what_features_are_seen_by_trains(row: str, driver_here: None, tmp_path: Path, monkeypatch, capsys) -> None:
    from raypipe.cli import run

    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    given = "" if "train.elastic" in row else PLAN
    words = f"train jobs/quickstart.yaml {given} {row} --set data.path={write_text(tmp_path / 'text')}"
    assert run(fewer(shlex.split(words))) == 0, capsys.readouterr().err


def test_most_rows_of_features_are_seen() -> None:
    assert len(SHOWS) >= 20
