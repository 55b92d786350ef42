"""Copies of checkpoints on storages that are opened by a URI: whole or not there, verified when they come back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

from raypipe.checkpoint import Storage, commit, open_checkpoint, step_directory, write_shard
from raypipe.errors import CheckpointError, SpecError
from raypipe.launch.run_directory import check_resume
from tests.job_files import PIPELINE, TINY_GPT, minimal_job
from tests.ray_head import free_ports

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Address of a server that speaks S3's protocol, with an empty bucket; in a process of its own, as a real one."""
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"127.0.0.1:{port}"
    try:
        ends = time.monotonic() + 60
        while True:
            with suppress(URLError, ConnectionError):
                urlopen(Request(f"http://{address}/{BUCKET}", method="PUT"), timeout=5).close()
                break
            assert server.poll() is None
            assert time.monotonic() < ends, "the S3 server does not answer"
            time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["memory", "file", "mock", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """fsspec's, pyarrow's local one, the one that pyarrow has for tests, and its S3 client with a real server."""
    uri = {"memory": f"memory://{tmp_path.name}/run", "file": f"file://{tmp_path}/copies", "mock": "mock://copies"}
    if request.param == "s3":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        options = f"scheme=http&endpoint_override={request.getfixturevalue('s3')}&region=us-east-1"
        uri["s3"] = f"s3://{BUCKET}/{tmp_path.name}?{options}"
    return Storage(uri[request.param])


def checkpoint(root: Path, step: int) -> Path:
    path = step_directory(root, step)
    path.mkdir(parents=True)
    shards = [
        write_shard(path, f"rank-{rank}", {f"param/{rank}.weight": torch.full((3, 4), float(step))}) for rank in (0, 1)
    ]
    return commit(path, step, shards, {"job": "small"})


def test_the_newest_copy_comes_back_to_the_last_bit(storage: Storage, tmp_path: Path) -> None:
    storage.check()
    for step in (10, 20, 30):
        storage.put(checkpoint(tmp_path / "run", step), keep=2)
    assert storage._folders() == ["step-00000020", "step-00000030"]
    result, notices = storage.fetch(tmp_path / "other")
    assert (result, notices) == (tmp_path / "other" / "step-00000030", [])
    here, there = open_checkpoint(tmp_path / "run" / "step-00000030"), open_checkpoint(result)
    assert (there.step, there.meta, there.keys) == (here.step, here.meta, here.keys)
    assert all(torch.equal(there.read([key])[key], here.read([key])[key]) for key in here.keys)


def test_a_step_that_is_saved_again_replaces_its_copy(storage: Storage, tmp_path: Path) -> None:
    storage.put(checkpoint(tmp_path / "run", 10), keep=2)
    again = checkpoint(tmp_path / "again", 10)
    (again / "manifest.json").unlink()
    commit(again, 10, [write_shard(again, "rank-0", {"param/0.weight": torch.zeros(2)})], {"job": "again"})
    (again / "rank-1.safetensors").unlink()
    storage.put(again, keep=2)
    result, _ = storage.fetch(tmp_path / "other")
    assert result is not None
    assert {file.name for file in result.iterdir()} == {"manifest.json", "rank-0.safetensors"}


def test_unfinished_and_damaged_copies_are_skipped(storage: Storage, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        storage.put(checkpoint(tmp_path / "run", step), keep=9)
    storage._files.delete_file(f"{storage._root}/step-00000030/manifest.json")
    with storage._files.open_output_stream(f"{storage._root}/step-00000020/rank-1.safetensors") as stream:
        stream.write(b"damaged")
    result, notices = storage.fetch(tmp_path / "other")
    assert result == tmp_path / "other" / "step-00000010"
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-00000010"], "parts of others were left"
    assert "step-00000030: it was never finished" in notices[0]
    assert "step-00000020: it is truncated" in notices[1]


def test_messages_leave_out_credentials_and_options() -> None:
    storage = Storage(f"s3://who:secret@{BUCKET}/run?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1")
    assert storage.name == f"s3://{BUCKET}/run"
    assert storage._root == f"{BUCKET}/run"


def test_an_empty_storage_has_nothing(storage: Storage, tmp_path: Path) -> None:
    assert storage.fetch(tmp_path / "other") == (None, [])


def test_what_cannot_be_opened_or_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nonsense://x cannot be opened"):
        Storage("nonsense://x")
    (tmp_path / "file").write_text("in the way")
    blocked = Storage(f"file://{tmp_path}/file/copies")
    with pytest.raises(SpecError, match="cannot be written"):
        blocked.check()
    with pytest.raises(CheckpointError, match=r"step-00000010: can't be written"):
        blocked.put(checkpoint(tmp_path / "run", 10), keep=1)


def test_resuming_in_an_empty_directory_begins_with_the_newest_copy(text_folder: Path, tmp_path: Path) -> None:
    Storage(f"file://{tmp_path}/copies").put(checkpoint(tmp_path / "run", 10), keep=1)
    job = minimal_job(TINY_GPT, text_folder, PIPELINE, steps=20, checkpoint_storage=f"file://{tmp_path}/copies")
    said: list[str] = []
    check_resume(job, tmp_path / "new", said.append)
    assert open_checkpoint(tmp_path / "new" / "checkpoints" / "step-00000010").step == 10
    assert said == [f"resuming from file://{tmp_path}/copies/step-00000010"]


def test_a_name_without_a_scheme_is_refused() -> None:
    with pytest.raises(SpecError, match="bucket/run is not a URI"):
        minimal_job(TINY_GPT, "x", PIPELINE, steps=2, checkpoint_storage="bucket/run")
