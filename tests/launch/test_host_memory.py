"""Fixed plans for processor cores of one host are held against its memory before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.launch.plans import planned_as_asked
from raypipe.launch.prepared import JobModel, Prepared, check_host_memory
from raypipe.partition import this_machine

GIB = 2**30
GPT = {"type": "gpt", "layers": 6, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 256, "tie_embeddings": False}
LLAMA = {"hf": "llama", "sequence": 32, "config": {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256,
    "tie_word_embeddings": False,
}}  # fmt: skip


def prepared(model: dict[str, object], batch: int = 8, optimizer: str = "adamw", **parallel: object) -> Prepared:
    job = JobSpec.model_validate({
        "name": "held", "model": model, "data": {"type": "bytes", "path": "stdlib"},
        "train": {"steps": 1, "batch": batch, "optimizer": optimizer, "dtype": "float32"},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 1, **parallel},
    })  # fmt: skip
    planned = planned_as_asked(job, JobModel(job))
    return Prepared(planned.job, planned.model.declared, planned.plan, planned.schedule, Path("run"), False, job)


def count(model: dict[str, object]) -> int:
    job = JobModel(prepared(model).job).declared
    return sum(map(job.parameters, range(job.count)))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["built-in", "captured"])
@pytest.mark.parametrize(("replicas", "optimizer", "each"), [(1, "adamw", 16), (2, "adamw", 16), (2, "sgd", 8)])
def test_a_plan_whose_state_does_not_fit_is_refused(model, replicas, optimizer, each, monkeypatch):
    """Weights and gradients are four bytes a parameter in float32, and AdamW keeps two more of them."""
    state = count(model) * each * replicas
    held = prepared(model, optimizer=optimizer, replicas=replicas)
    monkeypatch.setattr(this_machine, "host_memory_bytes", lambda: state * 0.99)
    with pytest.raises(SpecError, match="weights, gradients and optimizer state of its") as refused:
        check_host_memory(held)
    assert (replicas > 1) == ("parallel.shard: zero3" in refused.value.fix)
    monkeypatch.setattr(this_machine, "host_memory_bytes", lambda: state * 1.01)
    assert check_host_memory(held) is not None  # activations are left
    monkeypatch.setattr(this_machine, "host_memory_bytes", lambda: 100.0 * GIB)
    assert check_host_memory(held) is None


def test_copies_that_divide_their_state_share_the_memory(monkeypatch):
    monkeypatch.setattr(this_machine, "host_memory_bytes", lambda: count(GPT) * 16 * 1.5)
    with pytest.raises(SpecError):
        check_host_memory(prepared(GPT, replicas=2))
    check_host_memory(prepared(GPT, replicas=2, shard="zero3"))
