"""Adapters of peft: trained in stages as in a plain loop over peft's own model, and written so that peft opens them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.checkpoint import commit, step_directory, write_shard
from raypipe.data import Corpus, declared_fields, known_fields, prepare_data
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.launch.run_directory import RECORD
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.trained import export, load_hugging_face
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job
from tests.runtime.runs.plain_training import adamw_update
from tests.runtime.runs.small_runs import drive, job_for

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS = 5
HEAD = "score.modules_to_save.default.weight"
TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 32, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "base"
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **TINY)).save_pretrained(
        folder
    )
    return folder


def job_with(base: Path, text: Path, lora: dict[str, object], **parallel: object) -> JobSpec:
    model, plan = {"hf": str(base), "sequence": 16, "lora": lora}, {"schedule": "zb-h1", "stages": 2, **parallel}
    return job_for(model, text, plan, steps=STEPS, lr=0.001, checkpoint_every=STEPS, clip=1.0)


def plain_losses(
    job: JobSpec, base: Path, data: Path, lora: dict[str, object] = LORA
) -> tuple[list[float], torch.nn.Module]:
    """Losses of the same steps of peft's own model, from the adapters that the stages start with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = peft.get_peft_model(model, peft.LoraConfig(**lora, task_type="CAUSAL_LM"))
    built = build_model(job, known_fields(data))
    starts = built.build_stage(range(built.count), seed=3).named()
    with torch.no_grad():
        for name, parameter in model.get_base_model().named_parameters():
            parameter.copy_(starts[name])
    update, corpus, losses = adamw_update(job, model), Corpus.open(data), list[float]()
    for step in range(STEPS):
        tokens, targets = corpus.samples("train", 3, step, 0, 8, 8)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        update()
        losses.append(loss.item())
    return losses, model


@pytest.mark.runs
def test_stages_train_adapters_as_peft_does_and_peft_opens_them(base, text_folder, stage_pool, tmp_path) -> None:
    job = job_with(base, text_folder, LORA)
    done = drive(job, stage_pool, tmp_path / "run")
    expected, plain = plain_losses(job, base, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != expected[0]
    (tmp_path / "run" / RECORD).write_text(job.model_dump_json())
    out = export(tmp_path / "run", tmp_path / "out")
    assert {file.name for file in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    opened = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        logits = plain.to(torch.float32)(tokens).logits
        assert torch.allclose(opened(tokens).logits, logits, atol=1e-5)
        _, module = load_hugging_face(tmp_path / "run", job, job.model)
        assert torch.equal(module(tokens).logits, opened(tokens).logits)
        bare = transformers.AutoModelForCausalLM.from_pretrained(base)
        assert not torch.allclose(bare(tokens).logits, logits, atol=1e-5), "the adapters do nothing"


@pytest.mark.runs
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_stage_before_the_first_adapter_changes_no_loss(schedule, base, text_folder, stage_pool, tmp_path) -> None:
    """Adapters in the last block alone: no gradient travels to the first stage, in either direction of the pipeline."""
    late = {**LORA, "target_modules": r".*\.layers\.1\..*(q_proj|down_proj)"}
    job = job_with(base, text_folder, late, schedule=schedule)
    built = build_model(job, None)
    assert [built.trained_parameters(i) > 0 for i in range(built.count)].index(True) >= built.count // 2
    done = drive(job, stage_pool, tmp_path / "run")
    expected, _ = plain_losses(job, base, tmp_path / "run" / "data", late)
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != expected[0]


@pytest.mark.runs
@pytest.mark.parametrize("shard", ["zero3", *exhaustive("zero1", "zero2")])
def test_adapters_over_a_base_that_is_divided(shard, base, text_folder, stage_pool, tmp_path) -> None:
    """With a first stage that trains nothing at all."""
    late = {**LORA, "target_modules": r".*\.layers\.1\..*(q_proj|down_proj)"}
    job = job_with(base, text_folder, late, schedule="1f1b", stages=2, replicas=2, shard=shard)
    done = drive(job, stage_pool, tmp_path / "run")
    expected, _ = plain_losses(job, base, tmp_path / "run" / "data", late)
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != expected[0]


@pytest.mark.runs
@pytest.mark.parametrize("schedule", exhaustive("1f1b", "zb-h1"))
def test_adapters_in_compiled_stages(schedule, base, text_folder, stage_pool, tmp_path) -> None:
    job = job_with(base, text_folder, LORA, schedule=schedule)
    train = job.train.model_copy(update={"compile": "inductor", "compile_first": True})
    job = job.model_copy(update={"train": train})
    done = drive(job, stage_pool, tmp_path / "run")
    expected, _ = plain_losses(job, base, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    compiled = [event for event in read_rows(tmp_path / "run" / EVENTS) if event["event"] == "compiled"]
    assert [event["reason"] for event in compiled] == [None, None]


def test_only_adapters_train_and_the_base_is_what_was_saved(base, text_folder, tmp_path) -> None:
    job = job_with(base, text_folder, LORA)
    prepare_data(job, build_model(job, None).task, tmp_path)
    model = build_model(job, known_fields(tmp_path))
    saved = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).state_dict()
    for layers in (range(model.count // 2), range(model.count // 2, model.count)):
        for name, parameter in model.build_stage(layers, seed=0).named().items():
            assert parameter.requires_grad is (".lora_" in name), name
            if not parameter.requires_grad:
                assert torch.equal(parameter, saved[name.replace(".base_layer", "")]), name


def test_a_classifiers_head_trains_whole_and_is_written_too(tmp_path) -> None:
    """From start values that are changed by hand, since how they train is shown above."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **TINY, num_labels=3, pad_token_id=0)
    bare, base = transformers.AutoModelForSequenceClassification.from_config(config), tmp_path / "base"
    bare.save_pretrained(base)
    spec = {"hf": str(base), "lora": {"r": 2, "target_modules": ["q_proj"]}}
    np.savez(tmp_path / "rows.npz", input_ids=np.arange(64).reshape(4, 16), labels=np.array([0, 1, 2, 1]))
    job = minimal_job(spec, tmp_path / "rows.npz", {"schedule": "1f1b", "stages": 1, "microbatch": 1}, batch=2)
    run = tmp_path / "run"
    model = build_model(job, declared_fields(job.data))
    prepare_data(job, model.task, run / "data")
    named = model.build_stage(range(model.count), seed=0).named()
    assert sorted(name for name, one in named.items() if one.requires_grad and ".lora_" not in name) == [HEAD]
    assert not [name for name in named if ".original_module." in name], "the layer that it replaces is not in the graph"
    assert torch.equal(named[HEAD], bare.score.weight)
    trained = {name: one.detach() + (0.5 if one.requires_grad else 0.0) for name, one in named.items()}
    path = step_directory(run / "checkpoints", 1)
    path.mkdir(parents=True)
    commit(path, 1, [write_shard(path, "rank-0", {f"param/{name}": one for name, one in trained.items()})], {})
    (run / RECORD).write_text(job.model_dump_json())
    _, module = load_hugging_face(run, job, job.model)
    out = export(run, tmp_path / "out")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    opened = peft.PeftModel.from_pretrained(again, out)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, module(tokens).logits)
        assert torch.equal(dict(opened.get_base_model().named_parameters())[HEAD], trained[HEAD])


def test_a_layer_that_the_model_lacks_is_one_error(base, text_folder) -> None:
    job = job_with(base, text_folder, {"target_modules": ["c_attn"]})
    with pytest.raises(SpecError, match=r"model\.lora\.target_modules: .*c_attn"):
        build_model(job, None)
