"""The Tinker client, as it is on PyPI, against the server; skipped where it is not installed (Python below 3.11)."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker")

from raypipe.runtime.session.call_data import Datum  # noqa: E402
from raypipe.runtime.session.session_worker import AdamW  # noqa: E402
from raypipe.service.service import SESSION_S  # noqa: E402
from tests.runtime.runs.plain_training import whole_gpt  # noqa: E402
from tests.runtime.session.plain_calls import PlainCalls, target_logprobs  # noqa: E402
from tests.runtime.session.test_session import job_of, sampled  # noqa: E402
from tests.service.conftest import BASE, Serving  # noqa: E402

pytestmark = [pytest.mark.runs]


def sent(data: list[Datum]) -> list[Any]:
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(one.tokens.tolist()),
            loss_fn_inputs={
                name: np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
                for name, values in one.inputs.items()
            },
        )
        for one in data
    ]


def rounded(data: list[Datum]) -> list[Datum]:
    """As the wire has it: all that is no token in float32."""
    return [
        one._replace(
            inputs={k: v if k == "target_tokens" else v.astype(np.float32).astype(float) for k, v in one.inputs.items()}
        )
        for one in data
    ]


def client_of(serving: Serving) -> Any:
    serving.clients.append(tinker.ServiceClient(base_url=serving.url, api_key="tml-local"))
    return serving.clients[-1]


def test_a_script_for_tinker_trains(serving: Serving) -> None:
    """Create, forward_backward, optim_step, save, load, custom loss: the numbers are those of plain PyTorch."""
    rng = random.Random(2)
    client = client_of(serving)
    training = client.create_lora_training_client(base_model=BASE, rank=0).result()
    plain = PlainCalls(whole_gpt(job_of({})))
    adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 1.0}
    ours = AdamW(lr=0.01, eps=1e-8, clip=1.0)

    def step(loss: str) -> None:
        data = rounded(sampled(rng, loss, 5))
        call = training.forward_backward(sent(data), loss)
        update = training.optim_step(tinker.AdamParams(**adam))
        total, logprobs = plain.forward_backward(data, loss)
        result = call.result()
        assert result.metrics["loss:sum"] == pytest.approx(total, abs=1e-9)
        for output, theirs in zip(result.loss_fn_outputs, logprobs, strict=True):
            np.testing.assert_allclose(output["logprobs"].to_numpy(), theirs.numpy(), atol=1e-6)
        assert update.result().metrics["grad_norm"] == pytest.approx(plain.optim_step(ours), abs=1e-9)

    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
        step(loss)
    path = training.save_state("after-six").result().path
    assert path.endswith("/weights/after-six")
    kept = {name: p.detach().clone() for name, p in plain.model.state_dict().items()}
    state = plain.optimizer.state_dict()
    step("cross_entropy")
    training.load_state_with_optimizer(path).result()
    plain.model.load_state_dict(kept)
    plain.optimizer.load_state_dict(state)
    step("cross_entropy")
    plain.model.load_state_dict(kept)
    plain.optimizer.load_state_dict(state)
    training = client.create_training_client_from_state_with_optimizer(path).result()  # a second model
    step("cross_entropy")


def test_a_checkpoint_that_has_expired_is_gone(serving: Serving) -> None:
    training = client_of(serving).create_lora_training_client(base_model=BASE, rank=0).result()
    path = training.save_state("short", ttl_seconds=1).result().path
    training.load_state(path).result()
    time.sleep(1.1)
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        training.load_state(path).result()
    training.save_state("another", ttl_seconds=100).result()
    assert [one.name for one in (serving.service.directory / "checkpoints").glob("*/weights/*")] == ["another"]


def test_two_clients_at_once_train_a_model_each(serving: Serving) -> None:
    """Their calls come interleaved, and each model is as if it were alone."""
    clients = [client_of(serving), client_of(serving)]
    trained = [client.create_lora_training_client(base_model=BASE, rank=0).result() for client in clients]
    plain = [PlainCalls(whole_gpt(job_of({}))) for _ in trained]
    rng = random.Random(8)
    for _ in range(6):
        queued = []
        for which, training in enumerate(trained):
            data = rounded(sampled(rng, "ppo", 3))
            call = training.forward_backward(sent(data), "ppo")
            update = training.optim_step(tinker.AdamParams(learning_rate=0.01 * (which + 1), eps=1e-8))
            queued.append((which, data, call, update))
        for which, data, call, update in queued:
            expected, _ = plain[which].forward_backward(data, "ppo")
            norm = plain[which].optim_step(AdamW(lr=0.01 * (which + 1), eps=1e-8))
            assert call.result().metrics["loss:sum"] == pytest.approx(expected, abs=1e-9)
            assert update.result().metrics["grad_norm"] == pytest.approx(norm, abs=1e-9)
    with pytest.raises(tinker.BadRequestError, match="this server has 2 models at once"):
        clients[0].create_lora_training_client(base_model=BASE, rank=0).result()
    clients[1].close("success").result()
    assert clients[0].create_lora_training_client(base_model=BASE, rank=0).result().model_id


def test_a_custom_loss_is_computed_by_the_client(serving: Serving) -> None:
    rng = random.Random(3)
    training = client_of(serving).create_lora_training_client(base_model=BASE, rank=0).result()
    plain = PlainCalls(whole_gpt(job_of({})))
    data = rounded(sampled(rng, "cross_entropy", 4))

    def spread(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((x**2).sum() for x in logprobs)
        return loss, {"spread": loss.item()}

    call = training.forward_backward_custom(sent(data), spread)
    update = training.optim_step(tinker.AdamParams(learning_rate=0.0))
    own = sum((target_logprobs(plain.model, one) ** 2).sum() for one in data)
    own.backward()
    assert call.result().metrics["spread"] == pytest.approx(own.item(), rel=1e-6)
    assert update.result().metrics["grad_norm"] == pytest.approx(plain.optim_step(AdamW(lr=0.0)), rel=1e-5)


def test_a_policy_learns_from_its_own_samples(sampling: Serving) -> None:
    """The weights go to the sampler, its samples to importance sampling, and a toy reward goes up."""
    rank = sampling.service.rank
    training = client_of(sampling).create_lora_training_client(base_model=BASE, rank=rank).result()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[])
    rewards = []
    for _ in range(4 if rank else 20):
        sampler = training.save_weights_and_get_sampling_client().result()
        drawn = sampler.sample(prompt=prompt, num_samples=16, sampling_params=params).result().sequences
        assert [len(one.tokens) for one in drawn] == [8] * 16
        reward = np.array([np.mean(np.array(one.tokens) < 64) for one in drawn])
        rewards.append(reward.mean())
        data = []
        for one, value in zip(drawn, reward - reward.mean(), strict=True):
            tokens = [1, 2, 3, *one.tokens]
            given = {
                "target_tokens": np.array(tokens[1:]),
                "logprobs": np.array([0.0, 0.0, *one.logprobs], np.float32),
                "advantages": np.array([0.0, 0.0, *[value] * len(one.tokens)], np.float32),
            }
            data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given))
        call = training.forward_backward(data, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        for one, output in zip(drawn, call.result().loss_fn_outputs, strict=True):  # what samples is what trains
            np.testing.assert_allclose(output["logprobs"].to_numpy()[2:], one.logprobs, atol=2e-4)
    if not rank:  # adapters inside so small a model, of random weights, move its logits too little
        assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    known = sampler.compute_logprobs(prompt).result()
    assert known[0] is None
    assert len(known) == 3
    drawn = [
        sampler.sample(prompt=prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=8, stop=[]))
        for _ in range(4)
    ]
    assert len({tuple(one.result().sequences[0].tokens) for one in drawn}) > 1  # without a seed
    greedy = [
        sampler.sample(prompt=prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=4, temperature=0))
        for _ in range(2)
    ]
    assert greedy[0].result().sequences[0].tokens == greedy[1].result().sequences[0].tokens
    written = sampling.service.directory / "checkpoints"
    assert list(written.rglob("about.json"))
    sampling.clients[0].close("success").result()
    assert not list(written.rglob("about.json"))


def test_a_client_that_goes_away_frees_its_model(serving: Serving) -> None:
    gone, stays = client_of(serving), client_of(serving)
    for client in (gone, stays):
        client.create_lora_training_client(base_model=BASE, rank=0).result()
    with pytest.raises(tinker.BadRequestError, match="this server has 2 models at once"):
        stays.create_lora_training_client(base_model=BASE, rank=0).result()
    service = serving.service
    service._clients[gone.holder.get_session_id()].heard_at -= SESSION_S
    service.expire()
    assert list(service._clients) == [stays.holder.get_session_id()]
    assert stays.create_lora_training_client(base_model=BASE, rank=0).result().model_id
    with pytest.raises(tinker.NotFoundError, match="there is no such session, or it has ended"):
        gone.close("success").result()


def test_what_the_server_has_not_is_refused_in_a_sentence(serving: Serving) -> None:
    client = client_of(serving)
    with pytest.raises(tinker.BadRequestError, match="trains all weights, without adapters"):
        client.create_lora_training_client(base_model=BASE, rank=8).result()
    with pytest.raises(tinker.BadRequestError, match='"other" is not served here'):
        client.create_lora_training_client(base_model="other", rank=0).result()
