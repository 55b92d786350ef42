"""Start values from saved models, against transformers' own ``from_pretrained``, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from raypipe.capture.meta import build_without_memory
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.models.sources.saved_values import Saved
from tests.job_files import minimal_job

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
load_file = pytest.importorskip("safetensors.torch").load_file

FAMILIES = (
    "bart", "bert", "deepseek_v3", "deit", "dinov2", "dinov2_with_registers", "distilbert", "ernie4_5_moe", "gpt2",
    "gpt_neox", "jamba", "llava", "mixtral", "nemotron_h", "qwen2_moe", "qwen3_moe", "t5", "vit",
    "wav2vec2", "whisper",
)  # fmt: skip
"""Renamed keys, merged and split experts, attention under other names, tied weights, buffers, two and more parts."""
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.slow
def test_a_saved_model_starts_as_from_pretrained_gives_it(kind: str, tmp_path: Path) -> None:
    from tests.models.sources.saved_families import compare, small_model

    assert not compare(small_model(kind), tmp_path)


def start(folder: Path, dtype: torch.dtype = torch.float32, **keys: object) -> tuple[Saved, dict[str, torch.Tensor]]:
    source = HuggingFace(HfSpec(hf=str(folder), **keys))

    def build() -> nn.Module:
        return source.build().to(dtype)

    values = source.values(build)
    assert isinstance(values, Saved)
    names = [name for name, _ in build_without_memory(build).named_parameters()]
    return values, dict(values.read(names, (), 0))


def bert(head: str, **sizes: object) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, head)(transformers.BertConfig(**{**SIZES, **sizes}))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m", max_shard_size="9KB")
    return tmp_path / "m"


def test_experts_in_several_files_of_another_dtype(mixtral: Path) -> None:
    assert len(list(mixtral.glob("*.safetensors"))) > 2
    _, mine = start(mixtral, torch.float64)
    theirs = dict(transformers.MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.float64).named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_a_stage_reads_the_tensors_of_its_own_parameters_only(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, mine = start(mixtral)
    read: list[str] = []
    convert = values.conversion.convert
    monkeypatch.setattr(
        values.conversion, "convert", lambda source, load: convert(source, lambda key: (read.append(key), load(key))[1])
    )
    of_layer = [name for name in mine if ".layers.1." in name]
    values.read(of_layer, (), 0)
    assert read
    assert all(".layers.1." in key for key in read)


def test_a_directory_that_has_moved_is_not_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raypipe.capture import capture as room
    from raypipe.models import build_model
    from raypipe.models.task import Field

    captured: list[object] = []
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "capture", lambda *a, _of=room.capture, **k: captured.append(a) or _of(*a, **k))
    fields = {"input_ids": Field((8,), torch.int64), "labels": Field((), torch.int64)}
    for where, config, so_far in (("a", {}, 1), ("b", {}, 1), ("b", {"hidden_act": "relu"}, 2)):
        bert("BertForSequenceClassification").save_pretrained(tmp_path / where)
        model = {"hf": str(tmp_path / where), "config": config, "sequence": 8}
        build_model(minimal_job(model, {"type": "arrays", "path": "x"}, {}, batch=2), fields)  # fmt: skip
        assert len(captured) == so_far


def test_a_new_head_is_named(tmp_path: Path) -> None:
    bert("BertModel").save_pretrained(tmp_path)
    values, mine = start(tmp_path, config={"architectures": ["BertForSequenceClassification"], "num_labels": 3})
    assert values.new == ("classifier.bias", "classifier.weight")
    (notice,) = values.notices
    assert "classifier.bias, classifier.weight" in notice
    assert torch.equal(mine["classifier.bias"], torch.zeros(3))


def test_what_the_saved_class_never_had_is_new_too(tmp_path: Path) -> None:
    """The masked language model has no pooler; its own head is not read."""
    bert("BertForMaskedLM").save_pretrained(tmp_path)
    values, _ = start(tmp_path, config={"architectures": ["BertForSequenceClassification"]})
    assert {name.split(".")[0] for name in values.new} == {"bert", "classifier"}
    assert all("pooler" in name or "classifier" in name for name in values.new)
    assert "cls.predictions.bias" in values.notices[1]


def test_a_lost_tensor_is_an_error_by_name(tmp_path: Path) -> None:
    bert("BertForSequenceClassification").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for lost in ("bert.encoder.layer.1.output.dense.weight", "classifier.bias"):
        rest = {name: value for name, value in tensors.items() if name != lost}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SpecError, match=f"holds no values of {lost}"):
            start(tmp_path)


def test_a_lost_expert_is_an_error_by_name(mixtral: Path) -> None:
    index = json.loads((mixtral / "model.safetensors.index.json").read_text())
    lost = next(key for key in index["weight_map"] if "layers.1" in key and ".experts.3.w2" in key)
    file = mixtral / index["weight_map"].pop(lost)
    save_file({k: v for k, v in load_file(file).items() if k != lost}, file, metadata={"format": "pt"})
    (mixtral / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"layers\.1.*experts.*down_proj"):
        start(mixtral)


def test_another_shape_is_an_error_by_name(tmp_path: Path) -> None:
    bert("BertForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"classifier\.bias is \[2\] in the file and \[5\] in the model"):
        start(tmp_path, config={"num_labels": 5})


def test_unequal_values_of_a_tied_parameter_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    start(tmp_path)
    with pytest.raises(SpecError, match="different values for"):
        start(tmp_path, config={"tie_word_embeddings": True})


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_keys_that_code_reads_and_older_names_are_taken(kind: str) -> None:
    assert HuggingFace(HfSpec(hf="qwen3_moe", config={"head_dim": 8})).config.head_dim == 8
    older = HuggingFace(HfSpec(hf=kind, config={"rope_theta": 5.0})).config
    assert older.rope_parameters["rope_theta"] == 5.0
    for key in ("head_dmi", "cache_dir", "save_pretrained"):
        with pytest.raises(SpecError, match="has no such key"):
            HuggingFace(HfSpec(hf=kind, config={key: 8}))


def test_saved_adapters_are_a_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
    )
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.rand_like(value))
    model.save_pretrained(tmp_path / "adapters")
    spec = HfSpec(hf=str(tmp_path / "adapters"))
    assert HfSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.lora is not None
    assert (spec.hf, spec.lora.r, spec.lora.lora_alpha) == (str(tmp_path / "base"), 3, 5)
    source = HuggingFace(spec)
    names = [name for name, _ in build_without_memory(source.build).named_parameters()]
    mine = source.values(source.build).read(names, (), 0)
    theirs = dict(model.base_model.model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    other = {**spec.lora.model_dump(), "r": 4}
    wider = HuggingFace(HfSpec(hf=spec.hf, adapters=spec.adapters, lora=other))
    with pytest.raises(SpecError, match=r"q_proj.*is \[3, 16\] in the file and \[4, 16\] in the model"):
        wider.values(wider.build)


def test_adapters_whose_base_is_elsewhere_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model", "r": 4}')
    with pytest.raises(ValueError, match=r"some/model, is no directory here; give it as model\.hf"):
        HfSpec(hf=str(tmp_path))
