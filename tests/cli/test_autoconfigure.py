"""``raypipe autoconfigure``: CONTRACT.md's options, JSON and plan file, and one clear error for every wrong request."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.cli import run
from raypipe.job import load_job
from raypipe.plan.best_first import NEAR
from raypipe.plan.plan import build_schedule, load_plan
from raypipe.plan.watch import Watch
from tests.plan.conftest import make_profile

ROOT = Path(__file__).parents[2]
JOB = """
name: small
model: {type: gpt, layers: 6, hidden: 256, heads: 4, sequence: 128}
data: {type: bytes, path: stdlib}
train: {steps: 4, batch: 16, clip: 1.0}
parallel: auto
"""
CLUSTER = """
name: two hosts
hosts: 2
devices_per_host: 2
device: {name: small, memory_gib: 4, peak_tflops: {float32: 1}, memory_gb_s: 100, efficiency: 0.5}
inside: {latency_us: 5, bandwidth_gb_s: 20}
between: {latency_us: 20, bandwidth_gb_s: 2}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    job, cluster = tmp_path / "job.yaml", tmp_path / "cluster.yaml"
    job.write_text(JOB)
    cluster.write_text(CLUSTER)
    return job, cluster


def command(*words: object) -> int:
    return run(["autoconfigure", *map(str, words)])


@pytest.mark.slow
def test_json_and_plan_file(files, tmp_path, capsys) -> None:
    job, cluster = files
    out = tmp_path / "plan.json"
    assert command(job, "--cluster", cluster, "--top", 3, "--json", "-o", out, "--search", 0.3) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out.splitlines()[-1])
    assert printed.out.count("\n") == 1
    assert [row["fits"] for row in told["candidates"][:3]] == [True] * 3
    steps = [row["predicted_step_s"] for row in told["candidates"][:3]]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= steps[1] * (1 + NEAR)  # the simplest of those about as fast is the first
    plan = load_plan(out)
    assert plan.model_dump(mode="json") == told["best"]
    assert told["first_plan_s"] > 0
    assert told["search_s"] == told["seconds"]
    devices = plan.parallel.devices
    assert told["tokens_per_s_per_device"] == pytest.approx(
        told["candidates"][0]["throughput"] * 128 / devices
    )  # the job's sequence
    assert [row["device"] for row in told["memory"]] == list(range(devices))
    totals = [row["planned_bytes"] + row["reserved_bytes"] for row in told["memory"]]
    assert totals == pytest.approx(told["candidates"][0]["memory_bytes"])
    assert all(0 < row["planned_bytes"] <= row["usable_bytes"] for row in told["memory"])
    first = told["candidates"][0]
    assert (plan.parallel.schedule, plan.parallel.stages) == (first["schedule"], first["stages"])
    assert build_schedule(plan, 16).devices == first["stages"] * first["replicas"] <= 4


@pytest.mark.slow
def test_the_table_names_the_winner_draws_three_and_explains_eq_1(files, capsys) -> None:
    job, cluster = files
    assert command(job, "--cluster", cluster, "--search", 0) == 0
    text = capsys.readouterr().out
    assert "fastest" in text
    assert "single device" in text
    assert text.count("makespan") == 3
    assert "Eq. 1" in text
    assert "candidates," in text


def test_a_profile_and_fewer_devices(files, tmp_path, capsys) -> None:
    job, _ = files
    path = tmp_path / "profile.json"
    path.write_text(make_profile(layers=6).model_dump_json())
    assert command(job, "--profile", path, "--devices", 2, "--json", "--search", 0) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(row["stages"] * row["replicas"] <= 2 for row in told["candidates"])


CAPTURED = """
name: captured
model: {hf: gpt2, config: {n_layer: 2, n_embd: 64, n_head: 2, n_positions: 32, vocab_size: 256}, sequence: 32}
data: {type: bytes, path: stdlib}
train: {steps: 4, batch: 8}
parallel: auto
"""


@pytest.mark.slow
def test_a_captured_model_is_planned_for_a_described_cluster(files, tmp_path, capsys) -> None:
    job, cluster = files
    job.write_text(CAPTURED)
    out = tmp_path / "plan.json"
    assert command(job, "--cluster", cluster, "--json", "--search", 0, "-o", out) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["tensor"] for row in told["candidates"]} == {1, 2}  # two heads, two devices a host
    assert [i for part in load_plan(out).cut for i in part] == list(range(6))  # embedding, two sub-graphs a block, head


@pytest.mark.exhaustive  # the tutorial plans the same job for fewer devices
@pytest.mark.slow
def test_the_worked_example_is_planned_for_its_machine(capsys) -> None:
    """Chimera's GPT-2 on Piz Daint: the largest case of the documentation, all families."""
    job = ROOT / "jobs" / "gpt2-1.3b.yaml"
    model = load_job(job).model
    assert (model.layers, model.sequence) == (64, 632)  # type: ignore[union-attr]
    assert (
        command(job, "--cluster", ROOT / "cluster" / "devices" / "p100.yaml", "--devices", 512, "--json", "--search", 0)
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["candidates"][0]["fits"]
    assert {row["kind"] for row in told["candidates"]} >= {"gpipe", "1f1b", "chimera", "gems", "zeropp", "zb-v"}


WRONG = [
    (["--cluster", "nowhere.yaml"], "no such file"),
    (["--profile", "nowhere.json"], "cannot be read"),
    (["--cluster", "CLUSTER", "--profile", "p.json"], "a profile already describes its cluster"),
    (["--cluster", "CLUSTER", "--devices", "0"], "greater than or equal to 1"),
    (["--cluster", "CLUSTER", "--devices", "3"], "use 2 or 4"),
    (["--cluster", "CLUSTER", "--policy", "bset"], 'did you mean "best"?'),
    (["--cluster", "CLUSTER", "--allow", "async"], 'did you mean "asynchronous"?'),
    (["--cluster", "CLUSTER", "-o", "no/such/folder/plan.json"], "no such folder"),
    (["--cluster", "CLUSTER", "--set", "train.dtype=bfloat16"], "no peak_tflops for bfloat16"),
    (["--cluster", "CLUSTER", "--set", "parallel.schedule=zbv"], "did you mean"),
    (["--cluster", "CLUSTER", "--set", "parallel.tensor=3"], "use 1 or 2"),
    (["--cluster", "CLUSTER", "--set", "parallel.stages=5"], "no plan on 4 devices has stages: 5"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_wrong_request_is_one_message(words, message, files, capsys) -> None:
    job, cluster = files
    assert command(job, *[cluster if w == "CLUSTER" else w for w in words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "JSON"),
        ("{}", "source: missing"),
        ('{"source": "measured", "layers": []}', "device: missing"),
    ],
)
def test_a_profile_that_is_none(text, message, files, tmp_path, capsys) -> None:
    job, _ = files
    path = tmp_path / "p.json"
    path.write_text(text)
    assert command(job, "--profile", path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("inside: {latency_us: 5, bandwidth_gb_s: 0}", "bandwidth_gb_s"),
        ("device: {name: x, memory_gib: 0, peak_tflops: {float32: 1}, memory_gb_s: 1, efficiency: 1}", "memory_gib"),
    ],
)
def test_a_cluster_that_cannot_be(change, message, files, capsys) -> None:
    job, cluster = files
    key = change.split(":")[0]
    lines = [line for line in CLUSTER.splitlines() if not line.startswith(f"{key}:")]
    cluster.write_text("\n".join([*lines, change]))
    assert command(job, "--cluster", cluster) == 2
    assert message in capsys.readouterr().err


def test_an_unreachable_ray_cluster(files, monkeypatch, capsys) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the session's own must not be taken for it
    job, _ = files
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert command(job) == 2
    assert "no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err


def test_nothing_fits(files, capsys) -> None:
    job, cluster = files
    cluster.write_text(CLUSTER.replace("memory_gib: 4", "memory_gib: 0.01"))
    assert command(job, "--cluster", cluster) == 2
    assert "no plan fits" in capsys.readouterr().err


MIXED = """
name: two kinds
hosts: 1
devices_per_host: 1
device: {name: fast, accelerator_type: F1, memory_gib: 4, peak_tflops: {float32: 1}, memory_gb_s: 100, efficiency: 0.5}
between: {latency_us: 20, bandwidth_gb_s: 2}
other_hosts:
  - hosts: 1
    device:
      {name: slow, accelerator_type: S1, memory_gib: MEMORY, peak_tflops: {float32: 0.4}, memory_gb_s: 40,
       efficiency: 0.5}
"""


@pytest.mark.parametrize("memory", [4.0, 0.25])
def test_a_cluster_of_two_kinds(files, tmp_path, capsys, memory) -> None:
    """The slow device, and all the more one with little memory, gets fewer layers; the plan names the kinds."""
    job, cluster = files
    cluster.write_text(MIXED.replace("MEMORY", str(memory)))
    asked = ["--set", "parallel.stages=2", "--set", "parallel.schedule=1f1b", "--set", "parallel.auto=true"]
    command = ["autoconfigure", str(job), "--cluster", str(cluster), "--json", "-o", str(tmp_path / "plan.json")]
    assert run([*command, *asked, "--search", "0"]) == 0
    decided = json.loads(capsys.readouterr().out.splitlines()[-1])
    best, first = decided["best"], decided["candidates"][0]
    assert first["fits"]
    assert first["memory_bytes"][1] <= memory * 2**30
    fast, slow = map(len, best["cut"])
    assert slow < fast
    assert best["made_for"]["kinds"] == ["F1", "S1"]
    assert best["made_for"]["hosts"] == [1, 1]
    assert "fast + slow" in decided["notes"][0]
    assert load_plan(tmp_path / "plan.json").made_for.kinds == ("F1", "S1")


def test_what_takes_one_kind_of_device_says_so(files, capsys) -> None:
    job, cluster = files
    cluster.write_text(MIXED.replace("MEMORY", "4"))
    assert run(["autoconfigure", str(job), "--cluster", str(cluster), "--devices", "1"]) == 2
    assert "whose hosts differ" in capsys.readouterr().err
    assert run(["partition", str(job), "--cluster", str(cluster), "--stages", "2"]) == 2
    assert "devices of several kinds" in capsys.readouterr().err


def test_a_plan_is_written_for_another_trainer_and_explained(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cluster = map(str, files)
    asked = ["autoconfigure", job, "--cluster", cluster, "--search", "0"]
    pipeline = ["--set", "parallel.schedule=zb-h1", "--set", "parallel.stages=2"]
    assert run([*asked, *pipeline, "--emit", "megatron"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("# raypipe's nearest layout for Megatron-LM: predicted ")
    assert "--pipeline-model-parallel-size 2" in said.out
    lost = [line for line in said.err.splitlines() if "zb-h1 becomes" in line]
    assert len(lost) == 1
    assert f"# {lost[0]}" in said.out
    file = tmp_path / "layout"
    file.write_text(said.out)
    assert run([*asked, "--from", str(file)]) == 0
    assert f"{file} (Megatron-LM): predicted" in capsys.readouterr().out
    assert run([*asked, "--from", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["from"]
    assert sum(own for own, _ in result["parts"].values()) == pytest.approx(result["step_s"])
    assert run([*asked, *pipeline, "--emit", "torchtitan", "-o", str(tmp_path / "titan.txt"), "--json"]) == 0
    assert "pipeline_parallel_schedule_csv" in (tmp_path / "titan.txt").read_text()
    assert json.loads(capsys.readouterr().out)["best"]["parallel"]["schedule"] == "zb-h1"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--emit", "megatorn"], '"megatorn" is unknown\n  fix: did you mean "megatron"?'),
        (["--emit", "megatron", "--json"], "its file and --json both go to standard output"),
        (["--from", "no-such-file"], "no-such-file: can't be read"),
    ],
)
def test_requests_of_other_trainers_files_that_make_no_sense(
    options: list[str], why: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job, cluster = map(str, files)
    assert run(["autoconfigure", job, "--cluster", cluster, "--search", "0", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_prints_the_best_plan_so_far(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["autoconfigure", ROOT / "jobs/gpt2-1.3b.yaml", "--set", "model.layers=96", "--set", "train.batch=256"]
    words += ["--cluster", ROOT / "cluster/devices/a100.yaml", "--devices", "32", "--budget", "300", "-o", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "raypipe", *map(str, words), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    line = next(line for line in process.stderr if "best" in line)
    assert re.search(r"planning: [\d,]+ candidates left, best .*, at least ", line)
    process.send_signal(number)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "ended early: the best plan so far" in said
    assert "Traceback" not in said
    assert load_plan(out).model_dump(mode="json") == json.loads(printed)["best"]


@pytest.mark.usefixtures("pythons_own_handlers")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_there_is_a_plan_ends_the_command(number, status, files, monkeypatch, capsys) -> None:
    def choose(*words: object, watch: Watch, **more: object) -> None:
        signal.raise_signal(number)
        assert watch.over, (signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr("raypipe.plan.choose.choose", choose)
    job, cluster = files
    assert command(job, "--cluster", cluster) == status
    assert "Traceback" not in capsys.readouterr().err
