"""A layer for tests and benches of which only totals are known."""

from __future__ import annotations

from raypipe.cost.layer_work import LayerWork, TaskWork


def plain_layer(
    name: str, *, flops: float, parameters: int, kept_bytes: float, output_bytes: float, width: int = 4
) -> LayerWork:
    """A layer of which only totals are known, such as a piece of a captured model.

    Each gradient is taken to cost what the forward costs (true of matrix products), and every kept byte to be
    written once and read once.

    Args:
        name: shown in reports.
        flops: operations of the forward on one sample.
        parameters: number of values.
        kept_bytes: activations of one sample kept for the backward.
        output_bytes: of one sample, what crosses a cut behind it.
        width: bytes of a parameter.
    """
    held = float(parameters * width)
    once = TaskWork(flops=flops, operands=kept_bytes, weights=held)
    return LayerWork(
        name=name, parameters=parameters, forward=once, input_grad=once,
        weight_grad=TaskWork(flops=flops, operands=kept_bytes, weights=3 * held),
        kept_bytes=kept_bytes, output_bytes=output_bytes,
    )  # fmt: skip
