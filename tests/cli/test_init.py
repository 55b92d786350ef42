"""`raypipe init` writes a job that fits a model and data, or says what is wrong with them; `raypipe quickstart`."""

import json
from pathlib import Path

import pytest
import torch

from raypipe.cli import run
from raypipe.cli.train import quickstart
from raypipe.files import shipped
from raypipe.job import load_job

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    transformers.Qwen3Config(**SIZES).save_pretrained("my model")
    Path("rows.jsonl").write_text("".join(json.dumps({"body": "words " * 40, "id": "a"}) + "\n" for _ in range(4)))
    return tmp_path


def test_a_job_says_what_the_files_say(folder: Path):
    assert run(["init", "my model", "rows.jsonl", "-o", "a.yaml", "--column", "body"]) == 0
    job = load_job("a.yaml")
    assert (job.name, Path(job.model.hf).name, job.model.init, job.model.sequence) == (
        "my-model",
        "my model",
        "random",
        64,
    )
    assert (job.data.type, job.data.column) == ("documents", "body")
    assert job.parallel.auto


def test_saved_weights_are_tuned_in_their_precision(folder: Path):
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).to(torch.bfloat16)
    model.save_pretrained("saved")
    assert run(["init", "saved", "rows.jsonl", "--column", "body"]) == 0
    job = load_job("job.yaml")
    assert (job.model.init, job.train.dtype, job.train.lr) == ("saved", "bfloat16", 2e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2", "rows.jsonl"], "gpt2: holds no config.json"),
        (["my model", "nothing.txt"], "nothing.txt: names no files"),
        (["my model", "rows.jsonl"], 'data.path: rows.jsonl has no "text"'),
        (["my model", "rows.jsonl", "-o", "rows.jsonl"], "rows.jsonl: exists"),
        (["my model", "rows.jsonl", "--column", "id"], "data.path: too short"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    before = Path("rows.jsonl").read_text()
    assert run(["init", *words]) == 2
    assert said.split(": ")[1] in capsys.readouterr().err
    assert Path("rows.jsonl").read_text() == before
    assert not Path("job.yaml").exists()


def test_the_quickstart_runs_the_job_that_comes_with_raypipe(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []
    monkeypatch.setattr("raypipe.cli.train.train", lambda *values: given.extend(values))
    quickstart(("train.steps=2",), None, False)
    assert given[0] == shipped("jobs") / "quickstart.yaml"
    assert load_job(given[0], given[2]).train.steps == 2
