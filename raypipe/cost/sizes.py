"""Interpolate task times to micro-batch sizes that were not profiled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from raypipe.cost.profile import LayerProfile, Profile, TaskTimes

FIELDS = ("forward", "input_grad", "weight_grad", "joint", "recompute")


def times_at(layer: LayerProfile, samples: float) -> TaskTimes:
    """Return a layer's task times for a micro-batch of ``samples``: measured, or interpolated linearly.

    Beyond the largest profiled size, times are extrapolated along the line through the last two sizes (with one size:
    in proportion). Below the smallest size they stay constant, because the overhead there is unknown.
    """
    if samples in layer.times:
        return layer.times[int(samples)]
    known = sorted(layer.times)
    if samples < known[0] or len(known) == 1:
        times = layer.times[known[0]]
        if samples <= known[0]:
            return times
        factor = samples / known[0]
        return times.model_copy(update={f: getattr(times, f) * factor for f in FIELDS})
    right = min(max(bisect_left(known, samples), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    share = (samples - low) / (high - low)
    a, b = layer.times[low], layer.times[high]
    mixed = {f: getattr(a, f) + share * (getattr(b, f) - getattr(a, f)) for f in FIELDS}
    # Noise can make times fall with size; an extrapolated time is never below the last measured one.
    return b.model_copy(update={f: max(v, getattr(b, f)) if share > 1 else v for f, v in mixed.items()})


def slice_times(layer: LayerProfile, samples: float, slices: int) -> TaskTimes:
    """Return the mean task times of a layer for one of ``slices`` slices of a micro-batch of ``samples``.

    A slice has as many positions as a micro-batch of so many samples fewer. Where that is below the smallest profiled
    size, the overhead of a task is where the line through the two smallest sizes meets 0, and the rest is divided.
    """
    known = sorted(layer.times)
    if slices == 1 or samples / slices >= known[0]:
        return times_at(layer, samples / slices)
    whole = times_at(layer, samples)

    def of(field: str) -> float:
        if len(known) == 1:
            return float(getattr(whole, field)) / slices
        low, high = (getattr(layer.times[n], field) for n in known[:2])
        overhead = min(max(0.0, low - (high - low) / (known[1] - known[0]) * known[0]), getattr(whole, field))
        return float(overhead + (getattr(whole, field) - overhead) / slices)

    return whole.model_copy(update={field: of(field) for field in FIELDS})


OF_A_SAMPLE = (
    "kept_bytes",
    "unread_input_bytes",
    "waiting_bytes",
    "read_bytes",
    "output_bytes",
    "output_floats",
    "message_bytes",
    "workspace_bytes",
    "split_workspace_bytes",
    "operand_bytes",
    "key_value_bytes",
)
"""Fields of a layer that shrink with a sample's sequence, at least in proportion."""
GATHERED = 3
"""Keys and values of all positions that the fullest moment of a divided attention holds, its own aside: their
gradients, these in the order in which they are sent, and what has arrived."""


def divided_sequences(profile: Profile, copies: int) -> Profile:
    """Return the costs on each of ``copies`` devices that divide every sequence (``parallel.context``).

    A sample is then a share of one, which takes as long as a slice does on average: chunks from both ends of a sequence
    have as much of causal attention together. Keys and values of all positions are gathered, and the fullest moment of
    their attention is counted beside that of all else.
    """

    def of(layer: LayerProfile) -> LayerProfile:
        own = {name: getattr(layer, name) for name in OF_A_SAMPLE if name != "read_bytes"}  # each reads whole samples
        shares = {name: value / copies for name, value in own.items() if value is not None}
        gathered = GATHERED * layer.key_value_bytes
        for name in ("workspace_bytes", "split_workspace_bytes"):
            if name in shares:
                shares[name] += gathered
        times = {samples: slice_times(layer, samples, copies) for samples in layer.times}
        return layer.model_copy(update={**shares, "times": times, "exchanged_bytes": layer.key_value_bytes})

    return profile.each_kind(
        lambda kind: kind.model_copy(update={"layers": tuple(map(of, kind.layers)), "context": copies})
    )


def stage_times(layers: Sequence[LayerProfile], samples: float, share: float = 1.0, slices: int = 1) -> TaskTimes:
    """Return the sum of the layers' task times for a micro-batch of ``samples``, or a slice, times ``share``."""
    each = [slice_times(layer, samples, slices) for layer in layers]
    return TaskTimes(
        forward=share * sum([t.forward for t in each]),
        input_grad=share * sum([t.input_grad for t in each]),
        weight_grad=share * sum([t.weight_grad for t in each]),
        joint=share * sum([t.joint for t in each]),
        recompute=share * sum([t.recompute for t in each]),
    )


@dataclass(eq=False)
class StageTimes:
    """Times of stages of one model; of stages whose layers are alike, and a search asks for many of these, once."""

    layers: tuple[LayerProfile, ...]
    kinds: list[int] = field(init=False)
    """Of each layer: the first one that is alike but for its name."""
    trained: list[int] = field(init=False)
    """Of each layer: how many parameter values it trains."""
    _times: dict[tuple[tuple[int, ...], float, float, int], TaskTimes] = field(default_factory=dict)
    _attention: dict[tuple[tuple[int, ...], float, float, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first: dict[str, int] = {}
        looks = (layer.model_dump_json(exclude={"name"}) for layer in self.layers)
        self.kinds = [first.setdefault(look, n) for n, look in enumerate(looks)]
        self.trained = [layer.trained for layer in self.layers]

    def times(self, stage: Sequence[int], samples: float, share: float = 1.0, slices: int = 1) -> TaskTimes:
        """Return ``stage_times`` of these layers."""
        key = (tuple([self.kinds[i] for i in stage]), samples, share, slices)
        if key not in self._times:
            self._times[key] = stage_times([self.layers[i] for i in key[0]], samples, share, slices)
        return self._times[key]

    def attention(self, stage: Sequence[int], samples: float, share: float, slices: int) -> tuple[float, float]:
        """Return the seconds of causal attention in a stage's forward and input gradient, of a mean slice."""
        key = (tuple([self.kinds[i] for i in stage]), samples, share, slices)
        if key not in self._attention:
            own = [self.layers[i] for i in key[0]]
            own = [layer for layer in own if layer.attention_share or layer.attention_grad_share]
            times = [stage_times([layer], samples, share, slices) for layer in own]
            self._attention[key] = (
                sum(t.forward * layer.attention_share for t, layer in zip(times, own, strict=True)),
                sum(t.input_grad * layer.attention_grad_share for t, layer in zip(times, own, strict=True)),
            )
        return self._attention[key]


class _Model:
    """Layers as a key: those that are the same objects, as comparing them takes longer than all else."""

    __slots__ = ("layers",)

    def __init__(self, layers: tuple[LayerProfile, ...]) -> None:
        self.layers = layers

    def __hash__(self) -> int:
        return id(self.layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and self.layers is other.layers


def times_of_stages(layers: tuple[LayerProfile, ...]) -> StageTimes:
    """Return the times of a model's stages, the same ones for the same layers."""
    return _of_model(_Model(layers))


@lru_cache(maxsize=64)
def _of_model(model: _Model) -> StageTimes:
    return StageTimes(model.layers)
