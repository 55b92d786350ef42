"""Bytes of one stage, by what they are for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from raypipe.cost.memory.parameter import ParameterBytes
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.stages import expert_parameters, matrix_values, narrow_bytes, parameters, trained_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one replica of a stage; activations and messages are those of one micro-batch."""

    weights: float
    """Those that are trained."""
    experts: float
    """The part of ``weights`` that belongs to experts which copies divide."""
    frozen: float
    """Weights that are not trained. Every holder has all of them, and one copy whatever the versions of the others."""
    gradients: float
    optimizer: float
    """Optimizer state, with the master weights where there are any."""
    update: float
    """Gradients in float32 while the optimizer updates master weights."""
    casts: float
    """Autocast's narrow copies of the weights."""
    narrow: float
    """The part of ``casts`` that needs no copy where copies of the stage gather weights: they arrive narrow."""
    reduced: float
    """The flat vector in which gradients are all-reduced; those of a tied matrix are reduced apart, in place."""
    kept: float
    """Activations from the forward to the backward, the stage's output included."""
    kept_for_w: float
    """Activations from B to W, where the backward is split."""
    kept_for_r: float
    """Activations from the forward to its recompute: the input, and what layers keep that are not recomputed."""
    input: float
    """What the stage before sent."""
    output: float
    """What goes to the next stage; the last one's is a number, and counts as nothing."""
    key_gradients: float
    """Gradients of keys and values of one slice, from the backward of the slice after it to its own."""
    workspace: float
    """Temporary memory at the worst moment of a backward, beside what is kept at its start."""
    first_workspace: float
    """The same where the backward finds no gradients to add to, with those that it has allocated so far."""

    @property
    def state(self) -> float:
        """Return what is held throughout a step: weights and optimizer state."""
        return self.weights + self.frozen + self.optimizer

    def divided(self, level: int, group: int, again: int = 1) -> StageMemory:
        """Return what one of ``group`` holders has of it that divide the stage at this ZeRO level.

        ``again``: those of them that hold the same experts, and divide these again (``sharding.copies_of_experts``).

        Source: Rajbhandari et al. 2020 (ZeRO), section 5.
        """
        dense = 1 - self.experts / self.weights if self.experts else 1.0
        optimizer, gradients, weights = (
            dense / group + (1 - dense) / again if level >= least else 1.0 for least in (1, 2, 3)
        )
        return replace(
            self,
            optimizer=optimizer * self.optimizer,
            update=optimizer * self.update,
            gradients=gradients * self.gradients,
            weights=weights * self.weights,
        )

    def shared(self, again: int) -> float:
        """Return the share of the trained parameters that holders may divide: all but experts that they do not divide
        ``again``."""
        return 1 - self.experts / self.weights if self.experts and again == 1 else 1.0

    @property
    def undo(self) -> float:
        """Return what undoing an update copies. Weights are not copied where master weights give them again."""
        return self.optimizer if self.update else self.weights + self.optimizer

    @property
    def slot(self) -> float:
        """Return what graphs of one micro-batch's tasks hold: all that it keeps, temporary memory, and a gradient."""
        return self.kept + self.workspace + self.output

    @property
    def messages(self) -> float:
        """P2P buffers of a backward: the gradient that arrives and the one that is sent on."""
        return self.input + self.output


def kept_bytes(layer: LayerProfile, samples: float, split: bool) -> float:
    """Activations that a layer keeps of one micro-batch from its forward to its backward; ``split`` in B and W."""
    return layer.kept_bytes * samples + (0.0 if split else layer.kept_fixed_bytes)


def stage_memory(
    profile: Profile,
    layers: Sequence[int],
    samples: float,
    each: ParameterBytes,
    *,
    split: bool,
    recomputed: Collection[int] | None = None,
    padding: int = 0,
) -> StageMemory:
    """Memory of the stage that holds these layers.

    Args:
        profile: what layers keep.
        layers: of the stage, consecutive.
        samples: of one micro-batch.
        each: bytes of a parameter.
        split: the stage's backward is split in B and W.
        recomputed: layers that an R computes again; all of the stage by default.
        padding: trained values by which shards are larger than what they hold (``cost.stages.whole_matrices``).
    """
    own = [profile.layers[i] for i in layers]
    last = len(profile.layers) - 1
    # The executor holds a stage's output, with its graph, until the backward.
    output = own[-1].output_bytes * samples
    before = profile.layers[layers[0] - 1].output_bytes if layers[0] else 0.0
    arriving = (before if own[0].input_bytes is None else own[0].input_bytes) * samples
    values, tied = trained_parameters(profile, layers), profile.trained_tied
    padded = values + padding
    ends = {0, last} & set(layers)
    within = float(tied * each.gradient) if len(ends) == 2 else 0.0
    return StageMemory(
        weights=float(padded * each.weight),
        experts=float(expert_parameters(profile, layers) * each.weight),
        frozen=float((parameters(profile, layers) - values) * each.weight),
        gradients=float(padded * each.gradient),
        optimizer=float(
            padded * (each.optimizer + each.master) + (values - matrix_values(profile, layers)) * each.rest
        ),
        update=float(padded * each.master),
        casts=sum(layer.cast_bytes for layer in own),
        narrow=narrow_bytes(profile, layers),
        reduced=float((padded - (tied if ends else 0)) * each.gradient),
        kept=(sum(layer.kept_bytes for layer in own) + own[0].unread_input_bytes) * samples
        + output
        + (0.0 if split else sum(layer.kept_fixed_bytes for layer in own)),
        kept_for_w=sum(layer.waiting for layer in own) * samples,
        kept_for_r=_kept_for_r(profile, layers, samples, split, arriving, recomputed),
        input=arriving,
        output=output,
        key_gradients=sum(layer.key_value_bytes for layer in own) * samples,
        workspace=_workspace(own, samples, split, within),
        first_workspace=_workspace(own, samples, split, within, 0.0 if split else float(each.gradient)),
    )


def shares_input(placement: Sequence[Sequence[int]]) -> list[bool]:
    """Per stage, whether its input is the very tensor that the stage before, on the same device, keeps as output."""
    return [s > 0 and all(row[s] == row[s - 1] for row in placement) for s in range(len(placement[0]))]


def _kept_for_r(
    profile: Profile,
    layers: Sequence[int],
    samples: float,
    split: bool,
    arriving: float,
    recomputed: Collection[int] | None,
) -> float:
    held, before = arriving, True
    for i in layers:
        remade = recomputed is None or i in recomputed
        if not remade:
            held += kept_bytes(profile.layers[i], samples, split)
        if remade != before and i > layers[0]:  # what joins two segments is held beside what they keep
            held += profile.layers[i - 1].output_bytes * samples
        before = remade
    return held


def last_workspace(layer: LayerProfile, split: bool) -> tuple[float, float]:
    """Return the workspace of a stage's backward while it is in its last layer, this one, where it begins.

    These are bytes of each sample, and of any number.
    """
    if not split:
        return layer.workspace_bytes, layer.workspace_fixed_bytes + layer.chunk_bytes
    own = layer.workspace_bytes if layer.split_workspace_bytes is None else layer.split_workspace_bytes
    return own, layer.chunk_bytes


def _workspace(
    layers: Sequence[LayerProfile], samples: float, split: bool, tied: float, gradient: float = 0.0
) -> float:
    """The worst moment of a stage's backward beside all that is kept at its start.

    By the time it reaches an earlier layer, what later ones kept is gone, and there are their gradients of ``gradient``
    bytes a value where it allocates these. ``tied`` bytes are the gradient of a matrix that first and last layer share:
    autograd holds the last layer's until it can add the first one's to it. A compiled backward is one program: what it
    reads is there until it ends, and the operands of weight gradients of later layers are there beside it.
    """
    worst = freed = 0.0
    for k, layer in enumerate(reversed(layers)):
        each, fixed = last_workspace(layer, split)
        worst = max(worst, each * samples + fixed - freed)
        if split:
            gone = (layer.kept_bytes - layer.waiting) * samples
        else:
            if tied and k == len(layers) - 1:  # its own, and the sum
                worst = max(worst, layer.workspace_bytes * samples + 2 * tied - freed)
            # A tied matrix, of which the stage has one gradient, counts with the last layer as held for the first.
            allocated = layer.trained * gradient - (tied if gradient and k == len(layers) - 1 else 0.0)
            gone = kept_bytes(layer, samples, split) - allocated - (tied if k == 0 and not gradient else 0.0)
        freed += gone if layer.operand_bytes is None else -layer.operand_bytes * samples
        if gradient:
            worst = max(worst, -freed)
    return worst
