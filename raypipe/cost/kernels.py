"""How long one device takes for a task's kernels: products by their shape, attention by its kernel, the rest by bytes.

A product takes the longest of three times. Its operations, and the time in which tiles begin and end, go at the rate
that large products keep up, which the power limit holds below the peak. Its tiles, one for each of the device's
processors at a time, go at the peak: while processors idle in the last wave, the others clock higher. Its bytes go
at the memory's bandwidth. Devices whose description has no ``multiprocessors`` take the plain roofline over all
products of a task together, with one fixed overhead per layer.

Sources: NVIDIA, Matrix Multiplication Background User's Guide (tiles, waves); Williams et al. 2009 (roofline); Shah et
al. 2024, FlashAttention-3, figures 5 and 6 (attention). The figures of a device are in ``cluster/devices/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from raypipe.cost.gpt_work import Software
from raypipe.cost.layer_work import Product, TaskWork
from raypipe.errors import SpecError
from raypipe.job.cluster import DeviceModel
from raypipe.job.field_types import FP8, WIDTH, arithmetic

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85))
"""Tiles of cuBLAS and their rates. NVIDIA's guide finds 256 x 128 and 128 x 256 the most efficient; a quadratic one
reads 4/3 as many operands for each operation, and its 0.85 is an estimate."""
PIPELINE = 700
"""Bytes of inner dimension that a tile could have read and multiplied while it fills its pipeline and writes its
result, when tensor cores idle. DeepGEMM's first table (deepseek-ai/DeepGEMM a6d97a1, README.md, FP8 on an H800, 4,096
rows) has 590, 990, 1,025, 1,304 and 1,358 TFLOP/s at inner dimensions of 512, 1,536, 2,048, 7,168 and 16,384:
1,400 K / (K + 700), 4 % off at most. A value of bfloat16 is twice as long and takes twice as long, so 350 values there.
That gives FP8 1.9 times the speed of bfloat16 on the products of a 5B GPT, which is what TransformerEngine's "GEMM
Profiling Tutorial" measured (31.97 to 16.79 ms)."""
HALF_SPEED = 270
"""Positions at which causal attention reaches half of its rate for long sequences. FlashAttention-3, figure 5, causal,
head dimension 128: 298, 319, 333, 335 TFLOP/s of FlashAttention-2 and 484, 518, 529, 539 of cuDNN at 2, 4, 8 and 16
thousand positions."""
WITHOUT_MASK = 1.1
"""Rate of attention without a mask over that of causal attention: 370 to 335, and 595 to 539, in the same figure."""
HEAD = 128
"""Width of a head for which a device's rates of attention hold."""
NARROW = {"flash": (0.89, 0.90), "cudnn": (0.72, 0.84)}
"""Rates of attention's forward and backward with heads 64 wide, over those with heads 128 wide: 299 / 335 and 388 / 539
TFLOP/s (FlashAttention-3, figure 5, causal, 16 thousand positions), 291 / 322 and 433 / 516 (figure 6). Scores take a
softmax each, however wide the heads are."""
WIDE = 4
"""Bytes of a value of a grouped product under autocast."""
BLOCK = 12
"""Kernels of a transformer block's forward, the unit of ``TaskWork.overhead``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The speed of one device's kernels for one arithmetic."""

    flops_s: float
    """Rate that large products keep up, in operations per second."""
    peak_s: float = 0.0
    """Peak, at which tiles go."""
    bytes_s: float
    """Memory bandwidth, in bytes per second."""
    overhead_s: float = 0.0
    """Fixed time of a transformer block's forward."""
    multiprocessors: int = 0
    """Processors, each of which computes one tile of a product at a time; 0: products go by the plain roofline."""
    linear_flops_s: float = 0.0
    """``flops_s`` of linear layers, if another: in FP8."""
    linear_peak_s: float = 0.0
    """``peak_s`` of linear layers, if another."""
    grouped_flops_s: float = 0.0
    """``flops_s`` of experts' grouped products, if another: autocast has no rule for them, so they are in float32."""
    grouped_peak_s: float = 0.0
    """``peak_s`` of grouped products, if another."""
    attention_s: tuple[float, float] = (0.0, 0.0)
    """Rates of causal attention over long sequences, forward and backward; 0: that of products."""
    narrow: tuple[float, float] = (1.0, 1.0)
    """Shares of these rates where heads are half as wide, forward and backward."""
    launch_s: float = 0.0
    """Time in which the host starts one kernel: a task is no shorter than all of its launches."""
    width: int = 2
    """Bytes of a value of a product."""
    cast_bytes: int = 0
    """Bytes moved to cast a value for a product in FP8."""
    fused: bool = False
    """A compiler fuses memory-bound kernels."""

    @staticmethod
    def of(
        device: DeviceModel, dtype: str, software: Software, compiled: bool = False, grouped: bool = False
    ) -> Kernels:
        """Return the kernels of a described device.

        Args:
            device: the description.
            dtype: ``train.dtype``.
            software: the framework: which attention kernel runs, how values are cast.
            compiled: whether a compiler fuses kernels.
            grouped: whether experts' grouped products are among them.

        Raises:
            SpecError: the device has no peak for this dtype, or for that of grouped products.
        """
        peaks = {str(name): 1e12 * tflops for name, tflops in device.peak_tflops.items()}
        shares = {str(name): share for name, share in device.efficiency_by_dtype.items()}
        own = "bfloat16" if dtype == FP8 else arithmetic(dtype)
        experts = "float32" if grouped and dtype == "bfloat16" else own
        for needed in (own, arithmetic(dtype), experts):
            if needed not in peaks:
                fix = f"use {' or '.join(peaks)}, or add one"
                raise SpecError("train.dtype", f"{device.name} has no peak_tflops for {needed}", fix)
        rates = {name: peaks[name] * shares.get(name, device.efficiency) for name in peaks}
        kernel = next((result for name, result in device.attention.items() if name == software.attention), None)
        narrow = arithmetic(FP8)
        return Kernels(
            flops_s=rates[own],
            peak_s=peaks[own],
            linear_flops_s=rates[narrow] if dtype == FP8 else 0.0,
            linear_peak_s=peaks[narrow] if dtype == FP8 else 0.0,
            grouped_flops_s=rates[experts] if experts != own else 0.0,
            grouped_peak_s=peaks[experts] if experts != own else 0.0,
            bytes_s=device.memory_gb_s * 1e9 * device.memory_efficiency,
            overhead_s=device.layer_overhead_us * 1e-6,
            multiprocessors=device.multiprocessors or 0,
            attention_s=(0.0, 0.0) if kernel is None else (kernel.forward * peaks[own], kernel.backward * peaks[own]),
            narrow=NARROW.get(software.attention, (1.0, 1.0)),
            launch_s=(device.compiled_launch_us if compiled else device.launch_us) * 1e-6,
            width=WIDTH[dtype],
            cast_bytes=software.cast_bytes,
            fused=compiled and device.multiprocessors is not None,
        )

    def seconds(self, task: TaskWork, samples: int, backward: bool = False) -> float:
        """Return the seconds of a task of a layer for a micro-batch of so many samples."""
        if not self.multiprocessors:
            grouped = sum(product.flops for product in task.products if product.groups) if self.grouped_flops_s else 0.0
            busy = (task.flops - grouped) / self.flops_s + (grouped / self.grouped_flops_s if grouped else 0.0)
            products = max(busy * samples, (task.operands * samples + task.weights) / self.bytes_s)
            return self.overhead_s * task.overhead + products + task.traffic * samples / self.bytes_s
        shaped = sum(self._product(product, samples) for product in task.products)
        known = sum(product.flops for product in task.products) + task.attention + task.full_attention
        other = max(0.0, task.flops - known) * samples / self.flops_s
        # Weights that products read or write are in their own bytes; the rest is casts and sums of gradients.
        own = sum(_weights(product) * self._rate(product)[2] for product in task.products)
        traffic, overhead = task.traffic, task.overhead
        if self.fused:
            traffic = traffic if task.fused_traffic is None else task.fused_traffic
            overhead = overhead if task.fused_overhead is None else task.fused_overhead
        if self.linear_flops_s:
            traffic += self.cast_bytes * task.quantized
        moved = (traffic * samples + max(0.0, task.weights - own)) / self.bytes_s
        busy = shaped + other + self.attention(task, samples, backward) + moved
        return max(busy, BLOCK * overhead * self.launch_s) + self.overhead_s * overhead

    def attention(self, task: TaskWork, samples: int, backward: bool = False, causal: bool = False) -> float:
        """Return the seconds of fused attention; ``causal``: without that which has no mask."""
        rate = self.attention_s[backward] * task.positions / (task.positions + HALF_SPEED)
        rate = rate * by_head(task.head, self.narrow[backward]) or self.flops_s
        full = 0.0 if causal else task.full_attention / WITHOUT_MASK
        return (task.attention + full) * samples / rate

    def attention_share(self, task: TaskWork, samples: int, backward: bool = False) -> float:
        """Return the share of ``seconds`` that is causal attention."""
        whole = self.seconds(task, samples, backward)
        return min(1.0, self.attention(task, samples, backward, causal=True) / whole) if whole else 0.0

    def _rate(self, product: Product) -> tuple[float, float, int, int]:
        """Return a product's ``flops_s`` and ``peak_s``, and the bytes of a value that it has in memory and reads."""
        if product.groups and self.grouped_flops_s:
            return self.grouped_flops_s, self.grouped_peak_s, WIDE, WIDE
        if product.linear and self.linear_flops_s:
            return self.linear_flops_s, self.linear_peak_s, self.width, 1
        return self.flops_s, self.peak_s, self.width, self.width

    def _product(self, product: Product, samples: int) -> float:
        m, n, k, grows, _, _, experts = product
        m, k = (m * samples, k) if grows == "rows" else (m, k * samples)
        # Experts have tiles of their own, which run side by side as those of one product.
        groups = max(1, experts)
        m, k = (ceil(m / groups), k) if grows == "rows" else (m, ceil(k / groups))
        rate, peak, width, read = self._rate(product)
        moved = groups * (read * (m * k + k * n) + width * m * n) / self.bytes_s
        filled = k + PIPELINE / read
        operations = groups * 2.0 * m * n * filled
        return max(operations / rate, tiled_operations(m, n, filled, self.multiprocessors, groups) / peak, moved)


def by_head(width: int, narrow: float) -> float:
    """Return the share of attention's rate at heads of this width, linear between what is known; ``narrow``: of half.

    >>> [by_head(width, 0.72) for width in (0, 32, 64, 96, 128, 256)]
    [1.0, 0.36, 0.72, 0.86, 1.0, 1.0]
    """
    half = HEAD // 2
    if width >= HEAD or not width:
        return 1.0
    return narrow + (1 - narrow) * (width - half) / half if width > half else narrow * width / half


@lru_cache(maxsize=65536)
def tiled_operations(m: int, n: int, k: float, processors: int, groups: int = 1) -> float:
    """Return the operations of whole waves that compute so many of this product, with the tile that suits it best.

    >>> tiled_operations(2048, 8192, 8192, 128) / (2 * 2048 * 8192 * 8192)  # four full waves
    1.0
    >>> tiled_operations(2048, 8192, 8192, 132) / (2 * 2048 * 8192 * 8192)  # four of 132 tiles
    1.03125
    """
    return min(
        ceil(groups * ceil(m / rows) * ceil(n / columns) / processors) * processors * 2.0 * rows * columns * k / rate
        for rows, columns, rate in TILES
    )


def _weights(product: Product) -> int:
    """Return the values of a product's matrix that does not grow with the micro-batch."""
    inner = product.depth if product.grows == "rows" else product.rows
    return inner * product.columns * max(1, product.groups)
