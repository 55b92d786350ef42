"""Text from a trained model: the newest checkpoint of a run, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.errors import SpecError
from raypipe.job.spec import ModelSpec
from raypipe.models import build_layers, join_tied
from raypipe.train import saved_model


def load_model(directory: Path) -> tuple[ModelSpec, nn.Sequential]:
    """The whole model of a run with the weights of its newest checkpoint, in evaluation mode.

    Raises:
        SpecError: the directory holds no run, or the run has no checkpoint yet.
    """
    model = saved_model(directory)
    found, notices = latest(directory / "checkpoints")
    if found is None:
        raise SpecError(str(directory), "; ".join(notices) or "has no checkpoint yet", "train it first")
    plan = build_layers(model)
    layers = {i: plan.build(i, seed=0) for i in range(plan.count)}
    join_tied(plan, layers)
    checkpoint = open_checkpoint(found, verify=False)
    with torch.no_grad():
        for i, layer in layers.items():
            for path, parameter in layer.named_parameters():
                owner, owner_path = plan.owner(i, path)
                key = f"param/{owner}.{owner_path}"
                parameter.copy_(checkpoint.read([key])[key])
    return model, nn.Sequential(*layers.values()).eval()


def sample_text(directory: Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    """``prompt`` and ``length`` more bytes drawn from the model, as text; what cannot be shown is U+FFFD."""
    model, network = load_model(directory)
    torch.set_num_threads(1)  # one short window at a time: more threads only wait for each other
    tokens = list(prompt.encode()) or [0]
    if max(tokens) >= model.vocabulary:
        raise SpecError("--prompt", f"holds bytes beyond the vocabulary of {model.vocabulary}", "use plainer text")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(length):
            window = torch.tensor([tokens[-model.sequence :]])
            logits = network(window)[0, -1].float()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                odds = torch.softmax(logits / temperature, dim=0)
                tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    text = bytes(t for t in tokens if t).decode(errors="replace")
    # An untrained model writes control characters too; a terminal must not obey them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
