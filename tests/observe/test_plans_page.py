"""Plans compared as one page: its numbers are those of the decision and of its simulation."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path

import pytest

from raypipe.cli import run as command
from raypipe.job import load_cluster, load_job
from raypipe.observe.pages import TITLES, plans_page
from raypipe.observe.plan_table import timeline_of
from raypipe.observe.tables import seconds
from raypipe.partition.job_costs import job_profile
from raypipe.plan.choose import Decision, choose
from raypipe.plan.decision_json import closed_seconds
from tests.observe.html_page import Page

ROOT = Path(__file__).parents[2]
JOB, CLUSTER = ROOT / "jobs" / "gpt2-1.3b.yaml", ROOT / "cluster" / "devices" / "p100.yaml"


@pytest.fixture(scope="module")
def decision() -> Decision:
    keys = ["schedule=1f1b", "stages=8", "recompute=full", "vocabulary=whole"]
    job = load_job(JOB, [f"parallel.{key}" for key in keys])
    return choose(job, job_profile(job, load_cluster(CLUSTER).resized(8)), top=4)


def test_the_page_says_what_the_planner_found(decision: Decision) -> None:
    text = plans_page(decision, "<script>")
    page = Page(text)
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert page.texts("h2") == list(TITLES)
    cells = page.texts("td")
    for row in decision.rows:
        assert seconds(row.prediction.step_s) in cells
        assert row.why in cells
    p = decision.best
    assert f"{p.candidate.stages} stages" in text
    assert sum(cell.startswith("device ") for cell in cells) == 2 * p.candidate.stages  # memory, links


def test_a_step_without_messages_is_simulated(decision: Decision) -> None:
    p = decision.best
    free = timeline_of(dataclasses.replace(p, costs=dataclasses.replace(p.costs, comm=0.0))).makespan
    own = timeline_of(p).makespan
    cells = Page(plans_page(decision, "job")).texts("td")
    at = cells.index("messages take no time")
    assert cells[at + 1 : at + 3] == [seconds(free), f"{1 - free / own:.1%}"]
    assert free < own


def test_every_device_computes_its_share(decision: Decision) -> None:
    p = decision.best
    step, costs = timeline_of(p), p.costs
    cells = Page(plans_page(decision, "job")).texts("td")
    at = len(cells) - 1 - cells[::-1].index("device 0")
    work = p.candidate.microbatches * (
        costs.forward[0] + costs.input_grad[0] + costs.weight_grad[0] + costs.recompute[0]
    )
    assert cells[at + 1] == f"{(work + costs.update[0]) / step.makespan:.1%}"


@pytest.mark.parametrize("shard", ["none", "zero3"])
def test_stages_without_a_trained_weight_have_no_backward(shard: str) -> None:
    """The first ones of eight: what is drawn is what the plan runs."""
    keys = ["schedule=1f1b", "stages=8", "replicas=2", "recompute=none", "vocabulary=whole", f"shard={shard}"]
    job = load_job(JOB, [f"parallel.{key}" for key in keys])
    whole = job_profile(job, load_cluster(CLUSTER).resized(16))
    untrained = {"trained_parameters": 0}
    layers = tuple(x.model_copy(update=untrained) if n < 26 else x for n, x in enumerate(whole.layers))
    found = choose(job, whole.model_copy(update={"layers": layers, "trained_tied_parameters": 0}), top=1)
    p, drawn = found.best, timeline_of(found.best)
    tasks = [[span.task for span in row if span.task.mbs] for row in drawn.spans]
    assert p.frozen
    assert {task.kind for task in chain(*tasks) if task.stage in p.frozen} == {"F"}
    assert tasks == [[task for task in row if task.mbs] for row in found.plan.one_copy().orders]
    assert closed_seconds(p) is None


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plans.html"
    given = ["--cluster", str(CLUSTER), "--devices", "4", "--budget", "1", "--search", "0"]
    assert command(["autoconfigure", str(ROOT / "jobs" / "quickstart.yaml"), *given, "--html", str(file)]) == 0
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert f"wrote {file}" in capsys.readouterr().err
