"""What a trained language model writes, against transformers' own ``generate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raypipe.checkpoint import commit, write_shard
from raypipe.cli import run
from raypipe.data import declared_fields, prepare_data
from raypipe.errors import SpecError
from raypipe.job.spec import job_from
from raypipe.models import build_model
from raypipe.observe.run_dir import RECORD
from raypipe.sample import Writer
from raypipe.trained import export
from tests.capture.models import FAMILIES

transformers = pytest.importorskip("transformers")
HERE = "tests.test_sample"
TYPES = {"gpt2": {"vocab_size": 256, "n_positions": 16}, "llama": {"vocab_size": 256}}


class Counting(nn.Module):
    """Says that the token after t is t + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embed(words))


def finished(directory: Path, model: dict[str, Any], data: dict[str, Any]) -> Path:
    """A run that ended where it started, its matrices ten times as large, so that the likeliest token is clear."""
    job = job_from({"name": "done", "model": model, "data": data, "train": {"steps": 1, "batch": 2}})
    directory.mkdir()
    whole = build_model(job, declared_fields(job.data))
    prepare_data(job, whole.task, directory / "data")
    tensors = {}
    for name, parameter in whole.build_stage(range(whole.count), seed=3).named().items():
        tensors[f"param/{name}"] = parameter.detach() * (10 if parameter.dim() > 1 else 1)
        if model.get("import"):
            tensors[f"param/{name}"] = torch.eye(64).roll(1, 0) if name == "out.weight" else torch.eye(64)
    checkpoint = directory / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    commit(checkpoint, 1, [write_shard(checkpoint, "rank-00000", tensors)], {})
    (directory / RECORD).write_text(json.dumps(job.model_dump(mode="json")))
    return directory


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("rows") / "rows.npz"
    ids = np.arange(40).reshape(4, 10)
    np.savez(file, words=ids, labels=ids)
    return {"type": "arrays", "path": str(file)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_greedy_text_is_transformers(kind: str, text_folder: Path, tmp_path: Path, capsys) -> None:
    config = {**FAMILIES[kind], **TYPES[kind], "bos_token_id": 0, "eos_token_id": 0}
    model = {"hf": kind, "config": config, "sequence": 16}
    directory = finished(tmp_path / "run", model, {"type": "bytes", "path": str(text_folder)})
    writer = Writer(directory)
    prompt = list(b"def ")
    made = writer.ids(prompt, 12, 0, seed=0)
    out = export(directory, tmp_path / "out")
    saved = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    wanted = saved.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert made == wanted[0].tolist()
    # Beyond what it can look back on, it looks back on the last places.
    longer = writer.ids(prompt, 30, 0, seed=0)
    assert longer[:16] == made
    assert longer[-1] == int(saved(torch.tensor([longer[-17:-1]])).logits[0, -1].argmax())
    assert writer.ids(prompt, 30, 1.0, seed=1) == writer.ids(prompt, 30, 1.0, seed=1) != longer
    assert run(["sample", str(directory), "--ids", "100,101", "--length", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("100,101,")
    assert run(["sample", str(directory), "--length", "3"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    # What was exported writes the same; that its tokens are bytes is known there too.
    assert Writer(out).text("def ", 12, 0, seed=0) == writer.text("def ", 12, 0, seed=0)
    assert run(["sample", str(out), "--ids", "100,101", "--length", "3"]) == 0
    assert capsys.readouterr().out.startswith("100,101,")


def test_a_module_of_ones_own_and_a_local_tokenizer(arrays: dict[str, Any], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    directory = finished(tmp_path / "run", {"import": f"{HERE}:Counting", "task": "causal-lm"}, arrays)
    assert Writer(directory).ids([3], 4, 0, seed=0) == [3, 4, 5, 6, 7]
    with pytest.raises(SpecError, match="so text cannot be converted to tokens") as caught:
        Writer(directory).text("w3", 4, 0, seed=0)
    assert "--tokenizer" in caught.value.fix
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w63"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    assert Writer(directory, tmp_path / "words").text("w3", 4, 0, seed=0) == "w3 w4 w5 w6 w7"
    transformers.GPT2Config().save_pretrained(tmp_path / "config")
    for folder in (tmp_path, tmp_path / "config"):  # of the second one transformers makes an empty tokenizer
        with pytest.raises(SpecError, match="holds no tokenizer"):
            Writer(directory, folder)


@pytest.mark.slow
def test_what_does_not_write_says_so(arrays: dict[str, Any], text_folder: Path, tmp_path: Path, capsys) -> None:
    config = {**FAMILIES["bert"], "vocab_size": 257}
    bert = finished(tmp_path / "bert", {"hf": "bert", "config": config, "sequence": 16},
                    {"type": "bytes", "path": str(text_folder)})  # fmt: skip
    with pytest.raises(SpecError, match="bert, trained for masked-lm, is not a causal"):
        Writer(bert)
    labels = finished(tmp_path / "labels", {"import": f"{HERE}:Counting"}, arrays)
    with pytest.raises(SpecError, match="is not a causal language model"):
        Writer(labels)
    assert run(["sample", str(bert)]) == 2
    assert "raypipe export" in capsys.readouterr().err
    words = finished(tmp_path / "words", {"import": f"{HERE}:Counting", "task": "causal-lm"}, arrays)
    assert run(["sample", str(words), "--ids", "1,x"]) == 2
    assert "write 1,2,3" in capsys.readouterr().err


def test_an_exported_model_that_cannot_be_sampled_is_one_error(tmp_path: Path, monkeypatch, capsys) -> None:
    def refused(name: str, **options: str) -> str:
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        assert run(["sample", str(tmp_path / name), *words]) == 2
        return capsys.readouterr().err

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=40, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert "--tokenizer DIR, or token ids: --ids 1,2,3" in refused("gpt2")
    assert run(["sample", str(tmp_path / "gpt2"), "--ids", "1,2", "--length", "2"]) == 0
    capsys.readouterr()
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "holds a BertForMaskedLM, which is not a causal language model" in refused("bert", ids="1,2")
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    assert "holds a model that cannot be loaded" in refused("gpt2", ids="1,2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers, which is not installed\n  fix: " in refused("gpt2", ids="1,2")
