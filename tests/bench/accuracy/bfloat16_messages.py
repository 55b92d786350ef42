"""What bfloat16 messages change under bfloat16 autocast: ``python -m tests.bench.accuracy.bfloat16_messages``.

The quickstart GPT in one process, on the CPU, with and without rounding of the residual stream and of its gradient at
the cut between two stages. Prints the largest and the mean difference of the losses over the steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypipe.job.spec import load_job
from raypipe.models import GptLayers, cross_entropy, random_keys
from raypipe.runtime.update.optimizer import learning_rate, make_optimizer, set_rate

STEPS, BATCH = 100, 8


class Rounded(torch.autograd.Function):
    """To bfloat16 and back, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].bfloat16().to(grads[0].dtype)


def losses(casts: bool) -> list[float]:
    job = load_job("jobs/quickstart.yaml")
    spec, train = job.model, job.train.model_copy(update={"steps": STEPS})
    layers = GptLayers(spec)
    built = [layers.build(i, train.seed) for i in range(layers.count)]
    built[-1].project.weight = built[0].token.weight
    model = torch.nn.Sequential(*built)
    optimizer = make_optimizer(train, dict(model.named_parameters()))
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut, result = layers.count // 2, []
    for step in range(STEPS):
        begins = torch.randint(len(data) - spec.sequence, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([data[b : b + spec.sequence + 1] for b in begins.tolist()])
        with random_keys(train.seed, step, range(BATCH), True), torch.autocast("cpu", torch.bfloat16):
            x = rows[:, :-1]
            for i, layer in enumerate(built):
                x = layer(Rounded.apply(x) if casts and i == cut else x)
            loss = cross_entropy(x, rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        set_rate(optimizer, learning_rate(train, step))
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


def main() -> None:
    torch.set_num_threads(1)
    kept, cast = losses(False), losses(True)
    differences = [abs(a - b) for a, b in zip(kept, cast, strict=True)]
    print(f"losses {kept[0]:.4f} to {kept[-1]:.4f}; with bfloat16 messages {cast[0]:.4f} to {cast[-1]:.4f}")
    print(f"difference: mean {sum(differences) / STEPS:.1e}, largest {max(differences):.1e} nats")


if __name__ == "__main__":
    main()
