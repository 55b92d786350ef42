"""Where devices run behind their hosts, a step's result is asked for when the next step has been queued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.runtime.group.worker_group import WorkerGroup
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job


def with_late_results(workers: WorkerGroup) -> WorkerGroup:
    """The same workers, which the run takes for GPUs: ``run_step`` returns nothing, ``result`` does."""
    locations = [replace(at, peer=replace(at.peer, device=f"gpu {at.peer.rank}")) for at in workers.locations]
    return replace(workers, locations=locations)


@pytest.mark.runs
@pytest.mark.parametrize("parallel", [*exhaustive({"stages": 1}), {"stages": 1, "replicas": 2}], ids=str)
def test_late_results_are_the_same(parallel, stage_pool, text_folder, tmp_path) -> None:
    """Losses, norms, validations and checkpoints, with steps between them that are still unread."""
    # No messages: the channels of what is taken for a GPU would need one.
    job = small_job(text_folder, parallel, steps=7, batch=8, clip=0.5, eval_every=3, checkpoint_every=2)
    at_once = drive(job, stage_pool, tmp_path / "at-once")
    late = drive(job, lambda n: with_late_results(stage_pool(n)), tmp_path / "late")
    assert late.losses == at_once.losses
    assert late.val_losses == at_once.val_losses
    assert [row.get("grad_norm") for row in late.rows] == [row.get("grad_norm") for row in at_once.rows]
    assert late.checkpoints.keys() == at_once.checkpoints.keys()
