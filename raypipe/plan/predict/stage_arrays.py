"""Seconds and bytes of a cut's stages as arrays, for bounds: sums over runs of layers of what each layer takes.

They are those of ``cost.stages`` and ``cost.memory`` but for messages, which take the faster link here, and collectives
and updates, which take nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.memory import kept_bytes, parameter_bytes
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import FIELDS, times_at, times_of_stages
from raypipe.job.train_spec import TrainSpec
from raypipe.schedule.kinds import Kind

Array = NDArray[np.float64]
Cut = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The times of a ``CostTable`` that bounds read."""

    forward: Array
    input_grad: Array
    weight_grad: Array
    recompute: Array
    links: Array
    update: Array
    all_reduce: Array
    gather: Array
    reduce_scatter: Array
    attention: Array
    attention_grad: Array
    """The parts that grow along a sequence: nothing, as no micro-batch is in slices here."""

    def by_kind(self, kind: Kind) -> Array:
        """Seconds of F, B or W."""
        return {"F": self.forward, "B": self.input_grad}.get(kind, self.weight_grad)


@dataclass
class StageArrays:
    """Sums over layers of one profile of one kind of device."""

    profile: Profile
    train: TrainSpec
    _times: dict[int, dict[str, Array]] = field(default_factory=dict)
    _sizes: dict[str, Array] = field(default_factory=dict)

    def times(self, microbatch: int) -> dict[str, Array]:
        """Per field of ``TaskTimes``, the seconds of each layer; layers that are alike are looked up once."""
        if microbatch not in self._times:
            layers, kinds = self.profile.layers, times_of_stages(self.profile.layers).kinds
            known = {kind: times_at(layers[kind], microbatch) for kind in set(kinds)}
            self._times[microbatch] = {
                name: np.array([getattr(known[kind], name) for kind in kinds]) for name in FIELDS
            }
        return self._times[microbatch]

    def seconds(self, cut: Cut, microbatch: int, split: bool, share: float, frozen: Sequence[int]) -> StageSeconds:
        """Return the seconds of stages for a full micro-batch.

        Args:
            cut: layers of each stage.
            microbatch: samples.
            split: whether backwards are split; otherwise B and W are the parts of a joint one.
            share: of a layer's time, with as many devices of a host at work as there will be.
            frozen: stages without a trained parameter.
        """
        p, starts, extra = self.profile, [layers[0] for layers in cut], self.profile.task_overhead_s
        times = {name: share * np.add.reduceat(each, starts) for name, each in self.times(microbatch).items()}
        inputs, weight = times["input_grad"] + extra, times["weight_grad"] + extra
        weight[list(frozen)] = 0.0
        if not split:
            both = inputs + weight
            scale = np.where(both > 0, (times["joint"] + extra) / np.maximum(both, 1e-300), 1.0)
            inputs, weight = inputs * scale, weight * scale
        inputs[: next((s for s in range(len(cut)) if s not in frozen), 0)] = 0.0
        sent = self._size("sent_bytes")[[layers[-1] for layers in cut]] * microbatch
        none = np.zeros(len(cut))
        return StageSeconds(
            forward=times["forward"] + extra,
            input_grad=inputs,
            weight_grad=weight,
            recompute=times["recompute"] + extra,
            links=np.minimum(*(link.alpha_s + link.beta_s_per_byte * sent for link in (p.inside, p.between))),
            update=none,
            all_reduce=none,
            gather=none,
            reduce_scatter=none,
            attention=none,
            attention_grad=none,
        )

    def bytes(self, cut: Cut, microbatch: int, split: bool, level: int, group: int) -> dict[str, Array]:
        """Return, per field of ``StageMemory`` that bounds read, its bytes by stage, for full micro-batches; of shards
        (``level``, over ``group`` copies), those always there."""
        p, starts, ends = self.profile, [layers[0] for layers in cut], [layers[-1] for layers in cut]
        each = parameter_bytes(p.dtype, self.train.optimizer, self.train.momentum)
        values, held = (np.add.reduceat(self._size(name), starts) for name in ("trained", "parameters"))
        if len(cut) == 1:
            values, held = values - p.trained_tied, held - p.tied_parameters
        reduced = values.copy()
        reduced[[0, -1][: len(cut)]] -= p.trained_tied
        output = self._size("output_bytes")[ends] * microbatch
        arriving = np.concatenate([[0.0], output[:-1]])
        fixed = 0.0 if split else np.add.reduceat(self._size("kept_fixed_bytes"), starts)
        kept = np.add.reduceat(self._size("kept_bytes"), starts) + self._size("unread_input_bytes")[starts]
        optimizer, gradients, weights = (group if level >= least else 1 for least in (1, 2, 3))
        return {
            "weights": values * each.weight / weights,
            "gathered": values * each.weight * (level == 3),
            "frozen": (held - values) * each.weight,
            "gradients": values * each.gradient / gradients,
            "summing": values * each.gradient * (level >= 2),
            "optimizer": values * (each.optimizer + each.master) / optimizer,
            # 16-bit copies of weights that are gathered go with these.
            "casts": np.add.reduceat(self._size("cast_bytes"), starts),
            "reduced": reduced * each.gradient,
            "kept": kept * microbatch + output + fixed,
            "kept_for_w": np.add.reduceat(self._size("waiting"), starts) * microbatch,
            "input": arriving,
        }

    def kept(self, microbatch: int, split: bool) -> Array:
        """Per layer, the bytes of activations that it keeps of a micro-batch."""
        return np.array([kept_bytes(layer, microbatch, split) for layer in self.profile.layers])

    def _size(self, name: str) -> Array:
        """Per layer, a field of its profile."""
        if name not in self._sizes:
            self._sizes[name] = np.array([float(getattr(layer, name)) for layer in self.profile.layers])
        return self._sizes[name]
