"""Training with the batch of N workers on one device is training with that batch; the table is what hybrid reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jobs.digits import Digits, draw
from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.job import JobSpec, job_from
from raypipe.plan.hybrid import compare, load_epochs
from raypipe.profiling.epochs_to_target import Asked, OneDevice, Run, epochs_table, measure_epochs


def job_of(folder: Path, **train: object) -> JobSpec:
    path = folder / "digits.npz"
    if not path.exists():
        np.savez(path, **draw(320))
    settings = {"steps": 9, "batch": 16, "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0, "eval_every": 6,
                "eval_batches": 2, "dtype": "float64"}  # fmt: skip
    return job_from({
        "name": "digits", "model": {"import": "jobs.digits:build", "task": "classification"},
        "data": {"type": "arrays", "path": str(path)}, "train": {**settings, **train},
    })  # fmt: skip


def test_pieces_of_a_batch_train_like_the_whole(tmp_path):
    job = job_of(tmp_path, clip=0.5, momentum=0.9)
    (folder := tmp_path / "data").mkdir()
    device = OneDevice(job, folder)
    assert device.samples == 288
    result = device.train(48, 3, 0.2, 0.0, 1.0, lambda text: None)
    assert (result.epochs, result.steps) == (None, 6)

    stage = device.model.build_stage(range(device.model.count), 3)
    plain = Digits().double()
    plain.load_state_dict({name: p.detach().clone() for name, p in stage.named().items()})
    optimizer = torch.optim.SGD(plain.parameters(), 0.2, momentum=0.9)
    losses = []
    for step in range(6):
        batch = device.data.batch("train", 3, step, 48)
        optimizer.zero_grad()
        F.cross_entropy(plain(batch["image"].double()), batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        if step % 2:  # six batches of 16 are two of 48
            held = [device.data.batch("val", 0, i, 16) for i in range(2)]
            image, labels = (torch.cat([h[name] for h in held]) for name in ("image", "labels"))
            losses.append(F.cross_entropy(plain(image.double()), labels).item())
    assert result.best == pytest.approx(min(losses), abs=1e-9)
    reached = device.train(48, 3, 0.2, losses[1], 1.0, lambda text: None)
    assert reached.epochs == pytest.approx(4 * 48 / 288)


def test_an_interrupted_measurement_goes_on(tmp_path):
    job, log = job_of(tmp_path), tmp_path / "log"
    asked = Asked(2.0, (1, 2), 2, 20.0, "linear")
    said: list[str] = []
    runs = measure_epochs(job, asked, log, said.append)
    assert [(r.workers, r.seed, r.lr) for r in runs] == [(1, 0, 0.1), (1, 1, 0.1), (2, 0, 0.2), (2, 1, 0.2)]
    assert all(r.epochs is not None and r.best_loss <= 2.0 for r in runs)
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # stopped while it wrote
    assert measure_epochs(job, asked, log, said.append) == runs
    assert log.read_text().splitlines() == lines
    with pytest.raises(SpecError, match="another job, target, limit or scaling"):
        measure_epochs(job, asked._replace(target=1.9), log, said.append)
    with pytest.raises(SpecError, match="a step of 320 samples, but there are 288"):
        measure_epochs(job, asked._replace(workers=(20,)), tmp_path / "other", said.append)
    log.write_text("[]\n" + log.read_text())
    with pytest.raises(SpecError, match=r"log:1: is not a run"):
        measure_epochs(job, asked, log, said.append)


def test_workers_that_miss_the_target_are_left_out():
    runs = [
        Run(1, 0, 0.1, 3.0, 9, 1.0),
        Run(1, 1, 0.1, 4.0, 9, 1.0),
        Run(2, 0, 0.1, 4.0, 9, 1.0),
        Run(2, 1, 0.1, None, 9, 2),
    ]
    table = {"mp_speedup": {"2": 1.5}, "epochs": {"1": 3.5}, "lr": {"1": 0.1}, "batch": 16, "target": 1.0}
    assert epochs_table(runs, {2: 1.5}, 16, 1.0) == (table | {"steps_per_epoch": 3.0}, [2])


def test_hybrid_reads_what_epochs_writes(tmp_path, capsys):
    job_of(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({
        "name": "digits", "model": {"import": "jobs.digits:build", "task": "classification"},
        "data": {"type": "arrays", "path": str(tmp_path / "digits.npz")},
        "train": {"steps": 9, "batch": 16, "lr": 0.01, "eval_batches": 2},
    }))  # fmt: skip
    out = tmp_path / "epochs.json"
    asked = [
        "epochs",
        str(tmp_path / "job.yaml"),
        "--target",
        "2",
        "--workers",
        "1,2,4",
        "--seeds",
        "1",
        "-o",
        str(out),
    ]
    assert run([*asked, "--mp-speedup", "2=1.3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["runs"][2]["lr"] == pytest.approx(0.02)  # AdamW: square root of 4
    table = load_epochs(out)
    assert table.epochs == {int(n): e for n, e in printed["epochs"].items()}
    assert (table.batch, table.steps_per_epoch, table.target) == (16, pytest.approx(288 / 16), 2)
    assert [row.devices for row in compare(table).rows] == [1, 2, 4]
    assert run([*asked[:2], *asked[4:]]) == 2
    assert "--target is missing" in capsys.readouterr().err.replace(":", "")
    assert run([*asked, "--target", "-1", "--max-epochs", "0.5"]) == 2  # another target than the log's
    assert "another job, target" in capsys.readouterr().err
    for wrong in (["--workers", "0"], ["--lr-scaling", "linaer"], ["--mp-speedup", "1=2"], ["--max-epochs", "0"]):
        assert run([*asked, *wrong]) == 2
        assert "fix:" in capsys.readouterr().err
