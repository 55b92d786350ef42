"""verl's own worker on our engine makes the updates of plain PyTorch with verl's own losses. ``make verl`` runs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="make verl installs it")

from transformers import Qwen3Config
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, HFModelConfig, OptimizerConfig, PolicyLossConfig, TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from raypipe.errors import SpecError
from raypipe.service.actor import RemoteSession
from raypipe.service.verl_engine import SessionEngineConfig
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.test_session import QWEN3, job_of

pytestmark = [pytest.mark.runs]

PROMPT, RESPONSE, GROUPS, EACH = 6, 10, 4, 2
"""Longest prompt and response; prompts, and responses to each."""
CLOSE = 1e-9
VOCABULARY = 256


class PlatformCPU(PlatformCUDA):
    """verl has no platform for processes without an accelerator; ours is such a process."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0, get_device_name=lambda: "CPU"
    )

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The description that verl wants of a model; what it trains is the session's, whatever this says."""
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3Config(**QWEN3["config"], architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(local_ray: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A session of a GPT in two stages, float64."""
    set_platform(PlatformCPU())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    session = RemoteSession.start(job_of({}), "verl", tmp_path_factory.mktemp("served") / "run")
    yield "verl"
    session.stop()
    torch.distributed.destroy_process_group()


@pytest.fixture
def worker_of(trainer: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``worker_of(actor)``: verl's worker on that session, which begins with the start values."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    def made(actor: ActorConfig, **of_model: Any) -> TinkerTrainingWorker:
        own = {"override_config": {"attn_implementation": "eager"}, "load_tokenizer": False, **of_model}
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), external_lib="raypipe.service.verl_engine", **own),
            engine_config=SessionEngineConfig(session=trainer),
            optimizer_config=actor.optim,
            checkpoint_config=CheckpointConfig(),
        )
        worker = TinkerTrainingWorker(config)
        worker.reset()
        worker.set_loss_fn(partial(ppo_loss, config=actor))
        run, worker.losses = worker.engine.forward_backward_batch, []

        def recorded(*given: Any, **named: Any) -> Any:
            """verl hands the losses on in float32."""
            output = run(*given, **named)
            worker.losses += output["loss"]
            return output

        worker.engine.forward_backward_batch = recorded
        return worker

    return made


def actor_of(loss: str = "vanilla", **own: Any) -> ActorConfig:
    """An actor's configuration whose loss has every part: policy, entropy and KL to a reference."""
    optim = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.5, lr_warmup_steps=4)
    parts = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "calculate_entropy": True}
    return ActorConfig(
        strategy="raypipe", rollout_n=EACH, ppo_micro_batch_size_per_gpu=2, optim=optim,
        policy_loss=PolicyLossConfig(loss_mode=loss), **{**parts, **own},
    )  # fmt: skip


def batch_of(seed: int) -> Any:
    """A batch of GRPO as verl's trainer hands it to its workers: groups of responses, their advantages, no padding."""
    rng, count = torch.Generator().manual_seed(seed), GROUPS * EACH
    prompts = torch.randint(VOCABULARY, (GROUPS, PROMPT), generator=rng).repeat_interleave(EACH, 0)
    responses = torch.randint(VOCABULARY, (count, RESPONSE), generator=rng)
    before = torch.randint(2, PROMPT + 1, (GROUPS, 1), generator=rng).repeat_interleave(EACH, 0)
    after = torch.randint(1, RESPONSE + 1, (count, 1), generator=rng)
    own = torch.arange(PROMPT)[None] >= PROMPT - before
    response_mask = (torch.arange(RESPONSE)[None] < after).long()
    attention_mask = torch.cat([own.long(), response_mask], 1)
    rewards = response_mask * torch.rand(count, RESPONSE, generator=rng)
    advantages, _ = compute_grpo_outcome_advantage(rewards, response_mask, [n // EACH for n in range(count)])
    noise = lambda: torch.rand(count, RESPONSE, generator=rng) - 5.5  # noqa: E731  # about log(1 / 256)
    batch = {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask, "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask, "advantages": advantages,
        "old_log_probs": noise(), "ref_log_prob": noise(),
    }  # fmt: skip
    about = {"temperature": 1.0, "calculate_entropy": True, "global_batch_size": count // 2}
    return left_right_2_no_padding(tu.get_tensordict(batch, about))


class Plain:
    """The same in one process."""

    def __init__(self, actor: ActorConfig) -> None:
        self.model = whole_gpt(job_of({}))
        self.actor, optim = actor, actor.optim
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.0, optim.betas, 1e-8, optim.weight_decay)

    def outputs(self, data: Any) -> dict[str, torch.Tensor]:
        logprobs, entropies = [], []
        for tokens in data["input_ids"].unbind():
            logits = self.model(tokens[None])[0]
            logprobs.append(logits.log_softmax(-1)[range(len(tokens)), tokens.roll(-1)])
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
        return {
            name: torch.nested.nested_tensor_from_jagged(torch.cat(values), data["input_ids"].offsets())
            for name, values in (("log_probs", logprobs), ("entropy", entropies))
        }

    def forward_backward(self, data: Any) -> float:
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].sum()))
        loss, _ = ppo_loss(self.actor, self.outputs(data), data)
        loss.backward()
        return loss.item()

    def update(self, rate: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.actor.optim.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def assert_weights_equal(worker: TinkerTrainingWorker, plain: Plain) -> None:
    params, adapters = worker.engine.get_per_tensor_param()
    assert adapters is None
    ours, theirs = dict(params), dict(plain.model.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=0, atol=CLOSE)


LOSSES = {
    "vanilla": {},
    "gspo": {"loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"loss_agg_mode": "seq-mean-token-sum", "kl_loss_type": "kl"},
}


@pytest.mark.parametrize("wanted", LOSSES)
def test_updates_equal_plain_pytorch(worker_of: Any, wanted: str) -> None:
    """Log-probabilities, then two mini-batches in two epochs, as a step of verl's PPO trainer has them."""
    actor = actor_of(wanted, **LOSSES[wanted])
    worker, plain = worker_of(actor), Plain(actor)
    rates = iter([0.0] * 4 + [actor.optim.lr / 4] * 4 + [actor.optim.lr / 2] * 4)
    for seed in range(3):
        asked = batch_of(seed)
        tu.assign_non_tensor(asked, compute_loss=False)
        found, expected = worker.infer_batch(asked), plain.outputs(batch_of(seed))
        for name, values in expected.items():
            for ours, theirs in zip(found[name].unbind(), values.unbind(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=CLOSE)
        asked, worker.losses[:] = batch_of(seed), []
        tu.assign_non_tensor(asked, mini_batch_size=4, epochs=2, seed=1, dataloader_kwargs={"shuffle": False})
        metrics = tu.get(worker.train_mini_batch(asked), "metrics")
        halves = [tu.index_select_tensor_dict(batch_of(seed), torch.arange(at, at + 4)) for at in (0, 4)] * 2
        for number, half in enumerate(halves):
            loss = plain.forward_backward(half)
            assert worker.losses[number] == pytest.approx(loss, abs=CLOSE)
            assert metrics["loss"][number] == pytest.approx(loss, rel=1e-6)
            assert metrics["grad_norm"][number] == pytest.approx(plain.update(next(rates)), abs=CLOSE)
        assert metrics["lr"] == [pytest.approx(actor.optim.lr * (seed + 1) / 4)]
    assert_weights_equal(worker, plain)


def test_the_verbs_of_verls_tinker_worker(worker_of: Any, tmp_path: Path) -> None:
    """Gradients add up over calls; an update has its own numbers; a checkpoint brings all of it back."""
    actor = actor_of()
    worker, plain = worker_of(actor), Plain(actor)

    def step(rate: float) -> tuple[float, float]:
        worker.optimizer_zero_grad()
        worker.losses.clear()
        for seed in (5, 6):
            worker.forward_backward(batch_of(seed))
        return sum(worker.losses), worker.optimizer_step({"lr": rate})["grad_norm"]

    for rate in (0.01, 0.02):
        expected = sum(plain.forward_backward(batch_of(seed)) for seed in (5, 6)), plain.update(rate)
        assert step(rate) == pytest.approx(expected, abs=CLOSE)
    worker.save_checkpoint(str(tmp_path / "one"))
    later = step(0.01)
    assert later != pytest.approx(expected, abs=CLOSE)
    worker.load_checkpoint(str(tmp_path / "one"))
    assert_weights_equal(worker, plain)
    assert step(0.01) == later
    worker.save_checkpoint(str(tmp_path / "two"), max_ckpt_to_keep=1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["two"]


def test_what_sessions_do_not_have_is_refused(worker_of: Any) -> None:
    worker = worker_of(actor_of())
    for wrong, said in (
        ({"temperature": 0.7}, "rollout.temperature: is 0.7"),
        ({"distillation_use_topk": True}, "distillation_use_topk"),
    ):
        batch = batch_of(1)
        tu.assign_non_tensor(batch, compute_loss=False, **wrong)
        with pytest.raises(SpecError, match=said):
            worker.infer_batch(batch)
    batch = batch_of(1)
    batch["position_ids"] = batch["position_ids"] + 1
    with pytest.raises(SpecError, match="position_ids"):
        worker.infer_batch(batch)
    with pytest.raises(SpecError, match="lora_rank"):
        worker_of(actor_of(), lora_rank=4)
    worker.forward_backward(batch_of(1))
    with pytest.raises(SpecError, match="gradients wait for an update"):
        worker.optimizer_zero_grad()
