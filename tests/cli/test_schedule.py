import json
import subprocess
import sys

import pytest

from raypipe.cli._shared.options import optional_value
from raypipe.schedule import SCHEDULES
from raypipe.schedule.forms.json_form import from_json
from raypipe.schedule.forms.text import from_text


def test_draws_in_the_terminal(command):
    status, out, err = command("schedule", "1f1b", "--devices", 2, "--microbatches", 2)
    assert (status, err) == (0, "")
    assert out.startswith("device 0  01..aa.bb\ndevice 1  .0aa1bb..\n1f1b: makespan 9, bubble 33.3 %")


def test_json_is_one_object_and_nothing_else(command):
    status, out, _ = command("schedule", "1f1b", "--devices", 4, "--microbatches", 4, "--json")
    result = json.loads(out)
    assert status == 0
    assert (result["makespan"], result["peak_activations"], result["weight_versions"]) == (
        21,
        [4, 3, 2, 1],
        [1, 1, 1, 1],
    )
    assert result["bubble_ratio"] == pytest.approx(3 / 7)
    assert result["span"] == [21, 18, 15, 12]
    assert (result["period"], result["lower_bound"]) == (21, 15)
    assert (result["critical_forwards"], result["critical_backwards"]) == (7, 7)
    assert result["critical_path"][:5] == ["0F0", "1F0", "2F0", "3F0", "3BW0"]
    assert result["orders"][3][0] == {"kind": "F", "stage": 3, "mb": 0, "replica": 0, "start": 3.0, "end": 4.0}
    assert from_json(result)[0].orders[0][0].kind == "F"


def test_a_file_whose_stages_make_no_chain_is_timed(command, tmp_path):
    """Stage 2 needs the outputs of stages 0 and 1, which run side by side; stage 0's gradient waits for both others."""
    path = tmp_path / "dag.txt"
    path.write_text(
        "microbatches 1\nplacement 0 1 2\nedges 0>2 1>2\ndevice 0: 0F0 0BW0\ndevice 1: 1F0 1BW0\ndevice 2: 2F0 2BW0\n"
    )
    status, out, err = command("schedule", "--load", path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["makespan"] == 2 * (1 + 2)  # a chain of three would take 9


@pytest.mark.parametrize("place", ["before", "after", "equals"])
def test_json_takes_an_optional_file(command, tmp_path, place):
    path = tmp_path / "out"
    words = {
        "before": ["--json", path, "gpipe"],
        "after": ["gpipe", "--json", path],
        "equals": [f"--json={path}", "gpipe"],
    }
    status, out, err = command("schedule", *words[place])
    assert (status, err) == (0, f"wrote {path}\n")
    assert json.loads(path.read_text()) == json.loads(out)


def test_json_may_stand_before_the_name_or_another_option(command):
    assert json.loads(command("schedule", "--json", "gpipe", "--devices", "2")[1])["name"] == "gpipe"
    assert json.loads(command("schedule", "gpipe", "--json", "--devices", "2")[1])["placement"] == [[0, 1]]
    assert optional_value(["--json", "--", "--json"], "--json", []) == ["--json=-", "--", "--json"]


def test_costs_one_value_per_stage(command):
    result = json.loads(command("schedule", "gpipe", "--devices", 2, "--forward", "1,2.5", "--comm", 0.5, "--json")[1])
    assert result["durations"] == {"F": [1, 2.5], "B": 1, "W": 1, "BW": 2, "R": 0}
    assert result["comm"] == 0.5


@pytest.mark.parametrize(("given", "said"), [("1,4,2,9", [1, 4, 2, 9]), ("1,4,2", [1, 4, 2, 2]), ("3,3,3", 3)])
def test_latency_per_link(command, tmp_path, given, said):
    """One micro-batch: down three links and up again, F and BW on each of four devices."""
    path = tmp_path / "links.json"
    result = json.loads(command("schedule", "1f1b", "--microbatches", 1, "--comm", given, "--json", path)[1])
    links = said[:3] if isinstance(said, list) else [said] * 3
    assert result["comm"] == said
    assert result["makespan"] == 4 * (1 + 2) + 2 * sum(links)
    assert json.loads(command("schedule", "--load", path, "--json")[1]) == result


@pytest.mark.slow
def test_loads_what_it_wrote(command, tmp_path):
    as_text, as_json = tmp_path / "a.txt", tmp_path / "a.json"
    command("schedule", "chimera", "--forward", 2, "--comm", 1, "--text", as_text, "--json", as_json)
    original = json.loads(as_json.read_text())
    assert json.loads(command("schedule", "--load", as_json, "--json")[1]) == original
    assert json.loads(command("schedule", "--load", as_text, "--forward", 2, "--comm", 1, "--json")[1]) == original
    assert json.loads(command("schedule", "--load", as_json, "--comm", 0, "--json")[1])["comm"] == 0


def test_text_form_on_standard_output(command):
    out = command("schedule", "1f1b", "--devices", 2, "--text")[1]
    assert from_text(out).placement == ((0, 1),)


def test_writes_pictures_trace_and_csv(command, tmp_path):
    files = {option: tmp_path / f"x{end}" for option, end in
             [("--plot", ".svg"), ("--memory-plot", ".png"), ("--trace", ".json"), ("--csv", ".csv")]}  # fmt: skip
    status, out, err = command("schedule", "1f1b", *(word for pair in files.items() for word in pair))
    assert (status, out) == (0, "")
    assert all(str(path) in err and path.stat().st_size > 200 for path in files.values())
    assert files["--csv"].read_text().splitlines()[3].startswith("3F0,3B0,3F1")


def test_compares_on_equal_terms(command):
    words = ["schedule", "--compare", "1f1b", "interleaved-1f1b", "chimera", "--chunks", 2]
    result = json.loads(command(*words, "--json")[1])["schedules"]
    assert [s["name"] for s in result] == ["1f1b", "interleaved-1f1b", "chimera"]
    assert [s["makespan"] for s in result] == [33, 28.5, 30]
    assert [s["durations"]["F"] for s in result] == [1, 0.5, 1]
    drawn = command(*words)[1]
    assert drawn.count("device 0") == 3
    assert drawn.count("digit") == 1


def test_compare_takes_one_value_per_schedule(command):
    result = json.loads(command("schedule", "--compare", "1f1b,1f1b", "--microbatches", "4,8", "--json")[1])
    assert [s["makespan"] for s in result["schedules"]] == [21, 33]


def test_list_names_every_schedule(command):
    lines = command("schedule", "--list")[1].splitlines()
    assert [line.split()[0] for line in lines] == [*SCHEDULES, "auto"]
    assert json.loads(command("schedule", "--list", "--json")[1]).keys() == {*SCHEDULES, "auto"}


WRONG = {
    "no name": ([], "no schedule is named"),
    "misspelt name": (["chimerra"], 'did you mean "chimera"'),
    "misspelt option": (["1f1b", "--microbatchs", "4"], 'did you mean "--microbatches"'),
    "two names": (["1f1b", "gpipe"], "add --compare"),
    "odd chimera": (["chimera", "--devices", "3"], "even number"),
    "no devices": (["1f1b", "--devices", "0"], "--devices: 0 is not a count"),
    "not a number": (["1f1b", "--devices", "four"], '--devices: "four" is not a whole number'),
    "more than a machine holds": (["1f1b", "--devices", "99999999999"], "--devices: 799999999992 times"),
    "misspelt auto": (["aut"], 'did you mean "auto"'),
    "negative cost": (["1f1b", "--forward", "-1"], "--forward: -1 is not a valid time"),
    "infinite cost": (["1f1b", "--comm", "nan"], "--comm: nan is not a valid time"),
    "wrong length": (["1f1b", "--forward", "1,2"], "2 values for 4 stages"),
    "too many links": (["1f1b", "--comm", "1,2,3,4,5"], "5 values for 4 stages"),
    "negative link": (["1f1b", "--comm", "1,-2,3"], "--comm: -2 is not a valid time"),
    "memory limit": (["gpipe", "--memory-limit", "3"], "the limit is 3"),
    "useless option": (["1f1b", "--chunks", "2"], "--chunks: 1f1b has no use"),
    "unknown concat": (["chimera", "--concat", "dubling"], 'did you mean "doubling"'),
    "no value": (["1f1b", "--devices"], "requires an argument"),
    "picture format": (["1f1b", "--plot", "a.gif"], '--plot: "a.gif" has no suffix of a picture format'),
    "csv of chimera": (["chimera", "--csv", "a.csv"], "torch supports one"),
    "csv of two": (["--compare", "1f1b", "gpipe", "--csv", "a.csv"], "writes one schedule, but 2 are named"),
    "no such file": (["--load", "none.json"], "No such file"),
    "unwritable": (["1f1b", "--json", "none/a.json"], "no such folder"),
    "two forms at once": (["1f1b", "--json", "--text"], "--json already writes to standard output"),
    "several shapes": (["1f1b", "--devices", "2,4"], "2 values for 1 schedule"),
}


@pytest.mark.parametrize(("words", "why"), WRONG.values(), ids=WRONG)
def test_wrong_requests_end_with_2_and_one_message(command, monkeypatch, tmp_path, words, why):
    monkeypatch.chdir(tmp_path)
    status, out, err = command("schedule", *words)
    assert (status, out) == (2, "")
    assert why in err
    assert "fix: " in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("device 0: 0F0\ndevice 1: 1F0 1BW0", "0"),
        ("device 0: 0F0 0F0 0BW0\ndevice 1: 1F0 1BW0", "repeats the work"),
        ("device 0: 0BW0 0F0\ndevice 1: 1F0 1BW0", "can never run"),
    ],
)
def test_a_loaded_schedule_that_cannot_run_is_refused(command, tmp_path, text, why):
    (tmp_path / "mine.txt").write_text(text)
    status, out, err = command("schedule", "--load", tmp_path / "mine.txt")
    assert (status, out) == (2, "")
    assert why in err
    assert "device 0: " in err


@pytest.mark.slow
def test_both_commands_are_the_same_and_import_nothing_heavy():
    program = (
        "import sys; from raypipe.cli import run; status = run(['schedule', '1f1b', '--json']); "
        "sys.exit(status or sorted({'torch', 'ray', 'matplotlib', 'numpy'} & set(sys.modules)) or None)"
    )
    light = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    module = subprocess.run(
        [sys.executable, "-m", "raypipe", "schedule", "1f1b", "--json"], capture_output=True, text=True, check=False
    )
    assert (light.returncode, module.returncode) == (0, 0), light.stderr
    assert light.stdout == module.stdout


def test_zero_shards_the_schedule(command):
    """FS-ZeroPP: 2V - 1 gathers a unit, here 3 in each of two; the text form is read back and verified."""
    shape = ("zeropp", "--devices", 2, "--microbatches", 4, "--chunks", 2, "--unit", 2)
    status, out, _ = command("schedule", *shape, "--zero", 3, "--gather-time", 2, "--reduce-scatter-time", 1, "--json")
    result = json.loads(out)
    assert (status, result["zero"], result["durations"]["AG"], result["durations"]["RS"]) == (0, [3] * 4, 2, 1)
    assert [sum(task["kind"] == "AG" for task in order) for order in result["orders"]] == [6, 6]
    plain = json.loads(command("schedule", *shape, "--json")[1])
    assert result["makespan"] > plain["makespan"]
    assert command("schedule", "1f1b", "--zero", "3,2,1,0", "--gather", "microbatch")[0] == 0


def test_zero_is_checked(command):
    for words, said in (
        (("--gather", "step"), "--gather: applies to --zero only"),
        (("--zero", "4"), "--zero: 4 for 4 stages"),
        (("--zero", "3", "--gather", "often"), '--gather: "often" is unknown'),
        (("--zero", "3", "--ahead", "-1"), "--ahead: -1 tasks"),
    ):
        status, _, err = command("schedule", "1f1b", *words)
        assert (status, err.startswith(said)) == (2, True), err
    status, _, err = command("schedule", "pipedream", "--zero", 3)
    assert (status, "older versions" in err) == (2, True)
