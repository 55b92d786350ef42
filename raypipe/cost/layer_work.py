"""The work of a layer for one sample, in operations and bytes: the costs of a model before a machine is chosen.

Sizes are in bytes, and a multiply-add counts as two operations. Everything grows with the number of samples except
fields named fixed or weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """The work of one task of one layer."""

    flops: float = 0.0
    """Operations of its matrix products, per sample."""
    operands: float = 0.0
    """Bytes of activations that the products read and write, per sample."""
    weights: float = 0.0
    """Bytes of parameters and their gradients that are read and written, whatever the size of the micro-batch."""
    traffic: float = 0.0
    """Bytes that memory-bound kernels read and write, per sample: norms, activations, sums, attention's softmax."""
    attention: float = 0.0
    """The part of ``flops`` that is causal attention."""
    overhead: float = 1.0
    """Time of launches and half-filled kernels, relative to the overhead of a transformer block's forward."""

    def seconds(self, samples: int, flops_s: float, bytes_s: float, overhead_s: float) -> float:
        """Return the seconds for a micro-batch: products on the roofline (Williams et al. 2009), then memory traffic.

        Args:
            samples: size of the micro-batch.
            flops_s: rate of large products, in operations per second.
            bytes_s: memory bandwidth, in bytes per second.
            overhead_s: overhead of a transformer block's forward, in seconds.
        """
        products = max(self.flops * samples / flops_s, (self.operands * samples + self.weights) / bytes_s)
        return overhead_s * self.overhead + products + self.traffic * samples / bytes_s

    def attention_share(self, samples: int, flops_s: float, bytes_s: float, overhead_s: float) -> float:
        """Return the share of ``seconds`` that is causal attention, at the rate of large products."""
        whole = self.seconds(samples, flops_s, bytes_s, overhead_s)
        return min(1.0, self.attention * samples / flops_s / whole) if whole else 0.0

    @property
    def attention_operations(self) -> float:
        """The share of the products' operations that is causal attention."""
        return self.attention / self.flops if self.flops else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work and memory of one layer. See ``LayerProfile`` for the fields of the same name."""

    name: str
    parameters: int
    trained_parameters: int | None = None
    forward: TaskWork
    input_grad: TaskWork
    weight_grad: TaskWork
    kept_bytes: float
    unread_input_bytes: float = 0.0
    kept_fixed_bytes: float = 0.0
    cast_bytes: float = 0.0
    waiting_bytes: float | None = None
    output_bytes: float
    output_floats: float | None = None
    workspace_bytes: float = 0.0
    workspace_fixed_bytes: float = 0.0
    split_workspace_bytes: float | None = None
    key_value_bytes: float = 0.0
