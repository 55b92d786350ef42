"""The adapters that clients ask for, against those of the job: start values written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raypipe.errors import SpecError
from raypipe.runtime.session.slots import Adapters
from raypipe.service.adapters import adapters_of, check_eps, check_loaded
from raypipe.service.server import LoraConfig

Q, GATE, OTHER = "h.0.self_attn.q_proj", "h.0.mlp.gate_proj", "h.0.mixer.in_proj"


def started(folder: Path, *layers: str, up: float = 0.0, **others: torch.Tensor) -> Path:
    values = dict(others)
    for layer in layers:
        values[f"{layer}.lora_A.default.weight"] = torch.ones(4, 6)
        values[f"{layer}.lora_B.default.weight"] = torch.full((5, 4), up)
    folder.mkdir()
    save_file(values, folder / "weights-00000.safetensors")
    return folder


def test_a_part_of_the_jobs_adapters(tmp_path: Path) -> None:
    start = started(tmp_path / "start", Q, GATE)
    assert adapters_of(LoraConfig(rank=3), 4, start) == Adapters(3)
    assert adapters_of(LoraConfig(rank=4, seed=1), 4, start) == Adapters(4, "", 1)
    own = adapters_of(LoraConfig(rank=2, train_mlp=False), 4, start)
    assert own.start(f"{Q}.lora_A.default.weight", torch.ones(4, 6)).sum() == 12
    assert own.start(f"{GATE}.lora_A.default.weight", torch.ones(4, 6)).sum() == 0
    drawn = [Adapters(2, "", seed).start(f"{Q}.lora_A.default.weight", torch.ones(4, 6)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0 < drawn[0].abs().max() < 6**-0.5
    assert drawn[0][2:].abs().max() == 0


@pytest.mark.parametrize(
    ("asked", "start", "said"),
    [
        ({"rank": 5}, {}, "trains adapters of rank 1 to 4"),
        ({"rank": 0}, {}, "trains adapters of rank 1 to 4"),
        ({"rank": 2}, {"head": torch.ones(4, 4)}, "head has no part"),
        ({"rank": 2}, {"up": 0.5}, "lora_B.default.weight has no part"),
        ({"rank": 4, "train_mlp": False}, {"layers": [Q, OTHER]}, "is of none of the kinds"),
        ({"rank": 4, "train_mlp": False}, {"layers": [GATE]}, "leaves nothing to train without train_mlp"),
    ],
)
def test_what_the_jobs_adapters_do_not_include_is_refused(
    tmp_path: Path, asked: dict[str, Any], start: dict[str, Any], said: str
) -> None:
    layers = start.pop("layers", [Q, GATE])
    with pytest.raises(SpecError, match=said):
        adapters_of(LoraConfig(**asked), 4, started(tmp_path / "start", *layers, **start))


def test_other_adapters_are_not_loaded_onto_a_model() -> None:
    check_loaded(Adapters(2, "mlp", 7), Adapters(2, "mlp"), "x")
    with pytest.raises(SpecError, match="has adapters of rank 4, and the model of 2"):
        check_loaded(Adapters(2), Adapters(4), "x")
    check_eps(Adapters(4), 4, 0.0)
    with pytest.raises(SpecError, match="use a number above 0"):
        check_eps(Adapters(2), 4, 0.0)
