"""Which layouts of a large mixture of experts fit into memory: a sweep by hand that was published, in the same order.

Fine-tuning of tencent/Hy3-preview (295B, 192 experts, 80 layers) by NeMo AutoModel on H100 of 80 GB, in the review of
NVIDIA-NeMo/Automodel#2546: pp4 ep8 on 32 and on 64 devices ran out of memory in the update, pp4 ep16 on 64 did not (its
dispatch timed out), pp8 ep8 on 64 trained. Its bfloat16 states take 8 bytes a parameter, and the update's copy 2 more;
raypipe's nearest are ``bfloat16-true`` with plain SGD, 8 and 4. How long steps took is not published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.job import load_cluster
from raypipe.partition.job_costs import job_profile
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.job_files import minimal_job

H100 = Path(__file__).parents[2] / "cluster/devices/h100.yaml"
BATCH = 256


def predicted(stages: int, experts: int, devices: int, **train: Any) -> Prediction:
    """Predict 1F1B of micro-batches of one sample, recomputed."""
    job = minimal_job({"hf": "hy_v3", "sequence": 256}, **{"batch": BATCH, "dtype": "bfloat16-true", **train})
    profile = job_profile(job, load_cluster(H100).resized(devices), experts)
    grid = Grid(stages, devices // stages, 1, BATCH * stages // devices, experts=experts)
    judge = Predictor(profile, job.train, len(profile.layers))
    return judge.predict(Candidate.on(grid, "1f1b", recompute="full", shard="zero2", update="wait"))


@pytest.mark.exhaustive
def test_a_sweep_of_hy3_fits_where_it_was_published_to() -> None:
    layouts = ((4, 8, 32), (4, 8, 64), (4, 16, 64), (8, 8, 64))
    made = [predicted(*layout, optimizer="sgd") for layout in layouts]
    assert [one.fits for one in made] == [False, False, True, True]
