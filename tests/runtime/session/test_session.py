"""A session comes to the numbers of plain PyTorch, for every loss, schedule and division into calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.runtime.session.call_data import Datum, Limits, check
from raypipe.runtime.session.session import Call, arrays
from raypipe.runtime.session.session_job import check_job
from raypipe.runtime.session.session_worker import AdamW
from raypipe.runtime.session.slots import Adapters
from raypipe.runtime.session.token_losses import HIGH, LOSSES, LOW
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.conftest import Opened
from tests.runtime.session.plain_calls import PlainCalls, target_logprobs

pytestmark = [pytest.mark.runs]

GPT = {
    "type": "gpt", "layers": 4, "hidden": 16, "heads": 2, "sequence": 24, "vocabulary": 256, "dropout": 0.0,
    "tie_embeddings": True,
}  # fmt: skip
QWEN3 = {
    "hf": "qwen3", "sequence": 24,
    "config": {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip


def job_of(parallel: dict[str, Any], model: dict[str, Any] = GPT, **train: Any) -> JobSpec:
    return minimal_job(
        model,
        parallel={"stages": 2, "microbatch": 2, **parallel},
        **{"batch": 8, "seed": 3, "dtype": "float64", **train},
    )


def sampled(rng: random.Random, loss: str, count: int) -> list[Datum]:
    """Sequences of unequal lengths with all that a loss needs."""
    result = []
    for _ in range(count):
        length = rng.randint(2, 24)
        kinds = {
            "weights": lambda: rng.choice([0.0, 1.0, 0.5]),
            "entropy_weights": lambda: rng.choice([0.0, 0.5, -0.5]),
            "logprobs": lambda: -4 + rng.random(),
            "advantages": lambda: rng.uniform(-1, 1),
            "sequence_ratio_mask": lambda: rng.choice([0.0, 1.0]),
        }
        inputs = {name: [kinds[name]() for _ in range(length)] for name in LOSSES[loss].needs}
        if "sequence_ratio_mask" in inputs:
            inputs["sequence_ratio_mask"][0] = 1.0
        tokens = [rng.randrange(256) for _ in range(length + 1)]
        result.append(arrays(tokens[:-1], target_tokens=tokens[1:], **inputs))
    return result


def assert_equal_steps(session: Any, plain: PlainCalls, losses: list[str], steps: int) -> None:
    rng = random.Random(7)
    for step in range(steps):
        loss = losses[step % len(losses)]
        adam = AdamW(
            lr=rng.uniform(1e-3, 1e-2), betas=(0.9, rng.choice([0.95, 0.99])), eps=1e-8,
            weight_decay=rng.choice([0.0, 0.1]), clip=rng.choice([None, 0.5, 50.0]),
        )  # fmt: skip
        calls = [sampled(rng, loss, rng.randint(1, 9)) for _ in range(rng.randint(1, 2))]
        queued = [session.forward_backward(data, loss) for data in calls]
        updated = session.optim_step(adam)  # queued before anything is read
        for data, call in zip(calls, queued, strict=True):
            total, logprobs = plain.forward_backward(data, loss)
            outputs = call.result()
            assert outputs.loss_sum == pytest.approx(total, abs=1e-9)
            for ours, theirs in zip(outputs.logprobs, logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-9)
        assert updated.result().grad_norm == pytest.approx(plain.optim_step(adam), abs=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("zb-h1", "chimera")])
def test_twenty_steps_of_every_loss_equal_plain_pytorch(session_of: Opened, schedule: str) -> None:
    job = job_of({"schedule": schedule})
    for loss in LOSSES:
        assert_equal_steps(session_of(job), PlainCalls(whole_gpt(job)), [loss], 20)


@pytest.mark.parametrize(
    "parallel",
    [
        {"stages": 1, "replicas": 2, "microbatch": 1},
        {"schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"},
        {"schedule": "auto"},
        {"schedule": "zb-h1"},
        {"schedule": "chimera"},
        *exhaustive({"schedule": "chimera", "concat": "doubling"}),
    ],
    ids=["replicas", "interleaved, recomputed", "searched", "split backwards", "both ways", "doubling"],
)
def test_other_plans_come_to_the_same(session_of: Opened, parallel: dict[str, Any]) -> None:
    job = job_of(parallel)
    assert_equal_steps(session_of(job), PlainCalls(whole_gpt(job)), list(LOSSES), 6)


def test_a_model_of_transformers_comes_to_the_same(session_of: Opened) -> None:
    job = job_of({}, QWEN3)
    model = HuggingFace(job.model).build().double()
    start = build_model(job, None, 0)
    body = start.build_stage(range(start.count), job.train.seed)
    left = model.load_state_dict(body.named(), strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight"}
    assert not left.unexpected_keys
    assert_equal_steps(session_of(job), PlainCalls(model), ["cross_entropy", "ppo"], 10)


def test_a_loss_of_the_clients_own_goes_as_weights_of_a_cross_entropy(session_of: Opened) -> None:
    """As Tinker's ``forward_backward_custom`` does it: a forward, the gradient by log-probabilities, a backward."""
    job, rng = job_of({}), random.Random(5)
    session, plain = session_of(job), PlainCalls(whole_gpt(job))
    for _ in range(6):
        data = sampled(rng, "cross_entropy", 6)

        def squares(logprobs: list[torch.Tensor]) -> torch.Tensor:
            return (
                sum(((x[:-1] - x[1:]) ** 2).sum() for x in logprobs) + torch.stack([x.mean() for x in logprobs]).var()
            )

        own = squares([target_logprobs(plain.model, one) for one in data])
        own.backward()
        result = [torch.tensor(x, requires_grad=True) for x in session.forward(data).result().logprobs]
        theirs = squares(result)
        theirs.backward()
        assert theirs.item() == pytest.approx(own.item(), abs=1e-9)
        weighted = [
            one._replace(inputs={**one.inputs, "weights": -x.grad.numpy()}) for one, x in zip(data, result, strict=True)
        ]
        session.forward_backward(weighted)
        adam = AdamW(lr=0.01)
        assert session.optim_step(adam).result().grad_norm == pytest.approx(plain.optim_step(adam), abs=1e-9)


def test_thresholds_can_be_options_or_given_for_each_token(session_of: Opened) -> None:
    job, rng = job_of({}), random.Random(1)
    session, plain = session_of(job), PlainCalls(whole_gpt(job))
    data = sampled(rng, "ppo", 5)
    each = [
        one._replace(inputs={**one.inputs, LOW: np.full(len(one.tokens), 0.5), HIGH: np.full(len(one.tokens), 0.9)})
        for one in data
    ]
    expected, _ = plain.forward_backward(data, "ppo", 0.5, 0.9)
    assert session.forward(data, "ppo", {LOW: 0.5, HIGH: 0.9}).result().loss_sum == pytest.approx(expected, abs=1e-9)
    assert session.forward(each, "ppo").result().loss_sum == pytest.approx(expected, abs=1e-9)
    assert session.forward(data, "ppo").result().loss_sum != pytest.approx(expected, abs=1e-3)


def one_of(tokens: Any = (1, 2), **inputs: Any) -> Datum:
    return arrays(tokens, **{"target_tokens": [2, 3], "weights": [1.0, 1.0], **inputs})


@pytest.mark.parametrize(
    ("data", "loss", "options", "said"),
    [
        ([], "cross_entropy", {}, "holds no sequence"),
        ([one_of()], "cros_entropy", {}, 'did you mean "cross_entropy"'),
        ([one_of()], "ppo", {}, "lacks advantages, which ppo needs"),
        ([one_of()], "cross_entropy", {"beta": 1.0}, "has no option beta"),
        ([one_of(), one_of([1, 256])], "cross_entropy", {}, "data[1].model_input: holds token 256"),
        ([one_of([1, -1])], "cross_entropy", {}, "holds token -1"),
        ([one_of(target_tokens=[1, 999])], "cross_entropy", {}, "target_tokens: holds token 999"),
        ([one_of([])], "cross_entropy", {}, "has 0 tokens; the model takes 1 to 24"),
        ([one_of([1] * 25)], "cross_entropy", {}, "has 25 tokens"),
        ([one_of(weights=[1.0])], "cross_entropy", {}, "weights: has shape [1]"),
        ([one_of(weights=[1.0, float("nan")])], "cross_entropy", {}, "not finite"),
        ([one_of(weight=[1.0, 1.0])], "cross_entropy", {}, 'did you mean "weights"'),
        ([one_of()._replace(tokens=np.array([0.5, 1.0]))], "cross_entropy", {}, "use whole numbers"),
    ],
)  # fmt: skip
def test_what_could_not_run_is_refused_before_it_is_queued(
    data: list[Datum], loss: str, options: dict[str, float], said: str
) -> None:
    with pytest.raises(SpecError) as error:
        check(data, loss, options, Limits(256, 24))
    assert said in str(error.value)


def test_an_update_needs_gradients_and_numbers_in_range(session_of: Opened) -> None:
    session = session_of(job_of({}))
    with pytest.raises(SpecError, match="no forward_backward has come"):
        session.optim_step(AdamW())
    session.forward_backward([one_of()])
    with pytest.raises(SpecError, match=r"beta2: is 1\.0"):
        session.optim_step(AdamW(betas=(0.9, 1.0)))
    assert session.optim_step(AdamW()).result().step == 1
    with pytest.raises(SpecError, match="no forward_backward has come"):
        session.optim_step(AdamW())


LORA = {"r": 4, "target_modules": "all-linear"}


def whole_model(job: JobSpec) -> torch.nn.Module:
    """The model of transformers, or peft's over it, with the start values of a session."""
    model = HuggingFace(job.model).build().double()
    start = build_model(job, None, 0)
    model.load_state_dict(start.build_stage(range(start.count), job.train.seed).named(), strict=False)
    return model


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({}, GPT),
        ({"schedule": "chimera"}, {**QWEN3, "lora": LORA}),
        *exhaustive(({"schedule": "zb-h1"}, {**QWEN3, "lora": LORA}), ({"stages": 1, "replicas": 2}, GPT)),
    ],
    ids=["whole", "adapters, chimera", "adapters, zb-h1", "whole, replicas"],
)
def test_models_whose_calls_take_turns_equal_each_alone(
    session_of: Opened, tmp_path: Path, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    """Also where one is called between another's gradients and its update, and where one begins as a copy."""
    job, rng = job_of(parallel, model), random.Random(11)
    session = session_of(job)
    session.save(tmp_path / "start").result()
    plain = [PlainCalls(whole_gpt(job) if model is GPT else whole_model(job)) for _ in range(3)]
    for slot in range(3):
        session.load(tmp_path / "start", with_optimizer=False, slot=slot)
    waiting: set[int] = set()
    for turn in range(30):
        slot = rng.randrange(3)
        if slot in waiting and rng.random() < 0.5:
            waiting.discard(slot)
            adam = AdamW(lr=0.01 * (slot + 1), eps=1e-8, weight_decay=0.1, clip=rng.choice([None, 1.0]))
            result = session.optim_step(adam, slot).result()
            assert result.grad_norm == pytest.approx(plain[slot].optim_step(adam), abs=1e-9), turn
        else:
            waiting.add(slot)
            data = sampled(rng, "ppo", rng.randint(1, 5))
            outputs = session.forward_backward(data, "ppo", slot=slot).result()
            assert outputs.loss_sum == pytest.approx(plain[slot].forward_backward(data, "ppo")[0], abs=1e-9), turn
    session.save(tmp_path / "saved", 1).result()
    session.free(0)
    session.load(tmp_path / "saved", with_optimizer=True, slot=0)
    data = sampled(rng, "cross_entropy", 4)
    plain[1].optimizer.zero_grad()
    session.forward_backward(data, slot=0)
    plain[1].forward_backward(data, "cross_entropy")
    adam = AdamW(lr=0.01, eps=1e-8)
    result = session.optim_step(adam, 0).result()
    assert (result.step, result.grad_norm) == (1, pytest.approx(plain[1].optim_step(adam), abs=1e-9))
    assert 0 <= result.between_calls <= result.bubble_ratio < 1
    expected, _ = plain[1].forward_backward(data, "cross_entropy")  # with the weights that the optimizer's state led to
    assert session.forward(data, slot=0).result().loss_sum == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({}, GPT),
        ({"schedule": "zb-h1"}, {**QWEN3, "lora": LORA}),
        *exhaustive(({"schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"}, GPT)),
    ],
    ids=["whole", "adapters, zb-h1", "whole, interleaved, recomputed"],
)
def test_calls_of_several_models_in_one_pass_equal_each_alone(
    session_of: Opened, tmp_path: Path, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    """With a loss of each one's own, and gradients that some of them have from calls before."""
    job, rng = job_of(parallel, model), random.Random(13)
    session = session_of(job)
    assert session.mixes
    session.save(tmp_path / "start").result()
    plain = [PlainCalls(whole_gpt(job) if model is GPT else whole_model(job)) for _ in range(3)]
    for slot in range(3):
        session.load(tmp_path / "start", with_optimizer=False, slot=slot)
    for turn in range(5):
        losses = rng.sample(list(LOSSES), 3)
        calls = [Call(sampled(rng, loss, rng.randint(1, 5)), loss, {}, slot) for slot, loss in enumerate(losses)]
        runs = session._calls
        queued = session.together("backward", calls) + session.together("forward", calls[1:])
        assert session._calls == runs + 2
        if turn % 2:
            more = Call(sampled(rng, "ppo", 2), "ppo", {LOW: 0.5, HIGH: 0.9}, 1)
            queued += session.together("backward", [more, calls[0]])
        for slot, (call, one) in enumerate(zip(queued, calls, strict=False)):
            expected, logprobs = plain[slot].forward_backward(one.data, one.loss)
            assert call.result().loss_sum == pytest.approx(expected, abs=1e-9), turn
            for ours, theirs in zip(call.result().logprobs, logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-9)
        assert [call.result().loss_sum for call in queued[3:5]] == pytest.approx(
            [call.result().loss_sum for call in queued[1:3]], abs=1e-9
        )
        if turn % 2:
            expected, _ = plain[1].forward_backward(more.data, "ppo", 0.5, 0.9)
            assert queued[5].result().loss_sum == pytest.approx(expected, abs=1e-9)
            plain[0].forward_backward(calls[0].data, calls[0].loss)
        for slot in range(3):
            adam = AdamW(lr=0.01 * (slot + 1), eps=1e-8, weight_decay=0.1, clip=1.0)
            norm = session.optim_step(adam, slot).result().grad_norm
            assert norm == pytest.approx(plain[slot].optim_step(adam), abs=1e-9), turn


def test_copies_do_not_mix(session_of: Opened) -> None:
    session = session_of(job_of({"schedule": "chimera"}))
    data = sampled(random.Random(1), "ppo", 2)
    assert not session.mixes
    first, second = session.together("forward", [Call(data, "ppo")] * 2)
    assert first.result().loss_sum == second.result().loss_sum


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": {"optimizer": "sgd"}}, "train.optimizer: sessions run AdamW"),
        ({"parallel": {"schedule": "pipedream-2bw"}}, "keeps several versions of the weights"),
        ({"parallel": {"stages": 1, "replicas": 2, "shard": "zero1"}}, "parallel.shard: sessions run"),
        ({"parallel": {"sync": "prioritised", "stages": 1, "replicas": 2}}, "parallel.sync: sessions run"),
    ],
)
def test_what_sessions_do_not_have_is_refused_by_name(changed: dict[str, dict[str, Any]], said: str) -> None:
    job = job_of(changed.get("parallel", {}), **changed.get("train", {}))
    with pytest.raises(SpecError) as error:
        check_job(job, make_plan(job))
    assert said in str(error.value)


# Models with adapters of their own rank and layers are peft's of that rank and those layers, on the job's pipeline.


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
