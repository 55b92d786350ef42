"""Rows that hold several documents: three steps equal those of each document alone, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from raypipe.errors import SpecError
from tests.trainer.three_steps import assert_alike, pipelined, plain

SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
LENGTHS = ((5, 7), (5, 6), (5, 5), (3, 4, 2), (9,), (5, 7), (1, 10), (2, 2, 2))


def llama(attention: str = "sdpa", **more: Any) -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**DECODER, max_position_embeddings=64, attn_implementation=attention, **more)
    return transformers.LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    transformers.set_seed(0)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=2, n_positions=32, **rates)
    return transformers.GPT2LMHeadModel(config).double()


def mistral() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.MistralConfig(**DECODER, sliding_window=4, max_position_embeddings=64)
    return transformers.MistralForCausalLM(config).double()


def adapted() -> nn.Module:
    """A model in peft's wrapper, whose adapters alone train."""
    import peft

    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian", lora_dropout=0.0)
    return peft.get_peft_model(llama(), wanted).double()


def documents() -> list[list[list[int]]]:
    g = np.random.default_rng(0)
    return [[g.integers(3, 50, n).tolist() for n in row] for row in LENGTHS]


def packed() -> list[dict[str, Any]]:
    """Return rows of unequal lengths whose positions restart; the first token of a document is no target."""
    return [
        {
            "input_ids": list(chain(*row)), "position_ids": [i for text in row for i in range(len(text))],
            "labels": [t if i else -100 for text in row for i, t in enumerate(text)],
        }
        for row in documents()
    ]  # fmt: skip


def alone(model: nn.Module) -> Tensor:
    """Return the mean loss over all tokens that follow another in a document, one document at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for text in (text for row in documents() for text in row):
        ids = torch.tensor([text])
        logits = model(input_ids=ids, use_cache=False).logits
        total = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        count += len(text) - 1
    return total / count


@pytest.mark.parametrize(
    "make", [llama, lambda: llama("eager"), gpt2, mistral], ids=["sdpa", "eager", "gpt2", "windows"]
)
def test_documents_of_a_row_do_not_see_each_other(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    assert_alike(pipelined(make(), packed(), tmp_path / "run", 4, 2), plain(make(), alone), 1e-9)


def test_adapters_learn_of_packed_rows_under_a_split_backward(tmp_path: Path) -> None:
    result, right = pipelined(adapted(), packed(), tmp_path / "run", 4, 2, split=True), plain(adapted(), alone)
    assert result.losses == pytest.approx(right.losses, abs=1e-9, rel=0)
    learnt = [name for name in result.parameters if "lora" in name]
    assert len(learnt) == 8
    for name in learnt:
        other = next(value for known, value in right.parameters.items() if known.endswith(name))
        torch.testing.assert_close(result.parameters[name], other, rtol=0, atol=1e-9)


def test_an_edited_instance_is_captured_with_packed_rows(tmp_path: Path) -> None:
    def edited() -> nn.Module:
        model = llama()
        model.model.layers[0].mlp.act_fn = nn.GELU()
        return model

    assert_alike(pipelined(edited(), packed(), tmp_path / "run", 4, 2), plain(edited(), alone), 1e-9)


def test_a_mask_of_a_rows_own_tokens_does_not_join_its_documents(tmp_path: Path) -> None:
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in packed()]
    assert_alike(pipelined(llama(), rows, tmp_path / "run", 4, 2), plain(llama(), alone), 1e-9)


@pytest.mark.parametrize("returns", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_collators_that_flatten_a_batch(returns: Mapping[str, bool], tmp_path: Path) -> None:
    """Each row is a document; there are eight of different lengths."""
    collator = transformers.DataCollatorWithFlattening(**returns)
    rows = [{"input_ids": row[0], "labels": row[0]} for row in documents()]

    def together(model: nn.Module) -> Tensor:
        batch = transformers.DataCollatorWithFlattening()(rows)
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])

    result = pipelined(llama(), rows, tmp_path / "run", 4, 2, data_collator=collator)
    assert_alike(result, plain(llama(), together), 1e-9)


@pytest.mark.parametrize("says", ["cu_seq_lens_q", "seq_idx"])
def test_collators_that_say_where_documents_end(says: str, tmp_path: Path) -> None:
    """Rows are packed already, and instead of positions the collator returns what kernels on GPUs read."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = {
            name: torch.tensor([list(chain.from_iterable(row[name] for row in rows))])
            for name in ("input_ids", "labels")
        }
        begins = [position == 0 for row in rows for position in row["position_ids"]]
        if says == "seq_idx":
            return made | {says: torch.tensor((np.cumsum(begins) - 1)[None], dtype=torch.int32)}
        ends = [*np.flatnonzero(begins).tolist(), len(begins)]
        return made | {says: torch.tensor(ends, dtype=torch.int32), "max_length_q": torch.tensor(10)}

    result = pipelined(llama(), packed(), tmp_path / "run", 4, 2, data_collator=collate)
    assert_alike(result, plain(llama(), alone), 1e-9)


def test_block_masks_are_the_models_mask(tmp_path: Path) -> None:
    """Additive masks ``[1, tokens, tokens]`` of rows of one length, as transformers takes them, beside positions.

    The first document of a row sees itself in both directions, which no positions say.
    """
    rows = []
    for row in packed()[0:1] * 8:
        document = np.cumsum(np.array(row["position_ids"]) == 0)
        seen = (document[:, None] == document) & (np.tri(len(document), dtype=bool) | (document == 1))
        rows.append({**row, "attention_mask": np.where(seen, 0.0, -1e300)[None]})

    def masked(model: nn.Module) -> Tensor:
        batch = {name: torch.tensor(np.stack([row[name] for row in rows])) for name in rows[0]}
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    assert_alike(pipelined(llama(), rows, tmp_path / "run", 4, 2), plain(llama(), masked), 1e-9)


def bert() -> nn.Module:
    config = transformers.BertConfig(**DECODER, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config).double()


def gpt_oss() -> nn.Module:
    """transformers makes its masks without the positions."""
    config = transformers.GptOssConfig(
        **DECODER, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config).double()


def mamba() -> nn.Module:
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**DECODER, **sizes)).double()


@pytest.mark.parametrize(("make", "where"), [(bert, "attention"), (gpt_oss, "attn"), (mamba, "mamba")])
def test_models_whose_documents_may_see_each_other_are_refused(
    make: Callable[[], nn.Module], where: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"position_ids: restart within rows.*{where}.*may let them see each other"):
        pipelined(make(), packed(), tmp_path / "run", 4, 2)


def test_a_mask_that_hides_the_beginning_of_a_document_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "attention_mask": [0, *[1] * (len(row["input_ids"]) - 1)]} for row in packed()]
    with pytest.raises(SpecError, match="attention_mask of row 0 hides the beginning of a document"):
        pipelined(llama(), rows, tmp_path / "run", 4, 2)


def left_padded() -> Iterator[dict[str, Any]]:
    for row in documents():
        text, pad = row[0], 9 - len(row[0])
        yield {
            "input_ids": [0] * pad + text, "attention_mask": [0] * pad + [1] * len(text),
            "position_ids": [1] * pad + list(range(len(text))), "labels": [-100] * (pad + 1) + text[1:],
        }  # fmt: skip


def test_positions_of_rows_padded_on_the_left_are_of_one_document_each(tmp_path: Path) -> None:
    rows = list(left_padded())

    def padded(model: nn.Module) -> Tensor:
        batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    assert_alike(pipelined(llama(), rows, tmp_path / "run", 4, 2), plain(llama(), padded), 1e-9)
