"""Models with adapters of their own rank and layers are peft's of that rank and those layers, on the job's pipeline."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from raypipe.models import build_model
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.runtime.session.session_worker import AdamW
from raypipe.runtime.session.slots import Adapters
from tests.runtime.session.conftest import Opened
from tests.runtime.session.plain_calls import PlainCalls
from tests.runtime.session.test_session import LORA, QWEN3, job_of, sampled

pytestmark = [pytest.mark.runs]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def alone(adapters: Adapters) -> torch.nn.Module:
    """Peft's model of this rank, with the job's scale, 8 / 4; its ``lora_A`` are rows of the job's."""
    modules = ATTENTION if adapters.without else LORA["target_modules"]
    own = job_of(
        {}, {**QWEN3, "lora": {"r": adapters.rank, "lora_alpha": 2 * adapters.rank, "target_modules": modules}}
    )
    model = HuggingFace(own.model).build().double()
    layers = build_model(job_of({}, {**QWEN3, "lora": LORA}), None, 0)
    start = layers.build_stage(range(layers.count), own.train.seed).named()
    known = dict(model.named_parameters())
    for name, value in start.items():
        plain = name if name in known else name.replace(".base_layer.", ".")
        if plain in known:
            at = known[plain].shape[0] if ".lora_A." in name else value.shape[0]
            known[plain].data = adapters.start(name, value.detach())[:at].double()
            if ".lora_B." in name:
                known[plain].data = torch.zeros(value.shape[0], adapters.rank, dtype=torch.float64)
    return model


def test_ranks_layers_and_seeds_of_a_models_own(session_of: Opened, tmp_path: Path) -> None:
    rng = random.Random(2)
    session = session_of(job_of({}, {**QWEN3, "lora": LORA}))
    session.save(tmp_path / "start").result()
    wanted = [Adapters(2), Adapters(1, "mlp"), Adapters(4, seed=5), Adapters(3, "mlp", 6)]
    plain = [PlainCalls(alone(one)) for one in wanted]
    for slot, one in enumerate(wanted):
        session.load(tmp_path / "start", with_optimizer=False, slot=slot, adapters=one)
    for turn in range(16):
        slot = turn % 4
        data = sampled(rng, "ppo", 4)
        call = session.forward_backward(data, "ppo", slot=slot)
        adam = AdamW(lr=0.02, eps=1e-8, weight_decay=0.1, clip=1.0)
        updated = session.optim_step(adam, slot)
        assert call.result().loss_sum == pytest.approx(plain[slot].forward_backward(data, "ppo")[0], abs=1e-9), turn
        assert updated.result().grad_norm == pytest.approx(plain[slot].optim_step(adam), abs=1e-9), turn
    norms = {round(sum(p.norm().item() for p in one.model.parameters() if p.requires_grad), 6) for one in plain}
    assert len(norms) == 4
