"""The cases: eight models on six clusters, as profiles that every system is given.

Times are FLOPs over the rate that a device reaches with that kind of layer (``tests/bench/search/joint_models.py``); a
sample is 4,096 tokens. A micro-batch pays for a tenth of a sample once, so that larger ones are a little faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from tests.bench.search.joint_models import RATE, TOKENS, LayerKind, deepseek, gemma, gpt, nemotron

Model = list[tuple[str, LayerKind, float]]
"""Name and costs of each layer, and the values a token that it sends on."""
ONCE = 0.1
MICROBATCHES = (1, 2, 4)
TENSOR = (1, 2, 4, 8)
SAMPLES, FEWER, MANY = 2, 1, 64
"""Of a mini-batch, per device; fewer where there are many devices, as a mini-batch does not grow with the cluster."""
GIB = 2**30


class Cluster(NamedTuple):
    about: str
    devices: int
    per_host: int
    memory: float
    inside: float
    """Bytes a second, between two devices of a host."""
    between: float
    """Of a host's one network card."""


class Case(NamedTuple):
    model: str
    cluster: Cluster
    profiles: dict[int, Profile]
    """By the size of the tensor-parallel groups, which count as one device: see ``_profile``."""
    batch: int
    is_gpt: bool
    """The kind of model that raypipe computes the costs of divided layers for."""

    @property
    def name(self) -> str:
        """The model on the cluster."""
        return f"{self.model} on {self.cluster.about}"


def _sent(layers: list[tuple[str, LayerKind]], values: float) -> Model:
    return [(name, kind, values) for name, kind in layers]


def encoder_decoder(each: int = 24, hidden: int = 4096, vocabulary: int = 32_128) -> Model:
    """As T5: targets are a quarter as long as sources; what the encoder found travels on with every decoder layer."""
    encoder = LayerKind(24 * hidden**2 + 2 * TOKENS * hidden, 12 * hidden**2, 17 * hidden)
    decoder = LayerKind((24 + 4) * hidden**2 / 4 + 4 * hidden**2, 16 * hidden**2, 17 * hidden / 2)
    embedding, head = gpt(0, hidden, vocabulary)
    last = head[1]._replace(flops=head[1].flops / 4, kept=head[1].kept / 4)
    return [
        (*embedding, hidden), *[("encoder", encoder, hidden)] * each, *[("decoder", decoder, 1.25 * hidden)] * each,
        ("head", last, 0.0),
    ]  # fmt: skip


def vision(layers: int = 48, hidden: int = 1664, wide: int = 8192) -> Model:
    """ViT-G/14: no vocabulary, so that both ends are light."""
    block = LayerKind(8 * hidden**2 + 4 * hidden * wide, 4 * hidden**2 + 2 * hidden * wide, 15 * hidden + wide)
    patches = LayerKind(2 * 588 * hidden, 588 * hidden, hidden)
    head = LayerKind(2 * hidden, 1000 * hidden, hidden)
    return [("patches", patches, hidden), *[("block", block, hidden)] * layers, ("head", head, 0.0)]


MODELS: dict[str, Model] = {
    "GPT 1.7B": _sent(gpt(24, 2304, 51_200), 2304),
    "GPT 7.5B": _sent(gpt(36, 4096, 51_200), 4096),
    "GPT 13B": _sent(gpt(40, 5120, 51_200), 5120),
    "Gemma-like": _sent(gemma(), 2304),
    "DeepSeek-like": _sent(deepseek(), 2048),
    "Nemotron-H-like": _sent(nemotron(), 4096),
    "encoder-decoder": encoder_decoder(),
    "ViT-G": vision(),
}
CLUSTERS = (
    Cluster("4, one host, fast, 80 GiB", 4, 4, 80 * GIB, 2e11, 2.5e10),
    Cluster("4, one host, slow, 80 GiB", 4, 4, 80 * GIB, 1.2e10, 2.5e9),
    Cluster("8, one host, slow, 40 GiB", 8, 8, 40 * GIB, 1.2e10, 2.5e9),
    Cluster("8, 2 hosts, fast, 40 GiB", 8, 4, 40 * GIB, 2e11, 2.5e10),
    Cluster("16, 2 hosts, fast, 80 GiB", 16, 8, 80 * GIB, 2e11, 2.5e10),
    Cluster("64, 8 hosts, fast, 80 GiB", 64, 8, 80 * GIB, 2e11, 2.5e10),
)


def cases() -> Iterator[Case]:
    """All, the small clusters first."""
    for cluster in CLUSTERS:
        for name, model in MODELS.items():
            yield case(name, model, cluster)


def case(name: str, model: Model, cluster: Cluster) -> Case:
    """A model on a cluster."""
    profiles = {t: _profile(model, cluster, t) for t in TENSOR if t <= cluster.per_host}
    each = SAMPLES if cluster.devices < MANY else FEWER
    return Case(name, cluster, profiles, each * cluster.devices, name.startswith("GPT"))


def _profile(model: Model, cluster: Cluster, group: int) -> Profile:
    """The cluster of groups of devices that share every layer.

    Weights, activations and work are divided; each layer sums its output over the group twice in a forward and twice in
    a backward, in a ring. A message is divided over the group, whose devices share their host's network card.

    Source: Narayanan et al. 2021, section 2.3; Korthikanti et al. 2022, section 4.2, for activations.
    """
    inside = LinkFit(alpha_s=1e-5, beta_s_per_byte=1 / cluster.inside)
    layers = []
    for i, (name, kind, sent) in enumerate(model):
        work = kind.flops * TOKENS / RATE / kind.share

        def times(n: int, work: float = work, sent: float = sent) -> TaskTimes:
            size = 2.0 * sent * TOKENS * n
            one = 2 * (group - 1) * (inside.alpha_s + size / group * inside.beta_s_per_byte)
            each, sums = work * (n + ONCE) / group, 2 * one
            return TaskTimes(
                forward=each + sums, input_grad=each + sums, weight_grad=each, joint=2 * each + sums,
                recompute=each + sums,
            )  # fmt: skip

        kept = 2.0 * kind.kept * TOKENS / group
        layers.append(
            LayerProfile(
                name=f"{name}.{i}", parameters=int(kind.parameters / group), times={n: times(n) for n in MICROBATCHES},
                kept_bytes=kept, waiting_bytes=kept,
                output_bytes=0.0 if i == len(model) - 1 else 2.0 * sent * TOKENS / group,
            )
        )  # fmt: skip
    return Profile(
        source="analytic", device="made up", dtype="float32", devices=cluster.devices // group,
        devices_per_host=cluster.per_host // group, memory_bytes=cluster.memory, layers=tuple(layers),
        update_s_per_parameter=0.0, inside=inside,
        between=LinkFit(alpha_s=3e-5, beta_s_per_byte=group / cluster.between),
    )  # fmt: skip
