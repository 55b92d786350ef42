"""The same documents in every format."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["a", "stage", "of", "the", "pipe", "waits", "for", "its", "micro-batch", "ünïcode", "\n"]


def some_documents(count: int, seed: int = 0, most: int = 60) -> list[str]:
    draw = random.Random(seed)

    def word() -> str:
        return draw.choice(WORDS) if draw.random() < 0.5 else f"{draw.getrandbits(48):x}"

    return [" ".join(word() for _ in range(draw.randint(1, most))) for _ in range(count)]


def write_parquet(path: Path, documents: list[str], group: int = 50) -> Path:
    table = pa.table({"id": list(range(len(documents))), "text": documents})
    pq.write_table(table, path, row_group_size=group)
    return path


def write_jsonl(path: Path, documents: list[str]) -> Path:
    lines = (json.dumps({"id": number, "text": text}) for number, text in enumerate(documents))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_hugging_face(path: Path, documents: list[str], group: int = 50) -> Path:
    """What ``Dataset.save_to_disk`` writes: Arrow streams, and a file that names them."""
    path.mkdir()
    table = pa.table({"text": documents})
    half = len(documents) // 2
    for name, part in (("data-00000-of-00002.arrow", table[:half]), ("data-00001-of-00002.arrow", table[half:])):
        with pa.OSFile(str(path / name), "wb") as out, pa.ipc.new_stream(out, part.schema) as stream:
            stream.write_table(part, max_chunksize=group)
    names = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in (0, 1)]
    (path / "state.json").write_text(json.dumps({"_data_files": names}))
    return path


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl, "hugging-face": write_hugging_face}
