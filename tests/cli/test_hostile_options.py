"""Options that nothing could carry out are refused at once, each by one message."""

from __future__ import annotations

import pytest

from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.job.cluster import GIVEN, peak_flops_s
from raypipe.runtime.cluster.connect import _check_reachable
from raypipe.runtime.run_metrics import RAYS_INTERVAL, USUAL_INTERVAL_S, export_interval_s

EPOCHS, JOB, LONG = "jobs/epochs-inception-v3.yaml", "jobs/quickstart.yaml", "x" * 5000
REQUESTS = [
    (["schedule", "1f1b", "--forward", "1e308"], "--forward: 1e+308 is too long"),
    (["schedule", "--load", "/dev/zero"], "not a regular file"),
    (["schedule", "--load", LONG], "File name too long"),
    (["schedule", "1f1b", "--zero", "3", "--ahead", "9" * 4000], "--ahead: 9"),
    (["schedule", "1f1b", "--devices", "9" * 5000], "is not a whole number"),
    (["emulate", "1f1b", "--forward", "1e12"], "steps: 5 steps would take longer than 86400 s"),
    (["emulate", "1f1b", "--innermost", "replicas"], "--per-host"),
    (["emulate", "1f1b", "--per-host", "2", "--innermost", "copies"], "is unknown"),
    (["emulate", "1f1b", "--message-mb", "1e308", "--bandwidth", "1"], "would take longer"),
    (["emulate", "1f1b", "--replicas", "9" * 30], "would need as many processes"),
    (["emulate", "1f1b", "--devices", "\u00b2"], "is not a whole number"),
    (["hybrid", EPOCHS, "--devices", "1" + "0" * 400], "use at most 100000"),
    (["epochs", JOB, "--target", "1", "-o", "x.json", "--workers", "9" * 30], "use at most 100000"),
    (["autoconfigure", JOB, "--cluster", "a100", "--devices", "9" * 30], "use at most 100000"),
    (["sample", LONG], "File name too long"),
    (["report", LONG], "File name too long"),
    (
        ["autoconfigure", JOB, "--cluster", "a100", "--set", "parallel=auto", "--set", f"train.batch={2**53}"],
        "train.batch",
    ),
    (["train", JOB, "--set", "train.standby=1e6"], "train.standby"),
    (["train", JOB, "--set", "train.eval_batches=1000000000"], "train.eval_batches"),
    (["train", JOB, "--set", "name=" + "a" * 300], "name"),
]


@pytest.mark.parametrize(("argv", "words"), REQUESTS, ids=[" ".join(argv)[:50] for argv, _ in REQUESTS])
def test_one_message(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "\n  fix: " in said
    assert len(said) < 1000 or LONG in argv


@pytest.mark.parametrize("peak", ["x", "nan", "inf", "-1", "0", "1e400", ""])
def test_a_peak_that_is_none(peak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GIVEN, peak)
    if not peak:
        assert peak_flops_s("no such device", "float32") is None
        return
    with pytest.raises(SpecError, match="is not a peak"):
        peak_flops_s("no such device", "float32")


@pytest.mark.parametrize("interval", ["x", "nan", "inf", "-1"])
def test_an_interval_that_is_none(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAYS_INTERVAL, interval)
    assert export_interval_s() == USUAL_INTERVAL_S


@pytest.mark.parametrize("address", ["127.0.0.1:\u00b2", "127.0.0.1:99999", "..:1", "ray://:1", "a" * 300 + ":6379"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(SpecError, match="RAY_ADDRESS"):
        _check_reachable(address)
