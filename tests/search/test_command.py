"""``raypipe schedule auto``."""

import json

import pytest

from raypipe.schedule.forms.json_form import from_json
from raypipe.schedule.verify import verify


def test_json_carries_the_proof(command):
    status, out, _ = command(
        "schedule", "auto", "--devices", 4, "--microbatches", 8, "--forward", 10, "--input-grad", 12,
        "--weight-grad", 8, "--comm", 1, "--memory-limit", 4, "--json",
    )  # fmt: skip
    result = json.loads(out.splitlines()[-1])
    assert status == 0
    assert result["makespan"] == result["lower_bound"] == 294
    assert result["gap"] == 0
    assert result["search_seconds"] >= 0
    assert (result["name"], result["objective"]) == ("auto", "makespan")
    schedule, costs = from_json(result)
    verify(schedule, 4)
    assert costs.comm == 1


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        (["--placement", "ring"], [[0, 1, 0, 1]]),
        (["--placement", "v", "--chunks", "3"], [[0, 1, 1, 0, 0, 1]]),
        (["--placement", "bidirectional", "--backward", "joint"], [[0, 1], [1, 0]]),
    ],
)
def test_placements(command, options, placement):
    status, out, _ = command(
        "schedule", "auto", "--devices", 2, "--microbatches", 3, "--budget", 0.2, *options, "--json"
    )
    result = json.loads(out)
    assert status == 0
    assert result["placement"] == placement
    assert ("BW" in {t["kind"] for row in result["orders"] for t in row}) == ("joint" in options)


def test_says_the_proof_in_words(command):
    out = command("schedule", "auto", "--devices", 4, "--microbatches", 8, "--objective", "period")[1]
    assert "auto: period 24, bound 24, proven shortest" in out


def test_costs_per_stage_and_comparison(command):
    out = command("schedule", "auto,1f1b", "--compare", "--devices", 2, "--forward", "1,2", "--json")[1]
    first, second = json.loads(out)["schedules"]
    assert first["makespan"] <= second["makespan"]
    assert first["durations"]["F"] == [1, 2]


def test_merak_is_found_from_the_command_line(command):
    """F = R = 1, BW = 2, one activation a device: 4N + 3(D - 2), the last stage keeping its activations."""
    words = ["--devices", 4, "--microbatches", 8, "--recompute", 1, "--memory-limit", 1, "--backward", "joint"]
    result = json.loads(command("schedule", "auto", *words, "--json")[1])
    assert result["makespan"] == result["lower_bound"] == 4 * 8 + 3 * 2
    assert result["recompute_stages"] == [0, 1, 2]
    merak = json.loads(command("schedule", "shifted-critical-path", *words[:8], "--json")[1])
    assert merak["makespan"] == result["makespan"]
    assert "recomputed stages: 0, 1, 2" in command("schedule", "auto", *words)[1]


@pytest.mark.parametrize(("which", "stages"), [("none", []), ("all", [0, 1, 2]), ("1,2", [1, 2])])
def test_stages_that_recompute(command, which, stages):
    words = ["--devices", 3, "--microbatches", 4, "--recompute", 1, "--memory-limit", 3, "--budget", 0.2]
    result = json.loads(command("schedule", "auto", *words, "--recompute-stages", which, "--json")[1])
    assert result["recompute_stages"] == stages
    assert {t["stage"] for row in result["orders"] for t in row if t["kind"] == "R"} == set(stages)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["1f1b", "--budget", "2"], "applies to auto only"),
        (["auto", "--budget", "soon"], '"soon" is not a number'),
        (["auto", "--budget", "0"], "give seconds above 0"),
        (["auto", "--placement", "vee"], "--placement"),
        (["auto", "--objective", "makspan"], 'did you mean "makespan"'),
        (["auto", "--backward", "both"], "known: joint, split"),
        (["auto", "--unit", "2"], "auto has no use for unit = 2"),
        (["auto", "--recompute-stages", "4"], "stage 4 does not exist"),
        (["auto", "--recompute-stages", "some"], '"some" is unknown'),
        (["1f1b", "--recompute-stages", "all"], "applies to auto only"),
        (["auto", "--memory-limit", "0.5"], "--memory-limit"),
    ],
)
def test_wrong_requests(command, options, said):
    status, out, err = command("schedule", *options)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
