"""Text from a trained model: the newest checkpoint of a run, or its best one, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from raypipe.checkpoint import buffer_key, open_checkpoint, outcome
from raypipe.data import known_fields
from raypipe.errors import SpecError
from raypipe.job import GptSpec, HfSpec, ImportSpec
from raypipe.models import StageBody, build_model
from raypipe.train import saved_job


def load_model(directory: Path) -> tuple[GptSpec | HfSpec | ImportSpec, StageBody]:
    """The whole model of a run with the weights of its newest or best checkpoint, in evaluation mode.

    Raises:
        SpecError: the directory holds no run, or the run has no checkpoint yet.
    """
    job = saved_job(directory)
    found, notices = outcome(directory / "checkpoints", job.train.load_best_at_end)
    if found is None:
        raise SpecError(str(directory), "; ".join(notices) or "has no checkpoint yet", "train it first")
    model = build_model(job, known_fields(directory / "data"))
    body = model.build_stage(range(model.count), seed=0)
    checkpoint = open_checkpoint(found, verify=False)
    with torch.no_grad():
        for name, parameter in body.named().items():
            key = f"param/{name}"
            parameter.copy_(checkpoint.read([key])[key])
        for one in body.statistics:
            for name, buffer in one.buffers_by_name.items():
                buffer.copy_(checkpoint.read([buffer_key(name)])[buffer_key(name)])
    return job.model, body.eval()


def sample_text(directory: Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    """``prompt`` and ``length`` more bytes drawn from the model, as text; what cannot be shown is U+FFFD."""
    model, network = load_model(directory)
    if not isinstance(model, GptSpec):
        raise SpecError(
            str(directory), "only the built-in GPT writes text here", "`raypipe export` it for transformers"
        )
    torch.set_num_threads(1)  # one short window at a time: more threads only wait for each other
    tokens = list(prompt.encode()) or [0]
    if max(tokens) >= model.vocabulary:
        raise SpecError("--prompt", f"holds bytes beyond the vocabulary of {model.vocabulary}", "use plainer text")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(length):
            window = torch.tensor([tokens[-model.sequence :]])
            logits = network((), {"input_ids": window})[0][0, -1].float()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                odds = torch.softmax(logits / temperature, dim=0)
                tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    text = bytes(t for t in tokens if t).decode(errors="replace")
    # An untrained model writes control characters too; a terminal must not obey them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
