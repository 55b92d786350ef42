"""A node says that it has GPUs, and torch there sees none: the run is refused, and does not train on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.job_files import write_job
from tests.ray_environment import forking, without_ray
from tests.ray_head import ray_head

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_a_run_whose_workers_have_reserved_gpus_and_see_none_is_refused(text_folder: Path, tmp_path: Path) -> None:
    """Each worker has the GPU that Ray gave it: what hides GPUs from the driver does not hide them from its workers."""
    job = write_job(tmp_path / "job.yaml", text_folder, steps=2, eval_batches=1)
    with ray_head(2, ["--num-gpus=2"], **forking()) as head:
        done = subprocess.run(
            [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(tmp_path / "run")],
            capture_output=True, text=True, timeout=300, env=without_ray(RAY_ADDRESS=head.address, **head.token),
        )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "has reserved a GPU and sees none: torch is built for CPUs" in done.stderr
    assert any(f"CUDA_VISIBLE_DEVICES={n}\n" in done.stderr for n in (0, 1)), done.stderr
