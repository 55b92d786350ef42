"""Whole runs over the GPU shim: `raypipe train`, Ray Train and a fake GPU for each worker, under random delays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_shim.shim import lacking, run_case
from tests.gpu_shim.whole_run import Run, train, until

pytestmark = [
    pytest.mark.runs,
    pytest.mark.own_ray,
    pytest.mark.skipif(bool(lacking()), reason=f"the GPU shim is not here: {lacking()}"),
]
STEPS = 4
COPIES = {"schedule": "1f1b", "stages": 2, "replicas": 2, "microbatch": 2}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "1f1b": ({"schedule": "1f1b", "stages": 4, "microbatch": 2}, 4, 4),
    "zb-v": ({"schedule": "zb-v", "stages": 4, "microbatch": 2}, 4, 8),
    "chimera": ({"schedule": "chimera", "stages": 4, "microbatch": 2}, 4, 4),
    "zero3": (COPIES | {"shard": "zero3"}, 4, 4),
    "zb-h1 on 8": ({"schedule": "zb-h1", "stages": 4, "replicas": 2, "microbatch": 1}, 8, 4),
    "tensor-2": ({"schedule": "1f1b", "stages": 2, "tensor": 2, "microbatch": 2}, 4, 4),
    "positions": ({"schedule": "zb-h1", "stages": 2, "tensor": 2, "microbatch": 2, "sequence_parallel": True}, 4, 4),
}
"""What is asked for, on how many GPUs, with how many layers."""


def check_ended(run: Run, devices: int) -> None:
    assert run.status == 0, run.said[-3000:]
    assert run.left == ()
    assert len(run.losses) == STEPS
    (begun,) = {tuple(sorted(device["device"] for device in event["devices"])) for event in run.events("started")}
    assert len(set(begun)) == devices
    assert all(name.startswith("cuda:") for name in begun)


@pytest.mark.parametrize("name", CASES)
def test_a_run_ends_without_a_wait_of_the_host_in_its_steps(name: str, text_folder: Path, tmp_path: Path) -> None:
    parallel, devices, layers = CASES[name]
    run = train(tmp_path, text_folder, parallel, devices, layers=layers, steps=STEPS, clip=1.0)
    check_ended(run, devices)
    assert run.waits, "the shim has counted the waits of the set-up"
    assert run.waits_in_steps() == []


def test_stages_that_share_one_gpu_train_through_pinned_memory(text_folder: Path, tmp_path: Path) -> None:
    """NCCL joins no two of a GPU, so their hosts tell one another the norm, and wait for it."""
    run = train(tmp_path, text_folder, {"schedule": "1f1b", "stages": 2, "microbatch": 2}, 1, steps=STEPS, clip=1.0)
    check_ended(run, 1)
    assert len(run.events("started")[0]["devices"]) == 2


@pytest.mark.parametrize("copies", [2, 1])
def test_a_run_whose_worker_is_killed_goes_on_from_its_checkpoint(
    copies: int, text_folder: Path, tmp_path: Path
) -> None:
    """On GPUs nothing is replaced in place. Kernels take longer here: the worker has steps left when it is killed."""

    def kill(directory: Path) -> None:
        run = Run(0, "", directory, (), (), ())
        until(lambda: len(run.losses) >= 2, 200.0)
        until(lambda: bool(run.events("checkpoint")), 60.0)
        os.kill(run.events("started")[0]["devices"][1]["pid"], signal.SIGKILL)

    run = train(
        tmp_path, text_folder, COPIES | {"replicas": copies}, 2 * copies, kill, steps=STEPS, clip=1.0,
        checkpoint_every=2, message_timeout_s=60.0, settings={"kernel_us": 4000},
    )  # fmt: skip
    check_ended(run, 2 * copies)
    assert len(run.events("restarted")) == 1
    assert not run.events("recovered")


def test_a_process_that_reserves_no_gpu_sees_none() -> None:
    """It would take the first GPU of its node beside the worker that has reserved it."""
    found, _ = run_case("reserves_none")
    assert found == {"device": "cpu", "gpus": 1.0}


@pytest.mark.parametrize(
    ("parallel", "devices", "first"),
    [
        ({"schedule": "zb-h1", "stages": 2, "microbatch": 2}, 2, True),
        ({"schedule": "1f1b", "stages": 2, "microbatch": 2}, 1, False),
        ({"schedule": "1f1b", "stages": 1, "tensor": 2, "microbatch": 2}, 2, True),
    ],
    ids=["zb-h1", "sharing a gpu, beside steps", "tensor 2"],
)
def test_stages_are_compiled_for_gpus_by_processes_of_their_own(
    parallel: dict[str, Any], devices: int, first: bool, text_folder: Path, tmp_path: Path
) -> None:
    """By Inductor and Triton; the workers load them, and step as before, with no process of a compiler left."""
    run = train(
        tmp_path, text_folder, parallel, devices, steps=STEPS if first else 1000, clip=1.0, compile="inductor",
        compile_first=first,
    )  # fmt: skip
    assert run.status == 0, run.said[-3000:]
    assert run.left == ()
    ranks = parallel["stages"] * parallel.get("tensor", 1)
    reasons = [event["reason"] for event in run.events("compiled")]
    assert reasons[:ranks] == [None] * ranks
    # What tensor ranks tell one another before they swap has no values here.
    assert len(reasons) == ranks or "tensor" in parallel
    assert first or run.events("swapped")
