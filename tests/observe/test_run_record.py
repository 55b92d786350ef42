"""The outcome of a run: CONTRACT.md's object, from the logs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.observe.run_log import RunLog, rewind
from raypipe.observe.run_record import WARM_STEPS, Units, summarise, summary_lines

PLAN = {"schedule": "1f1b", "stages": 2, "replicas": 1, "microbatch": 4}
COUNTS = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1, "p2p": 16}
KEYS = {
    "steps", "loss", "val_loss", "losses", "step_s_median", "tokens_per_s", "plan", "predicted_step_s",
    "measured_step_s", "resumed_from", "counts", "recoveries",
}  # fmt: skip


def step(log: RunLog, number: int, step_s: float = 0.1) -> None:
    log.metric(
        {
            "step": number, "loss": 5.0 - number / 10, "grad_norm": 1.0, "lr": 0.1, "step_s": step_s,
            "tokens_per_s": 100 / step_s, "bubble_ratio": 0.2,
        }
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path):
    return RunLog(tmp_path)


def test_a_whole_run(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    for number in range(1, 8):
        step(log, number, step_s=9.0 if number <= WARM_STEPS else 0.1)
    log.event("predicted", step=7, step_s=0.09, bubble_ratio=0.18)
    log.metric({"step": 5, "val_loss": 4.0})
    log.metric({"step": 7, "val_loss": 3.5})
    log.event("finished", counts=COUNTS, memory_bytes=[1])
    result = summarise(tmp_path, PLAN)
    assert result.keys() >= KEYS
    assert result["steps"] == 7
    assert result["losses"] == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3])
    assert result["loss"] == result["losses"][-1]
    assert result["val_loss"] == 3.5
    assert result["step_s_median"] == result["measured_step_s"] == 0.1  # the first, slow steps count for nothing
    assert result["tokens_per_s"] == pytest.approx(1000)
    assert result["predicted_step_s"] == 0.09
    assert result["plan"] == PLAN
    assert result["counts"] == COUNTS
    assert (result["resumed_from"], result["recoveries"]) == (None, 0)
    assert summary_lines(result) == [
        "1f1b, 2 stages x 1 replicas, micro-batches of 4: 7 steps",
        "training loss    4.3000",
        "validation loss  3.5000 nats per token",
        "tokens per s     1,000",
        "step measured    0.1000 s (median), 20.0% idle",
        "step predicted   0.0900 s (-10.0%), from task times at the start",
        f"run directory    {tmp_path}",
    ]


def test_figures_are_said_in_the_units_of_the_task(log, tmp_path) -> None:
    step(log, 1)
    log.metric({"step": 1, "val_loss": 0.5})
    result = summarise(tmp_path, PLAN, units=Units("nats per label", "samples"))
    assert (result["loss_unit"], result["throughput_unit"]) == ("nats per label", "samples")
    assert {"validation loss  0.5000 nats per label", "samples per s    1,000"} <= set(summary_lines(result))


def test_shared_cores_are_told_beside_the_prediction_that_they_spoil(log, tmp_path) -> None:
    def cores(devices: int, waited: float | None) -> list[str]:
        log.event("run", resume=False, devices=devices, cores=2)
        result = summarise(tmp_path, PLAN) | {"core_wait": waited}
        return [line for line in summary_lines(result) if line.startswith("cores")]

    step(log, 1)
    assert cores(2, None) == cores(2, 0.05) == []
    assert cores(2, 0.4) == ["cores            other processes used them: a device waited for one 40% of the time"]
    assert cores(4, 0.5) == ["cores            4 devices shared 2: a device waited for one 50% of the time"]
    assert cores(4, None) == ["cores            4 devices shared 2"]


def test_what_the_plan_promised_is_what_was_predicted(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    for number in range(1, 8):
        step(log, number)
    log.event("predicted", step=7, step_s=0.09, bubble_ratio=0.18)
    result = summarise(tmp_path, PLAN, 0.08, "A100")
    assert (result["predicted_step_s"], result["calibrated_step_s"]) == (0.08, 0.09)
    lines = summary_lines(result)
    assert "step planned     0.0800 s (-20.0%), for A100" in lines
    assert "step predicted   0.0900 s (-10.0%), from task times at the start" in lines


def test_what_became_of_the_planners_choice(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    best = PLAN | {"predicted_step_s": 0.09, "bubble_ratio": 0.2, "why": "fastest", "fits": True}
    other = best | {"schedule": "zb-h1", "predicted_step_s": 0.1, "why": "11 % slower"}
    log.event("planned", candidates=[best, other | {"fits": False}, other], searched=30, timed=9, seconds=0.1)
    for number in range(1, 8):
        step(log, number)  # computes for four fifths of 0.1 s
    line = next(line for line in summary_lines(summarise(tmp_path, PLAN)) if line.startswith("step planned"))
    assert line == (
        "step planned     0.0900 s (-10.0%; compute only -10.0%), the best of 30 candidates; "
        "next: zb-h1, 2 x 1, micro-batches of 4, 11 % slower"
    )


def test_a_resumed_run_counts_all_its_steps_but_times_no_warm_up(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    for number in range(1, 11):
        step(log, number, 9.0 if number <= WARM_STEPS else 0.1)
    log.event("finished", counts=COUNTS, memory_bytes=[])
    log.event("run", resume=True)
    log.event("started", devices=[], resumed_from=10)
    for number in range(11, 21):
        step(log, number, 9.0 if number <= 10 + WARM_STEPS else 0.1)
    log.event("finished", counts=COUNTS | {"p2p": 8}, memory_bytes=[])
    result = summarise(tmp_path, PLAN)
    assert result["steps"] == len(result["losses"]) == 20
    assert result["resumed_from"] == 10
    assert result["recoveries"] == 0
    assert result["step_s_median"] == 0.1
    assert max(result["losses"]) == pytest.approx(4.9)
    assert result["counts"]["p2p"] == 8  # of the run that ended last


def test_a_restart_is_a_recovery_and_its_steps_count_once(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[{"node": "a", "pid": 7}, {"node": "b", "pid": 8}], resumed_from=None)
    for number in range(1, 9):
        step(log, number)
    log.event("failed", message="stage 1 died")
    lost = rewind(tmp_path, 5)
    again = RunLog(tmp_path)
    again.event("restarted", checkpoint="step-00000005", step=5, steps_repeated=lost)
    again.event("started", devices=[{"node": "a", "pid": 7}, {"node": "b", "pid": 9}], resumed_from=5)
    for number in range(6, 11):
        step(again, number)
    again.event("finished", counts=COUNTS, memory_bytes=[])
    result = summarise(tmp_path, PLAN)
    assert result["steps"] == len(result["losses"]) == 10
    assert result["recoveries"] == 1
    assert result["resumed_from"] is None  # nobody asked to resume
    assert "recoveries       1" in summary_lines(result)
    (recovery,) = result["recovery"]
    assert 0 <= recovery.pop("seconds") < 60
    assert recovery == {"step": 5, "kind": "checkpoint", "steps_repeated": 3, "replaced": [1]}


def test_a_replaced_worker_is_a_recovery_in_place(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    for number in range(1, 5):
        step(log, number)
        if number < 3:
            log.event(
                "recovered", step=number, ranks=[number], devices=["stage 0"], seconds=float(number),
                steps_repeated=number - 1,
            )  # fmt: skip
    result = summarise(tmp_path, PLAN)
    assert result["recoveries"] == 2
    assert result["recovery"] == [
        {"step": n, "kind": "replica", "seconds": float(n), "steps_repeated": n - 1, "replaced": [n]} for n in (1, 2)
    ]
    assert "recoveries       2, 2 of them in place, 1.5 s each (median), 1 step repeated" in summary_lines(result)


def test_recoveries_of_an_earlier_run_are_its_own(log, tmp_path) -> None:
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    log.event("restarted", checkpoint=None)
    log.event("started", devices=[], resumed_from=None)
    log.event("predicted", step=7, step_s=0.5, bubble_ratio=0.1)
    log.event("run", resume=True)
    log.event("started", devices=[], resumed_from=4)
    step(log, 5)
    result = summarise(tmp_path, PLAN)
    assert (result["recoveries"], result["resumed_from"]) == (0, 4)
    assert result["predicted_step_s"] is None
    assert result["counts"] is None


def test_what_does_not_exist_is_none(tmp_path) -> None:
    result = summarise(tmp_path, PLAN)
    assert result.keys() >= KEYS
    assert (result["steps"], result["losses"]) == (0, [])
    for key in ("loss", "val_loss", "step_s_median", "tokens_per_s", "predicted_step_s", "counts", "resumed_from"):
        assert result[key] is None


def test_a_run_of_warm_up_steps_alone_is_timed_all_the_same(log, tmp_path) -> None:
    log.event("started", devices=[], resumed_from=None)
    step(log, 1, 0.4)
    result = summarise(tmp_path, PLAN)
    assert result["step_s_median"] == 0.4
    lines = summary_lines(result)
    assert not any("predicted" in line or "validation" in line for line in lines)


def test_saves_and_numbers_that_are_not_finite_are_counted(log, tmp_path) -> None:
    log.event("run", resume=False)
    result = summarise(tmp_path, PLAN)
    assert (result["skipped_steps"], result["rewinds"], result["checkpoint_stall_s"]) == (0, 0, None)
    for number in (3, 4, 4):  # a restart skips one again
        log.event("skipped", step=number, message="the training loss is nan")
    log.event("rewound", step=2, from_step=5, left_out=3, message="the training loss is nan")
    for stall_s in (0.1, 0.3, 0.2):
        log.event("checkpoint", step=1, path="x", best=False, stall_s=stall_s, write_s=2.0)
    step(log, 1)
    result = summarise(tmp_path, PLAN)
    assert (result["skipped_steps"], result["rewinds"], result["checkpoint_stall_s"]) == (2, 1, 0.2)
    lines = summary_lines(result)
    assert "steps skipped    2: a loss or a gradient was not finite" in lines
    assert "rewinds          1: a loss or a gradient was not finite" in lines
