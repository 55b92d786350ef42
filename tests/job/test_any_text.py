"""Any job, cluster, plan or profile is read or refused by one error, within a moment."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.cost.profile import load_profile
from raypipe.errors import RaypipeError, SpecError
from raypipe.job import job_from, load_cluster, load_job
from raypipe.job.cluster import cluster_from
from raypipe.job.data_spec import DataSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.reading import parse_yaml
from raypipe.job.rules.check import MOST_LAYERS
from raypipe.job.spec import EXAMPLE, JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.plan import Plan, build_schedule, load_plan

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


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), st.sampled_from([10**20, 1e308, 5e-324]),
    st.text(max_size=4), st.sampled_from(["auto", "1f1b", "stdlib", "/dev/zero", "~x/y", "full", "a\0.b", "s3://x"]),
)  # fmt: skip
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=2))
BASE = load_job(QUICK, FIXED).model_dump(mode="json")
KEYS = [
    ("name",), *((section,) for section in ("model", "data", "train", "parallel")),
    *(("model", key) for key in BASE["model"]), *(("data", key) for key in DataSpec.model_fields),
    *(("train", key) for key in TrainSpec.model_fields), *(("parallel", key) for key in ParallelSpec.model_fields),
]  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=3))
def test_any_job_is_one_or_is_refused(changes) -> None:
    job = json.loads(json.dumps(BASE))
    for key, value in changes:
        if len(key) == 1 or not isinstance(job[key[0]], dict):
            job[key[0]] = value
        else:
            job[key[0]][key[1]] = value
    with contextlib.suppress(RaypipeError):
        assert isinstance(job_from(job), JobSpec)


@settings(max_examples=100)
@given(st.text(alphabet="ab:&*[]{}<>-!|#'\"\n ,1e.?%@`~\t", max_size=60))
def test_any_yaml_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse_yaml(text, "f")


CLUSTER = load_cluster(ROOT / "cluster" / "devices" / "a100.yaml").model_dump(mode="json")
INNER = [(key,) for key in CLUSTER] + [("device", key) for key in CLUSTER["device"]] + [("between", "latency_us")]


@settings(max_examples=100)
@given(st.sampled_from(INNER), values)
def test_any_cluster_is_one_or_is_refused(key, value) -> None:
    cluster = json.loads(json.dumps(CLUSTER))
    if len(key) == 1:
        cluster[key[0]] = value
    else:
        cluster[key[0]][key[1]] = value
    with contextlib.suppress(RaypipeError):
        assert cluster_from(cluster).devices >= 1


PLAN = json.loads(Plan.of(load_job(QUICK, FIXED).parallel, ((0, 1, 2), (3, 4, 5)), 8).text())
plans = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(PLAN, values), "program": st.sampled_from(["device 0: 0F0 0BW0", "x", ""]),
                  "predicted_step_s": values, "made_for": values},
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=100)
@given(plans, st.binary(max_size=30))
def test_any_plan_or_profile_is_read_or_refused(change: dict, raw: bytes) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / "plan.json"
        for content in (json.dumps(PLAN | change).encode(), raw, b'{"cut": ' + b"[" * 5000):
            path.write_bytes(content)
            with contextlib.suppress(RaypipeError):
                build_schedule(load_plan(path), 8)
            with pytest.raises(SpecError):
                load_profile(path)
