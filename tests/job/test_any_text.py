"""Texts, files and sizes that stand for too much are refused by one error, within a moment.

What is wrong in other ways is tried by tests/safety.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.cost.profile import load_profile
from raypipe.errors import SpecError
from raypipe.job import load_cluster, load_job
from raypipe.job.reading import parse_yaml
from raypipe.job.rules.check import MOST_LAYERS
from raypipe.job.spec import EXAMPLE
from raypipe.plan.plan import load_plan

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / EXAMPLE)
FIXED = ["parallel.schedule=1f1b", "parallel.stages=2", "parallel.microbatch=4"]


def bomb(line: str, levels: int = 9) -> str:
    """Aliases of aliases, nine of each level in the next: 9^9 values in ten lines."""
    lines = ["m0: &m0 " + line]
    return "\n".join([*lines, *(f"m{i}: &m{i} [{', '.join([f'*m{i - 1}'] * 9)}]" for i in range(1, levels))])


MERGES = "\n".join(["m0: &m0 {a: 1}", *(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}" for i in range(1, 9))])
TEXTS = [
    ("[" * 100_000, "nested more than 50 deep"),
    ("a: " + "{b: " * 60 + "1" + "}" * 60, "nested more than 50 deep"),
    (bomb("[x, x]"), "more than 100000 values"),
    (MERGES, "more than 100000 values"),
    ("a: &a [*a]", "an alias refers to a value that contains it"),
    ("a: &a {b: *a}", "an alias refers to a value that contains it"),
    ("a: !!bool maybe", "not what its tag says"),
    ("a: !!timestamp x", "not what its tag says"),
    ('a: !!int ""', "not valid YAML"),
    ('a: "\\ud800"', "surrogates not allowed"),
    ("a: " + "9" * 5000, "not valid YAML"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words"), TEXTS, ids=[t[:20] for t, _ in TEXTS])
def test_texts_that_stand_for_too_much(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    for read in (load_job, load_cluster):
        with pytest.raises(SpecError, match=words):
            read(tmp_path / "job.yaml")
    if "\n" not in text:
        with pytest.raises(SpecError, match=words):
            load_job(QUICK, [f"model={text}"])


def test_aliases_as_people_write_them() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]", "f") == {
        "a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}],
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null/x", "/proc/self/mem", "~no-such-user/job.yaml", "a\0b", "/"])
def test_files_that_are_none(path: str) -> None:
    for read in (load_job, load_cluster, load_plan, load_profile):
        with pytest.raises(SpecError, match=r"fix: |folder"):
            read(Path(path))


def test_a_file_of_another_kind_and_size(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("x: 1\n" * 100_000)
    with pytest.raises(SpecError, match="the limit is 128 KiB"):
        load_job(tmp_path / "job.yaml")


LIMITS = [
    (["model.layers=100000000"], "model.layers: is above 4096: .*\n.*use at most 4096"),
    (["model.layers=1" + "0" * 20], "model.layers: is above 4096"),
    (["model.hidden=1000000000"], "2^40 values"),
    (["model.sequence=1000000000000"], "model.sequence: an activation"),
    (["model.vocabulary=1000000000000"], "model.vocabulary: the matrix"),
    (["train.seed=1" + "0" * 30], "9007199254740992"),
    (["train.message_timeout_s=1e-9"], "use 1 or more"),
    (["train.message_timeout_s=1e300"], "use 604800, a week, or less"),
    (["train.message_timeout_s=-1"], "use 1 or more"),
    (["parallel.schedule=/dev/zero"], "not a regular file"),
    (["parallel.schedule=~no-such-user/x.txt"], "No such file"),
    (["parallel.tensor=1000000000"], "above the limit of 100000\n.*use at most 50000"),
    (["parallel.replicas=1000000", "train.batch=4000000"], "above the limit of 100000"),
]


@pytest.mark.parametrize(("overrides", "words"), LIMITS, ids=[o[0][:40] for o, _ in LIMITS])
def test_sizes_that_nothing_runs(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("2^40", r"2\^40")):
        load_job(QUICK, [*FIXED, *overrides])


def test_the_largest_that_is_planned() -> None:
    assert load_job(QUICK, [*FIXED, f"model.layers={MOST_LAYERS}", "train.message_timeout_s=604800"])
