"""Fine-tuning a local checkpoint: made by transformers, trained by stages, read by transformers again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from raypipe.checkpoint import commit, write_shard
from raypipe.cli import run
from raypipe.data import Corpus, declared_fields
from raypipe.errors import SpecError
from raypipe.models import build_model, random_keys
from raypipe.observe.run_dir import RECORD
from raypipe.trained import export
from tests.job_files import PIPELINE, minimal_job
from tests.runtime.runs.small_runs import drive

transformers = pytest.importorskip("transformers")
SEQUENCE, BATCH = 16, 8


@pytest.fixture(scope="module")
def checkpoint(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 that has seen a little real text, saved by transformers in several files, with tokenizer files."""
    directory = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                                     eos_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    text = b"\0".join(path.read_bytes() for path in sorted(text_folder.iterdir()))
    tokens = torch.tensor(list(text[: 40 * 8 * 33])).view(40, 8, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in tokens[:20]:
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 4.5  # it has learned something; nothing is 5.5
    model.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def make_job(checkpoint: Path, text: Path, **train: object):
    return minimal_job(
        {"hf": str(checkpoint), "sequence": SEQUENCE},
        text,
        PIPELINE,
        **{"steps": 12, "batch": BATCH, "lr": 0.005, "eval_every": 12, "eval_batches": 4, **train},
    )


def validation(model: torch.nn.Module, data: Path) -> float:
    corpus, losses = Corpus.open(data), []
    with torch.no_grad():
        for batch in range(4):
            tokens, targets = corpus.batch("val", 0, batch, BATCH)
            losses.append(F.cross_entropy(model.eval()(tokens).logits.flatten(0, 1), targets.flatten()).item())
    return sum(losses) / len(losses)


@pytest.mark.runs
def test_fine_tuning_a_local_checkpoint(checkpoint, stage_pool, text_folder, tmp_path, capsys) -> None:
    job = make_job(checkpoint, text_folder)
    done = drive(job, stage_pool, tmp_path / "run")
    (tmp_path / "run" / RECORD).write_text(json.dumps(job.model_dump(mode="json")))
    before = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert run(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip().endswith("out")
    after, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert after.config.use_cache
    # The pipeline began from the checkpoint: its validation loss is what transformers computes, before and after.
    data = tmp_path / "run" / "data"
    assert validation(after, data) == pytest.approx(done.val_losses[-1], abs=1e-5)
    assert validation(after, data) < validation(before, data) - 0.05
    # The same logits as the stages'.
    model = build_model(job, None)
    body = model.build_stage(range(model.count), seed=0)
    with torch.no_grad():
        for name, parameter in body.named().items():
            parameter.copy_(after.get_parameter(name))
        tokens = torch.randint(256, (3, SEQUENCE))
        with random_keys(0, 0, [], training=False):
            mine = body((), {"input_ids": tokens})[0]
        assert (mine - after.eval()(tokens).logits).abs().max() < 1e-5
    with pytest.raises(SpecError, match="already there"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.slow
def test_running_statistics_are_exported(tmp_path) -> None:
    images = torch.randn(4, 3, 16, 16)
    np.savez(tmp_path / "rows.npz", pixel_values=images.numpy(), labels=np.array([0, 1, 0, 1]))
    config = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    job = minimal_job({"hf": "resnet", "config": config}, tmp_path / "rows.npz", batch=2)
    model = build_model(job, declared_fields(job.data))
    body = model.build_stage(range(model.count), seed=0)
    tensors = {f"param/{name}": p.detach() for name, p in body.named().items()}
    for one in body.statistics:
        for name, buffer in one.buffers_by_name.items():
            buffer.add_(torch.rand_like(buffer) if buffer.is_floating_point() else 3)
            tensors[f"buffer/{name}"] = buffer
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    commit(checkpoint, 1, [write_shard(checkpoint, "rank-00000", tensors)], {})
    (tmp_path / "run" / RECORD).write_text(json.dumps(job.model_dump(mode="json")))
    after = transformers.AutoModelForImageClassification.from_pretrained(export(tmp_path / "run", tmp_path / "out"))
    held = dict(after.named_buffers())
    assert {key.removeprefix("buffer/") for key in tensors if key.startswith("buffer/")} == held.keys()
    with torch.no_grad(), random_keys(0, 0, [], training=False):
        mine = body((), {"pixel_values": images})[0]
        assert (mine - after.eval()(images).logits).abs().max() < 1e-5
    assert all(torch.equal(held[key.removeprefix("buffer/")], t) for key, t in tensors.items() if "buffer/" in key)


@pytest.mark.slow
def test_each_stage_reads_its_own_tensors_and_no_file_of_others(checkpoint, text_folder, tmp_path, monkeypatch) -> None:
    job = make_job(checkpoint, text_folder)
    model = build_model(job, None)
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    read: list[str] = []
    load = model.values._load
    monkeypatch.setattr(model.values, "_load", lambda keys: read.extend(keys) or load(keys))
    half = model.count // 2
    for part in (range(half), range(half, model.count)):
        read.clear()
        body = model.build_stage(part, seed=0)
        assert set(body.named()) <= set(read)
        assert len(body.named()) < 0.8 * len(list(whole.named_parameters()))
        assert {n for n in read if n.endswith(("weight", "bias"))} == set(body.named())
        for name, parameter in body.named().items():
            assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.slow
def test_a_checkpoint_of_the_model_without_its_head_starts_the_head_afresh(checkpoint, text_folder, tmp_path) -> None:
    """Names without the head's prefix, as published GPT-2 has them; the head is drawn by key."""
    inner = transformers.AutoModel.from_pretrained(checkpoint)
    inner.save_pretrained(tmp_path / "inner")
    config = json.loads((tmp_path / "inner" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    config["tie_word_embeddings"] = False
    (tmp_path / "inner" / "config.json").write_text(json.dumps(config))
    model = build_model(make_job(tmp_path / "inner", text_folder), None)
    body = model.build_stage(range(model.count), seed=0)
    assert torch.equal(body.named()["transformer.h.0.mlp.c_fc.weight"], inner.h[0].mlp.c_fc.weight)
    head = body.named()["lm_head.weight"]
    assert torch.equal(head, model.build_stage([model.count - 1], seed=0).named()["lm_head.weight"])
    assert not torch.equal(head, model.build_stage([model.count - 1], seed=1).named()["lm_head.weight"])


@pytest.mark.slow
def test_what_is_no_checkpoint_is_one_error(checkpoint, text_folder, tmp_path, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((checkpoint / "config.json").read_text())
    planned = build_model(make_job(empty, text_folder), None)  # enough to plan; who trains asks for the notices
    with pytest.raises(SpecError, match=r"holds no model\.safetensors"):
        assert planned.notices
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text((checkpoint / "config.json").read_text())
    (damaged / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(SpecError, match="can't be read"):
        build_model(make_job(damaged, text_folder), None)
    assert run(["export", str(tmp_path), "-o", str(tmp_path / "x")]) == 2
    assert "holds no run" in capsys.readouterr().err
