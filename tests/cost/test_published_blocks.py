"""The presets against published times and memory of one BERT-Large block on those very devices.

Hidden 1024, 16 heads, 128 tokens, float32 (on the RTX 3090 with PyTorch's TF32 default of the time): milliseconds of a
forward and of a joint backward by micro-batch size. Source: Osawa, Li, Hoefler 2023 (PipeFisher, arXiv:2211.14133),
``prof/bert-large_time_memory_*.csv`` in the authors' repository.
"""

from pathlib import Path

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import PYTORCH_2020, gpt_work
from raypipe.job import GptSpec, load_cluster

SIZES = (1, 2, 4, 8, 16, 32, 64)
FORWARD = {
    "p100": (1.1625, 1.5150, 2.5176, 4.5000, 9.2986, 16.1004, 31.0692),
    "v100": (1.3056, 1.5839, 1.9019, 2.9013, 5.4378, 10.3864, 19.9766),
    "rtx3090": (0.8505, 0.8574, 1.0400, 1.3435, 2.4597, 4.8538, 9.0997),
}
BACKWARD = {
    "p100": (1.6712, 2.5648, 4.1982, 7.6532, 14.8756, 26.9529, 52.8838),
    "v100": (1.2356, 1.5566, 2.6045, 4.5482, 8.6031, 16.2849, 32.2890),
    "rtx3090": (0.9843, 0.9887, 1.3376, 2.2560, 4.1509, 7.7770, 14.8202),
}
KEPT_MIB = 11.001953125
"""Memory that a forward of one sample leaves behind, its output included."""
BLOCK = gpt_work(
    GptSpec(layers=1, hidden=1024, heads=16, sequence=128, vocabulary=30522, dropout=0.1), "float32", PYTORCH_2020
)[1]


@pytest.mark.parametrize(
    ("preset", "typical", "worst"), [("p100", 0.05, 0.14), ("v100", 0.105, 0.20), ("rtx3090", 0.095, 0.21)]
)
def test_times(preset, typical, worst):
    """Root mean square and worst relative error over both tasks and all sizes."""
    cluster = load_cluster(Path(__file__).parents[2] / "cluster" / "devices" / f"{preset}.yaml")
    (layer,) = analytic_profile([BLOCK], cluster, "float32", SIZES).layers
    errors = []
    for size, forward, backward in zip(SIZES, FORWARD[preset], BACKWARD[preset], strict=True):
        times = layer.times[size]
        errors += [1e3 * times.forward / forward - 1, 1e3 * times.joint / backward - 1]
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < typical
    assert max(map(abs, errors)) < worst


def test_memory():
    """To the byte."""
    assert (BLOCK.kept_bytes + BLOCK.output_bytes) / 2**20 == KEPT_MIB
