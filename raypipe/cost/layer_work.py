"""What a layer does with one sample, in operations and bytes: the model without a machine.

Sizes in bytes; operations count a multiply-add as two. Everything grows with the number of samples except what is
called fixed or weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """One task of one layer."""

    flops: float = 0.0
    """Operations of its matrix products, per sample."""
    operands: float = 0.0
    """Activations that the products read and write, per sample."""
    weights: float = 0.0
    """Parameters and their gradients that are read and written, whatever the size of the micro-batch."""
    traffic: float = 0.0
    """What kernels that hardly compute read and write, per sample: norms, activations, sums, attention's softmax."""
    overhead: float = 1.0
    """Launches and half-filled kernels, in those of a transformer block's forward."""

    def seconds(self, samples: int, flops_s: float, bytes_s: float, overhead_s: float) -> float:
        """Time for a micro-batch: products on the roofline (Williams et al. 2009), then what only moves bytes.

        Args:
            samples: size of the micro-batch.
            flops_s: rate of large products, operations per second.
            bytes_s: memory bandwidth, bytes per second.
            overhead_s: of a transformer block's forward.
        """
        products = max(self.flops * samples / flops_s, (self.operands * samples + self.weights) / bytes_s)
        return overhead_s * self.overhead + products + self.traffic * samples / bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer: its tasks, and what it holds in memory. See ``LayerProfile`` for the fields of the same name."""

    name: str
    parameters: int
    forward: Effort
    input_grad: Effort
    weight_grad: Effort
    kept_bytes: float
    kept_fixed_bytes: float = 0.0
    cast_bytes: float = 0.0
    waiting_bytes: float | None = None
    output_bytes: float
    output_floats: float | None = None
    workspace_bytes: float = 0.0
    workspace_fixed_bytes: float = 0.0
    split_workspace_bytes: float | None = None
