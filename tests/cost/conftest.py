"""A made-up profile with round numbers, so that a stage's costs can be worked out by hand."""

import pytest

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes


def layer(name, unit, parameters, *, kept=100.0, waiting=80.0, output=10.0, **more):
    """Forward takes ``unit`` seconds a sample plus 1; B the same and half more, W half, R as the forward."""
    times = {
        b: TaskTimes(
            forward=1 + unit * b, input_grad=1 + 1.5 * unit * b, weight_grad=1 + 0.5 * unit * b,
            joint=1 + 2 * unit * b, recompute=1 + unit * b,
        )
        for b in (1, 2, 4)
    }  # fmt: skip
    return LayerProfile(
        name=name,
        parameters=parameters,
        times=times,
        kept_bytes=kept,
        waiting_bytes=waiting,
        output_bytes=output,
        **more,
    )


@pytest.fixture
def profile():
    """Embedding, four blocks, head; two devices a host; the first and last layer share 50 values."""
    blocks = [layer(f"block.{i}", 2.0, 20) for i in range(4)]
    return Profile(
        source="measured", device="made up", dtype="float32", devices=8, devices_per_host=2,
        memory_bytes=1e5, base_bytes=1e3,
        layers=(layer("embedding", 0.5, 60, kept=5.0), *blocks, layer("head", 1.0, 55, output=0.0)),
        tied_parameters=50, update_s_per_parameter=0.1,
        inside=LinkFit(alpha_s=1.0, beta_s_per_byte=0.01), between=LinkFit(alpha_s=5.0, beta_s_per_byte=0.1),
    )  # fmt: skip
