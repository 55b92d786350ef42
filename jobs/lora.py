"""A Hugging Face causal language model with low-rank adapters: the model of jobs/lora.yaml.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1: a frozen projection W gains
(alpha / rank) * up @ down, where down is drawn and up begins at zero, so that the model begins as it was.
"""

from typing import Any

from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def build(
    type: str = "llama", config: dict[str, Any] | None = None, rank: int = 8, alpha: float = 16.0,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
) -> nn.Module:  # fmt: skip
    """Build the model from its configuration, with random weights, and train its adapters alone.

    Args:
        type: model type of transformers whose projections are ``nn.Linear``.
        config: its configuration, over the defaults.
        rank: of every adapter.
        alpha: scale of every adapter, times its rank.
        targets: names of the projections that get one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(type, **(config or {})))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in targets and isinstance(layer, nn.Linear):
                setattr(parent, name, LowRankLinear(layer, rank, alpha))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type} has no nn.Linear named {', '.join(targets)}: name its projections in model.args.targets"
        )
    return model
