"""`raypipe train`: whatever is wrong with the request is one message, exit status 2, and quick to come."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raypipe.checkpoint import commit, step_directory, write_shard
from raypipe.cli import run
from raypipe.cli.train import resume_command
from raypipe.errors import RunError
from raypipe.job import load_job
from raypipe.job.data_spec import DataSpec
from raypipe.launch.plans import kept_plan
from raypipe.launch.prepared import units_of
from raypipe.models.task import Labels, Values
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import RunLog
from raypipe.plan.plan import load_plan
from raypipe.schedule import SCHEDULES
from raypipe.train import Prepared, make_plan, prepare_run
from tests.runtime.cluster.answering import GRPC, answering

JOB = """
name: small
model: {{type: gpt, layers: 4, hidden: 16, heads: 2, sequence: 16}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: 4, batch: 8, seed: 0}}
parallel: {{schedule: 1f1b, stages: 2, microbatch: 2}}
"""
QUICK_S = 10.0
"""Longest a refusal may take in a process that has its modules: far less than starting Ray and its actors."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(f"file {i}: " + "some words to learn from. " * 40)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(path=text))
    return path


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request starts nothing: no Ray, no actor. (The session's own Ray must not be taken for a cluster.)"""
    import ray

    def started(*_args: object, **_options: object) -> None:
        raise AssertionError("Ray was started for a request that is wrong")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture
def refused(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command; it must refuse, properly. Returns what it says."""

    def attempt(*words: str, run_dir: Path | None = tmp_path / "run", status: int = 2) -> str:
        where = ["--run-dir", str(run_dir)] if run_dir is not None else []
        begun = time.monotonic()
        assert run(["train", str(job), *where, *words]) == status
        took = time.monotonic() - begun
        said = capsys.readouterr()
        assert said.out == ""
        message, fix = said.err.rstrip("\n").split("\n")  # one message of two lines, no more
        assert fix.startswith("  fix: ")
        assert len(fix) > len("  fix: ")
        assert ": " in message
        assert "Traceback" not in said.err
        assert took < QUICK_S
        return said.err

    return attempt


# Which keys and values are wrong: tests/job. What the command makes of one is the same for all.
WRONG = [
    # --set, where, why, fix
    ("train.stepz=5", "train.stepz", "unknown key", 'did you mean "steps"?'),
    ("parallel.replicas=3", "train.batch", "times replicas = 3", "use 6 or 12"),
]


@pytest.mark.parametrize(("override", "where", "why", "fix"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_key_or_value(refused, override, where, why, fix) -> None:
    said = refused("--set", override)
    message, advice = said.split("\n  fix: ")
    assert message.startswith(f"--set {where}: ") or f": {where}: " in message
    assert why in message
    assert fix in advice


def test_a_misspelt_option_and_a_missing_job(refused, job, tmp_path, capsys) -> None:
    assert 'did you mean "--resume"?' in refused("--resum")
    assert run(["train", str(tmp_path / "jub.yaml")]) == 2
    assert 'no such file\n  fix: did you mean "job.yaml"?' in capsys.readouterr().err


def test_data_that_is_not_there_or_no_text(refused, tmp_path) -> None:
    said = refused("--set", f"data.path={tmp_path}/nowhere")
    assert said.startswith("data.path: ")
    assert "does not exist" in said
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "a.bin").write_bytes(b"\0\1\2" * 1000)
    said = refused("--set", f"data.path={binary}", run_dir=tmp_path / "binary-run")
    assert said.startswith("data.path: ")
    assert "holds no text: 1 binary" in said
    short = tmp_path / "short.txt"
    short.write_text("abc")
    assert "too short" in refused("--set", f"data.path={short}", run_dir=tmp_path / "short-run")


def test_run_directories_that_cannot_be_used(refused, tmp_path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for unusable in (in_the_way, in_the_way / "inside", tmp_path / ("x" * 300), Path("/proc/here")):
        said = refused(run_dir=unusable)
        assert said.startswith(f"{unusable}: can't be used as run directory: ")
        assert "--run-dir" in said
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "data").write_text("a file where a folder has to go")
    assert str(busy) in refused(run_dir=busy)


def test_a_directory_with_a_run_is_not_written_over(refused, tmp_path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    said = refused(run_dir=there)
    assert "already holds a run" in said
    assert "--resume" in said
    assert [p.name for p in there.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_whose_run_made_no_step_is_used_again(job: Path, tmp_path: Path, resume: bool) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "metrics.jsonl").write_text("")
    (there / "events.jsonl").write_text('{"event": "run"}\n{"event": "failed", "message": "no memory"}\n')
    said: list[str] = []
    prepared = prepare_run(load_job(job), there, resume, say=said.append)
    assert not prepared.resume
    assert said == [f"{there}: the run in it ended before its first step; starting a new run there"]
    assert "no memory" in (there / "events-1.jsonl").read_text()


# Resuming.


@pytest.fixture
def stopped(job: Path, tmp_path: Path) -> Path:
    """A run directory as training leaves it, with one checkpoint after two steps."""
    directory = tmp_path / "stopped"
    checkpoint = step_directory(directory / "checkpoints", 2)
    tensors = {f"param/{i}.weight": torch.arange(64.0) for i in range(6)}
    commit(checkpoint, 2, [write_shard(checkpoint, "rank-00000", tensors)], {})
    (directory / RECORD).write_text(json.dumps(load_job(job).model_dump(mode="json")))
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n')
    return directory


DAMAGE = [  # all kinds: tests/checkpoint/test_round_trip.py
    (lambda c: (c / "manifest.json").write_text("{"), "manifest.json: is damaged"),
    (lambda c: c.rename(c.parent / "other"), "holds no checkpoint"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_a_checkpoint_that_cannot_be_read(refused, stopped, damage, words) -> None:
    damage(step_directory(stopped / "checkpoints", 2))
    said = refused("--resume", run_dir=stopped)
    assert str(stopped / "checkpoints") in said
    assert words in said
    assert len((stopped / "metrics.jsonl").read_text().splitlines()) == 2  # nothing is forgotten over it


def test_resuming_what_does_not_fit(refused, stopped) -> None:
    assert refused("--resume", run_dir=None).startswith("--resume: needs the directory of the run to resume")
    assert refused("--resume", "--set", "model.hidden=32", run_dir=stopped).startswith("model: differs")
    said = refused("--resume", "--set", "train.steps=2", run_dir=stopped)
    assert said.startswith("train.steps: is 2, and the run has done 2")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 3}'])
def test_a_damaged_record_of_the_job(refused, stopped, content, capsys) -> None:
    (stopped / RECORD).write_text(content)
    assert str(stopped / RECORD) in refused("--resume", run_dir=stopped)
    assert run(["sample", str(stopped)]) == 2
    assert str(stopped / RECORD) in capsys.readouterr().err


def test_damaged_run_files_are_set_aside_where_the_checkpoints_are_whole(job: Path, stopped: Path) -> None:
    (stopped / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n\xff\x00\n{"step": 2, "loss": 1.0}\n{"ste')
    (stopped / "events.jsonl").write_bytes(b'{"event": "run"}\n\xfe{{\n{"event": "started", "resumed_from": 0}\n')
    (stopped / "checkpoint_manager_snapshot.json").write_text('{"ray_ver')
    (stopped / "plan.json").write_text("{")
    (step_directory(stopped / "checkpoints", 2).parent / "step-²").mkdir()
    said: list[str] = []
    more = load_job(job, ["parallel.replan=true"])  # such a run goes on with the plan that it had
    prepared = prepare_run(more, stopped, True, say=said.append)
    assert prepared.resume
    assert [text.partition(": ")[0] for text in said] == ["note"] * 4
    damaged = ("checkpoint_manager_snapshot.json", "events.jsonl", "metrics.jsonl", "plan.json")
    assert tuple(sorted(p.name for p in stopped.glob("*.damaged"))) == tuple(f"{name}.damaged" for name in damaged)
    assert load_plan(stopped / "plan.json") == prepared.plan
    prepare_run(more, stopped, True, say=pytest.fail)  # said once


# Plans.


def test_what_a_run_writes_is_a_plan(job, tmp_path) -> None:
    """`--plan` runs the plan.json of another run."""
    for i, overrides in enumerate(([], ["parallel.schedule=chimera"], ["parallel.stages=4"])):
        plan = make_plan(load_job(job, overrides))
        plan.save(tmp_path / "plan.json")
        prepared = prepare_run(load_job(job), tmp_path / f"run{i}", False, tmp_path / "plan.json")
        assert prepared.plan == load_plan(tmp_path / f"run{i}" / "plan.json") == plan
        assert prepared.job.parallel == plan.parallel


@pytest.fixture
def planned(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What `autoconfigure -o` writes for the job, on two devices."""
    path = tmp_path / "planned.json"
    a100 = Path(__file__).parents[2] / "cluster" / "devices" / "a100.yaml"
    words = ["--cluster", str(a100), "--devices", "2", "--search", "0", "--json", "-o", str(path)]
    assert run(["autoconfigure", str(job), "--set", "parallel=auto", "--set", "parallel.stages=2", *words]) == 0
    capsys.readouterr()
    return path


def test_a_planned_job_keeps_its_prediction(job: Path, planned: Path, tmp_path: Path) -> None:
    promised = json.loads(planned.read_text())["predicted_step_s"]
    more = load_job(job, ["train.steps=9", "train.lr=0.1"])
    prepared = prepare_run(more, tmp_path / "run", False, planned, say=pytest.fail)
    assert prepared.plan.predicted_step_s == promised > 0
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["predicted_step_s"] == promised


def test_a_prediction_of_something_else_is_dropped_and_said(job: Path, planned: Path, tmp_path: Path) -> None:
    said: list[str] = []
    prepared = prepare_run(load_job(job, ["train.dtype=float64"]), tmp_path / "wider", False, planned, say=said.append)
    assert prepared.plan.predicted_step_s is None
    assert "train.dtype was float32, is float64" in said[0]
    edited = json.loads(planned.read_text())
    planned.write_text(json.dumps(edited | {"program": edited["program"].replace("schedule ", "schedule my-", 1)}))
    prepared = prepare_run(load_job(job), tmp_path / "edited", False, planned, say=said.append)
    assert prepared.plan.predicted_step_s is None
    assert "the plan was edited" in said[1]


def test_a_plan_for_another_batch_or_with_edited_keys(refused, planned: Path) -> None:
    assert "program: is a step of 8 sequences" in refused("--plan", str(planned), "--set", "train.batch=16")
    edited = json.loads(planned.read_text())
    edited["parallel"]["sync"] = "eager" if edited["parallel"]["sync"] == "lazy" else "lazy"
    planned.write_text(json.dumps(edited))
    said = refused("--plan", str(planned))
    assert said.startswith(f"{planned}: parallel: was edited since the program was made of it")
    assert "raypipe autoconfigure" in said


def test_a_plan_for_another_model_of_as_many_layers(refused, planned: Path) -> None:
    said = refused("--plan", str(planned), "--set", "model.hidden=32", "--set", "model.dropout=0.5")
    assert "model.hidden was 16, is 32" in said
    assert "autoconfigure" in said


def test_what_is_asked_for_beside_a_plan(refused, job: Path, planned: Path, tmp_path: Path) -> None:
    """What the plan has decided can't be asked for otherwise; what it leaves to the job can."""
    said = refused("--plan", str(planned), "--set", "parallel.microbatch=1")
    assert said.startswith("--set parallel.microbatch: 1 contradicts ")
    assert "which decides" in said
    prepared = prepare_run(load_job(job), tmp_path / "own", False, planned, beside={"transport": "gloo"})
    assert prepared.plan.parallel.transport == "gloo"
    assert prepared.plan.predicted_step_s is not None


def test_plans_of_another_model(refused, job, tmp_path) -> None:
    path = tmp_path / "plan.json"
    make_plan(load_job(job, ["model.layers=6"])).save(path)
    said = refused("--plan", str(path))
    assert said.startswith(f"{path}: cut: holds layers [0, 1, 2, 3, 4, 5, 6, 7] of a model with layers 0 to 5")
    make_plan(load_job(job)).save(path)
    plan = json.loads(path.read_text())
    wrong = [
        ([[0, 1, 2, 3, 4, 5]], "has 2 stages, the plan's cut 1"),
        ([[3, 4, 5], [0, 1, 2]], "holds layers"),
        ([[0, 1, 2, 3, 4, 5], []], "gives stage 1 no layers"),
    ]
    path.write_text(json.dumps(plan | {"parallel": plan["parallel"] | {"schedule": "1f1c"}}))
    assert refused("--plan", str(path)).startswith(f"{path}: parallel: was edited")
    for cut_, words in wrong:
        path.write_text(json.dumps(plan | {"cut": cut_}))
        assert words in refused("--plan", str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSON"),
        ('{"cut": ' + "[" * 5000, "not valid JSON"),
        ("[]", ""),
        ('{"format": 1}', "raypipe autoconfigure JOB.yaml -o PLAN.json"),
        ('{"format": 2}', "parallel"),
        ('{"format": 3}', "format"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_plans(refused, tmp_path, content, words) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    said = refused("--plan", str(path))
    assert said.startswith(f"{path}: ")
    assert ": : " not in said
    assert words in said


def test_a_plan_that_does_not_divide_the_batch(refused, job, tmp_path) -> None:
    path = tmp_path / "plan.json"
    make_plan(load_job(job)).save(path)
    said = refused("--plan", str(path), "--set", "train.batch=9", "--set", "parallel=auto")
    assert "9 is not divisible by microbatch = 2" in said


def test_an_order_that_was_searched_for_another_batch(refused, job, tmp_path) -> None:
    """It would train a quarter of each mini-batch and divide its loss by all."""
    path = tmp_path / "plan.json"
    make_plan(load_job(job, ["parallel.schedule=auto"])).save(path)
    said = refused("--plan", str(path), "--set", "train.batch=32")
    assert said.startswith(f"{path}: program: is a step of 8 sequences (4 micro-batches of 2), train.batch is 32")
    assert "set train.batch to 8, or plan again for 32" in said
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"program": "microbatches 0\nplacement 0 1\ndevice 0:\n"}))
    assert refused("--plan", str(path)).startswith(f"{path}: program: microbatches: ")


SKIP = "edges 0>1 0>2 1>2\n"
"""Stage 2 reads stage 0's output too: a graph of stages that is no chain."""
THREE = """microbatches 4
placement 0 1 1
{edges}device 0: 0F0 0F1 0F2 0F3 0BW0 0BW1 0BW2 0BW3
device 1: 1F0 2F0 2BW0 1BW0 1F1 2F1 2BW1 1BW1 1F2 2F2 2BW2 1BW2 1F3 2F3 2BW3 1BW3
"""


def test_a_schedule_file_whose_stages_make_no_chain(refused, job, tmp_path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(THREE.format(edges=SKIP))
    said = refused("--set", f"parallel.schedule={path}")
    assert "edges" in said
    assert "are not a chain" in said
    path.write_text(THREE.format(edges=""))
    assert len(make_plan(load_job(job, [f"parallel.schedule={path}"])).cut) == 3


def test_a_plan_needs_neither_its_schedule_file_nor_the_same_generator(job, tmp_path, monkeypatch) -> None:
    own = tmp_path / "mine.txt"
    own.write_text(THREE.format(edges=""))
    made = [make_plan(load_job(job, [f"parallel.schedule={name}"])) for name in (own, "1f1b")]
    own.unlink()
    monkeypatch.setitem(SCHEDULES, "1f1b", SCHEDULES["gpipe"])
    assert make_plan(load_job(job)).program != made[1].program
    for n, plan in enumerate(made):
        plan.save(tmp_path / f"{n}.json")
        assert prepare_run(load_job(job), tmp_path / f"run-{n}", False, tmp_path / f"{n}.json").plan == plan


def test_a_plan_whose_order_makes_no_chain_of_its_stages(refused, job, tmp_path) -> None:
    path, own = tmp_path / "plan.json", tmp_path / "mine.txt"
    own.write_text(THREE.format(edges=""))
    make_plan(load_job(job, [f"parallel.schedule={own}"])).save(path)
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"program": plan["program"].replace("device 0:", SKIP + "device 0:")}))
    said = refused("--plan", str(path))
    assert said.startswith(f"{path}: ")
    assert "are not a chain" in said


def test_a_resumed_search_is_made_anew_for_another_batch(job, tmp_path) -> None:
    made = make_plan(load_job(job, ["parallel.schedule=auto"]))
    made.save(tmp_path / "plan.json")
    said: list[str] = []
    kept = kept_plan(load_job(job, ["parallel.schedule=auto"]), tmp_path, said.append)
    assert kept is not None
    assert kept.plan == made
    assert said == []
    assert kept_plan(load_job(job, ["parallel.schedule=auto", "train.batch=32"]), tmp_path, said.append) is None
    (note,) = said
    assert "does not fit this job, so a new plan is made" in note
    assert "train.batch is 32" in note


# What only the machine or the cluster can refuse.


def test_more_devices_than_this_machine_can_give(refused) -> None:
    replicas = 8 * (os.cpu_count() or 1) + 1
    plan = {"parallel.replicas": replicas, "parallel.microbatch": 1, "train.batch": 2 * replicas}
    said = refused(*(word for key, value in plan.items() for word in ("--set", f"{key}={value}")))
    assert f"asks for {2 * replicas} devices" in said
    assert f"{os.cpu_count()} cores give at most {8 * (os.cpu_count() or 1)} stage processes" in said


def test_more_devices_than_the_cluster_has(refused, monkeypatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr("raypipe.runtime.cluster.connect.autoscales", lambda: False)
    said = refused()
    assert "asks for 2 devices (stages x replicas x tensor), but the cluster has 1 CPUs and no GPU" in said


def test_a_dashboard_port_that_is_taken_or_none(refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("--dashboard-port", str(port))
    assert said.startswith(f"--dashboard-port: {port} can't be used: Address already in use")
    assert " is free" in said
    assert "is not a port" in refused("--dashboard-port", "70000")


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("nonsense", "is not HOST:PORT"),
     ("ray://no-such-host.invalid:10001", "no Ray cluster answers")],
)  # fmt: skip
def test_a_named_cluster_that_does_not_answer(refused, monkeypatch, address, words) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = refused()
    assert said.startswith("RAY_ADDRESS: ")
    assert words in said
    assert "ray start --head" in said


def test_a_cluster_that_asks_for_a_token(refused, monkeypatch) -> None:
    """Ray's own words for it are that it cannot connect; the port answers, though."""
    import ray

    def refuse(*_args: object, **_options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    with answering(GRPC) as locked:
        monkeypatch.setenv("RAY_ADDRESS", locked)
        said = refused()
    assert "cannot connect to a Ray cluster" in said
    assert "RAY_AUTH_MODE=token" in said


@pytest.mark.slow
def test_as_a_command_a_refusal_imports_neither_torch_nor_ray(job) -> None:
    script = (
        "import sys; from raypipe.cli import run; status = run(sys.argv[1:]);"
        "sys.exit(f'imported {loaded}' if (loaded := {'torch', 'ray'} & set(sys.modules)) else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(job), "--set", "train.stepz=5"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == '--set train.stepz: unknown key\n  fix: did you mean "steps"?\n'


def ending(error: BaseException, *checkpoints: int, began: bool = True) -> Callable[..., dict[str, object]]:
    """A run that writes these checkpoints and ends so."""

    def execute(prepared: Prepared, *_: object) -> dict[str, object]:
        log = RunLog(prepared.directory)
        log.event("run", resume=False)
        if began:
            log.metric({**dict.fromkeys(("loss", "step_s", "tokens_per_s", "bubble_ratio"), 1.0), "step": 1})
        for step in checkpoints:
            path = step_directory(prepared.directory / "checkpoints", step)
            path.mkdir(parents=True)
            commit(path, step, [write_shard(path, "rank-00000", {"param/a": torch.ones(1)})], {})
        raise error

    return execute


@pytest.mark.parametrize(
    ("error", "status", "first"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RunError("run", "an actor died", "see there"), 1, "run: an actor died"),
    ],
)
def test_a_run_that_ends_early_says_how_to_go_on(job, tmp_path, monkeypatch, capsys, error, status, first) -> None:
    monkeypatch.setattr("raypipe.train.execute", ending(error, 20, 100))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    options = ["--set", "train.steps=200", "--set", "train.betas=[0.9, 0.95]"]
    directory = tmp_path / "run"
    command = (
        f"raypipe train {job} --set train.steps=200 --set 'train.betas=[0.9, 0.95]' --run-dir {directory} --resume"
    )
    assert run(["train", str(job), *options, "--run-dir", str(directory)]) == status
    said = capsys.readouterr().err
    start, end = said.split(f"\n{first}\n")
    assert f"run directory {directory}; " in start
    assert f"  {command}\n" in start
    assert end.endswith(f"to resume from its checkpoint of step 100: {command}\n")
    assert "Traceback" not in said


def test_figures_have_the_units_of_the_task_and_the_data(job, tmp_path, monkeypatch) -> None:
    prepared = prepare_run(load_job(job), tmp_path / "run", resume=False)
    assert prepared.units == ("nats per token", "tokens")
    images = load_job(job).model_copy(update={"data": DataSpec(type="arrays", path=str(tmp_path))})
    for task, unit in ((Labels(), "nats per label"), (Values(), "squared error per value")):
        assert units_of(task, images, tmp_path) == (unit, "samples")


def test_a_run_without_a_checkpoint_cannot_be_resumed(job, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("raypipe.train.execute", ending(KeyboardInterrupt()))
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(job), "--run-dir", "run"]) == 130
    said = capsys.readouterr().err
    assert said.endswith("interrupted\n  fix: it had no checkpoint yet: start again, in another --run-dir than run\n")
    monkeypatch.setattr("raypipe.train.execute", ending(KeyboardInterrupt(), began=False))
    assert run(["train", str(job), "--run-dir", "other"]) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted\n")  # the same command does


def test_the_command_is_one_that_the_shell_finds(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    said = resume_command(Path("a.yaml"), tmp_path, (), Path("plan.json"))
    program, words = said.split(" -m raypipe ")
    assert subprocess.run([program, "-c", ""]).returncode == 0
    assert words == f"train a.yaml --plan plan.json --run-dir {tmp_path} --resume"
