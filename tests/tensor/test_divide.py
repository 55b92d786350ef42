"""What is refused, what stays tied, and what a capture sees of the group's exchanges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from raypipe.errors import SpecError
from raypipe.tensor import FeatureTable, divide, load_table, table_for

transformers = pytest.importorskip("transformers")


def gpt2(**changes: object) -> nn.Module:
    config = transformers.GPT2Config(**{"n_layer": 2, "n_embd": 48, "n_head": 12, "vocab_size": 96} | changes)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=12, num_key_value_heads=4, intermediate_size=96, num_hidden_layers=1,
        vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_heads_that_do_not_divide_are_refused_with_the_nearest_group() -> None:
    model = gpt2()
    with pytest.raises(SpecError) as caught:
        divide(model, table_for("gpt2"), model.config, 5)
    assert caught.value.where == "transformer.h.0.attn.c_attn"
    assert "12 num_attention_heads do not divide over tensor = 5" in str(caught.value)
    assert caught.value.fix == "use tensor: 4 or 6"


def test_the_group_that_is_proposed_divides_everything() -> None:
    model = llama()  # 12 heads, but 4 of keys and values
    with pytest.raises(SpecError, match="use tensor: 2 or 4"):
        divide(model, table_for("llama"), model.config, 3)
    assert divide(llama(), table_for("llama"), model.config, 4)


def test_a_refused_model_is_left_as_it_was() -> None:
    model = gpt2()
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(SpecError):
        divide(model, table_for("gpt2"), model.config, 5)
    assert {name: p.shape for name, p in model.named_parameters()} == before
    assert not any("Column" in type(module).__name__ for module in model.modules())


def test_an_unknown_family_names_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"(?s)no feature table for bloom; known: bert, gemma, gpt, .*tensor_table"):
        table_for("bloom")


def test_tied_parameters_stay_one() -> None:
    model = gpt2()
    shards = divide(model, table_for("gpt2"), model.config, 4)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert shards["lm_head.weight"] == shards["transformer.wte.weight"]
    assert model.lm_head.weight.shape == (24, 48)


def test_ties_that_a_table_tears_apart_are_refused() -> None:
    table = table_for("gpt2")
    without = {pattern: feature for pattern, feature in table.modules.items() if pattern != "lm_head"}
    with pytest.raises(SpecError, match=r"lm_head.weight: is tied to transformer.wte.weight, which the table divides"):
        divide(gpt2(), table.model_copy(update={"modules": without}), gpt2().config, 2)
    column = {**table.modules, "wte": table.modules["mlp.c_fc"]}
    with pytest.raises(SpecError, match=r"lm_head.weight: is tied to transformer.wte.weight, which is divided differ"):
        divide(gpt2(), table.model_copy(update={"modules": column}), gpt2().config, 2)


def test_a_table_for_another_model_is_refused() -> None:
    with pytest.raises(SpecError, match="matches no layers of LlamaForCausalLM"):
        divide(llama(), table_for("vit").model_copy(update={"modules": {}}), llama().config, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family: mine\nmodel_types: mine\nmodules: {fc1: colum}", "modules.fc1"),
        ("family: mine\nmodel_types: mine", "modules"),
        ("family: mine\nmodel_types: mine\nmodules: {}\nattribute: {}", "attribute"),
        ("[", "not valid YAML"),
    ],
)
def test_a_wrong_table_says_where(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_table(file)


def test_own_tables_come_first(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("family: mine\nmodel_types: []\nmodules: {up: column, down: row}\n")
    assert table_for("gpt2", file).family == "mine"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    ("module", "kind", "why"),
    [(nn.Conv2d(4, 4, 1), "column", "is a Conv2d"), (nn.Linear(4, 4), "vocabulary", "Linear")],
)
def test_layers_of_another_kind_are_refused(module: nn.Module, kind: str, why: str) -> None:
    table = FeatureTable(family="mine", model_types=(), modules={"0": kind})
    with pytest.raises(SpecError, match=why):
        divide(nn.Sequential(module), table, None, 2)


def test_capture_keeps_one_exchange_each_way_per_divided_block() -> None:
    model = nn.Sequential(Gated(), nn.Tanh(), Gated())
    modules = {"gate": "column", "up": "column", "down": "row"}
    table = FeatureTable(family="mine", model_types=(), modules=modules)
    divide(model, table, None, 2)
    graph = torch.export.export(model, (torch.randn(3, 8),), strict=False).graph
    result = Counter(str(node.target) for node in graph.nodes if "raypipe" in str(node.target))
    assert result == {"raypipe.copy_to_group.default": 2, "raypipe.reduce_from_group.default": 2}
