"""How to train: the ``train`` section of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypipe.job.field_types import Count, Positive, Share, Spec


class EarlyStopSpec(Spec):
    """When to give up: validation no longer improves."""

    patience: Positive
    """Validations in a row without an improvement after which the run stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much lower than the lowest before a validation loss must be to count as an improvement."""


class TrainSpec(Spec):
    """How to train: optimizer, length, precision, how often to look and to save."""

    steps: Positive
    """Optimizer steps of the whole run."""
    batch: Positive
    """Mini-batch: sequences a step, over all replicas."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """``adamw`` decays weights apart from the gradient; ``adam`` and ``sgd`` add the decay to it."""
    lr: Annotated[float, Field(gt=0)] = 0.001
    """Peak learning rate."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's guard against division by zero."""
    momentum: Share = 0.0
    """SGD's momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay rate, applied to every parameter."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up, from ``lr`` down to ``min_lr`` at the last step."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly to ``lr``."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where ``cosine`` and ``linear`` end."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest global gradient norm (L2, over all stages); null for none."""
    seed: Count = 0
    """Start weights, order of the data and dropout all follow from it."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic. ``bfloat16`` is autocast over float32 weights."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two runs."""
    eval_every: Count = 0
    """Steps between validations; 0 for none but the one at the end."""
    eval_batches: Positive = 8
    """Mini-batches of held-out data per validation."""
    early_stop: EarlyStopSpec | None = None
    """Stop before ``steps`` once validation no longer improves; null to go on to the end."""
    load_best_at_end: bool = False
    """Take the checkpoint with the lowest validation loss as the outcome, instead of the last one."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 for none but the one at the end."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""
    max_failures: Count = 3
    """Restarts from the last checkpoint before the run gives up."""
    wait_for_devices_s: Annotated[float, Field(ge=0)] | None = 3600.0
    """Seconds to wait for devices that other jobs have, or that an autoscaler has yet to start; null for no limit."""
    message_timeout_s: float = 300.0
    """Seconds a device waits for a message before it fails with its name: from 1 to a week."""

    @property
    def crossing_dtype(self) -> str:
        """Of the floating-point tensors between two stages: the weights', which autocast leaves as it is."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint with the lowest validation loss is kept beside the newest."""
        return self.early_stop is not None or self.load_best_at_end
