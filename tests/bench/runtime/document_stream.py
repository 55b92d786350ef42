"""Documents streamed from Parquet: what training waits for them, what memory they take, and torch's DataLoader beside.

    python -m tests.bench.runtime.document_stream [--gb 0.2] [--steps 60] [--keep FOLDER]

Three parts, over a generated Parquet set of ``--gb``:

1. nearly an epoch through the stream of a run alone, without training: samples per second, and the memory of its
   process and of Ray's object store at each tenth of the epoch;
2. the same epoch through ``torch.utils.data.DataLoader`` with as many workers, reading the same row groups with the
   same library, packing them and shuffling a buffer of as many samples;
3. training steps of a GPT in two stages: the share of the step spent waiting for data.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch

from raypipe.data import prepare_data
from raypipe.data.documents.prepared import PreparedDocuments
from raypipe.job.spec import JobSpec, job_from
from raypipe.models import build_model
from raypipe.models.task import NextToken
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.worker.samples import SampleStream
from tests.bench.command import options
from tests.runtime.runs.small_runs import new_driver, own_workers

SEQUENCE, BATCH, WORKERS = 256, 32, 2
AT_ONCE = 16
"""Steps of samples that one call of the first part asks for."""
WARM = 3
"""Steps at the start that medians leave out."""
MIB = 1 << 20


class MeasuredStream(SampleStream):
    """A stream that tells its memory."""

    def memory_bytes(self) -> int:
        """Return the resident memory of this process."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generate(folder: Path, size: float) -> None:
    """Write Parquet files of about ``size`` bytes of text, in row groups of some MiB."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10))) for _ in range(20_000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(50, 600))) for _ in range(4_000)]
    written = file = 0
    while written < size:
        with pq.ParquetWriter(folder / f"part-{file:04}.parquet", pa.schema([("text", pa.string())])) as out:
            for _ in range(16):
                rows = [f"{draw.getrandbits(64):x} {text}" for text in draw.choices(texts, k=2_000)]
                out.write_table(pa.table({"text": rows}))
                written += sum(map(len, rows))
        file += 1


def job_of(folder: Path, steps: int) -> JobSpec:
    """Return the job of all parts."""
    return job_from(
        {
            "name": "document-stream",
            "model": {"type": "gpt", "layers": 4, "hidden": 128, "heads": 4, "sequence": SEQUENCE},
            "data": {"type": "documents", "path": str(folder), "num_workers": WORKERS},
            "train": {"steps": steps, "batch": BATCH, "eval_batches": 1},
            "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 8},
        }
    )


def stored_bytes() -> float:
    """Return what Ray's object store holds."""
    name = "object_store_memory"
    return float(ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0))


def through_the_stream(run: Path) -> None:
    """Part 1."""
    stream = ray.remote(MeasuredStream).options(num_cpus=0).remote(run, 0, BATCH * AT_ONCE, WORKERS)
    ray.get(stream.begin.remote(0))
    began, held = time.monotonic(), []
    texts = PreparedDocuments.open(run / "data").splits["train"].blocks
    # A little less than an epoch, whose samples are only known when it has been read.
    steps = int(0.95 * sum(part.size for block in texts for part in block) / SEQUENCE) // (BATCH * AT_ONCE)
    rows = list(range(BATCH * AT_ONCE))
    for step in range(steps):
        ray.get(stream.rows.remote("train", step, rows))
        if step % max(1, steps // 10) == 0:
            held.append((ray.get(stream.memory_bytes.remote()) / MIB, stored_bytes() / MIB))
    seconds = time.monotonic() - began
    print(f"stream      {steps * BATCH * AT_ONCE / seconds:10,.0f} samples/s  ({steps * BATCH * AT_ONCE:,} samples)")
    for name, values in (("its process", [own for own, _ in held]), ("object store", [stored for _, stored in held])):
        print(f"memory      {'  '.join(f'{value:.0f}' for value in values)}  MiB of {name}, at each tenth")
    ray.kill(stream)


class Loader(torch.utils.data.IterableDataset[torch.Tensor]):
    """What one writes for torch: row groups by worker, bytes, packed, shuffled in a buffer."""

    def __init__(self, folder: Path, buffer: int) -> None:
        self.files, self.buffer = sorted(folder.glob("*.parquet")), buffer

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield samples."""
        about = torch.utils.data.get_worker_info()
        number, workers = (about.id, about.num_workers) if about is not None else (0, 1)
        groups = [(f, g) for f in self.files for g in range(pq.read_metadata(f).num_row_groups)][number::workers]
        draw = random.Random(number)
        draw.shuffle(groups)
        held: list[np.ndarray] = []
        for file, group in groups:
            texts = pq.ParquetFile(file).read_row_group(group, columns=["text"]).column("text").to_pylist()
            tokens = np.frombuffer(b"\0".join(text.encode() for text in texts) + b"\0", np.uint8)
            for start in range(0, len(tokens) - SEQUENCE, SEQUENCE):
                held.append(tokens[start : start + SEQUENCE + 1])
                if len(held) >= self.buffer:
                    place = draw.randrange(len(held))
                    held[place], held[-1] = held[-1], held[place]
                    yield torch.from_numpy(held.pop().astype(np.int64))
        yield from (torch.from_numpy(one.astype(np.int64)) for one in held)


def through_torch(folder: Path, buffer: int) -> None:
    """Part 2."""
    loader = torch.utils.data.DataLoader(Loader(folder, buffer), batch_size=BATCH, num_workers=WORKERS)
    began = time.monotonic()
    count = sum(len(batch) for batch in loader)
    print(f"DataLoader  {count / (time.monotonic() - began):10,.0f} samples/s  ({count:,} samples)")


def trained(job: JobSpec, run: Path) -> None:
    """Part 3."""
    driver = new_driver(job, run)
    with own_workers(driver) as workers:
        driver.run(workers, None, 0)
    rows = [row for row in read_rows(run / METRICS) if "loss" in row][WARM:]
    waits = [row["data_wait_share"] for row in rows]
    share = sum(wait * row["step_s"] for wait, row in zip(waits, rows, strict=True)) / sum(
        row["step_s"] for row in rows
    )
    step_s = median(row["step_s"] for row in rows)
    print(
        f"training    {BATCH / step_s:10,.0f} samples/s  step {step_s:.3f} s, data wait {share:.2%} of the time, "
        f"{max(waits):.2%} of the worst step"
    )


def main() -> None:
    """Run all parts."""
    given = options(__doc__, gb=0.2, steps=60, keep=Path)
    with tempfile.TemporaryDirectory() as place:
        folder = given.keep or Path(place, "parquet")
        if not folder.is_dir():
            folder.mkdir(parents=True)
            generate(folder, given.gb * 1e9)
        job, run = job_of(folder, given.steps), Path(place, "run")
        began = time.monotonic()
        prepare_data(job, NextToken(), run / "data")
        build_model(job, None)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"prepared    {time.monotonic() - began:.1f} s for {size / 1e9:.2f} GB of files")
        connect(2)
        through_the_stream(run)
        through_torch(folder, 8 * 8 * MIB // SEQUENCE)
        trained(job, run)
        ray.shutdown()


if __name__ == "__main__":
    main()
