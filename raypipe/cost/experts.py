"""Costs of experts divided over devices: what tokens' way to them and back takes, and how uneven loads are.

A device of a group of E sends each of its tokens once to every device that holds an expert which the router chose for
it, and gets as many results back; it computes the rows of 1/E of the experts for the tokens of all. The busiest device
of a layer gets ``imbalance`` times the mean, and all others wait for it.

Source: Lepikhin et al. 2021 (GShard), section 3.2; Rajbhandari et al. 2022 (DeepSpeed-MoE), section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb
from typing import Any

from raypipe.cost.hosts import Layout
from raypipe.cost.layer_work import ExpertsWork, LayerWork, TaskWork
from raypipe.cost.profile import LayerProfile, Profile, TaskTimes
from raypipe.errors import SpecError
from raypipe.schedule.costs import CostTable


def reached(experts: int, per_token: int, group: int) -> float:
    """Return on how many of ``group`` devices, on average, a token has experts, if any choice is as likely.

    >>> reached(experts=8, per_token=2, group=1), reached(experts=8, per_token=1, group=4)
    (1.0, 1.0)
    >>> reached(experts=4, per_token=2, group=4)
    2.0
    """
    others = experts - experts // group
    return group * (1 - comb(others, per_token) / comb(experts, per_token))


def check_group(experts: int, group: int) -> None:
    """Check that the experts of a layer divide over ``group`` devices.

    Raises:
        SpecError: they do not; it names the nearest number that works.
    """
    if group < 1 or experts % group:
        good = min((n for n in range(1, experts + 1) if experts % n == 0), key=lambda n: abs(n - group))
        raise SpecError("parallel.experts", f"{experts} experts over {group} devices", f"use {good}")


def check_imbalance(imbalance: float, experts: ExpertsWork) -> None:
    """Check that a layer's loads can be so uneven.

    Raises:
        SpecError: they cannot.
    """
    most = experts.experts / experts.per_token
    if not 1 <= imbalance <= most:
        fix = f"use 1 to {most:g}, all tokens on the same {experts.per_token}"
        raise SpecError("parallel.imbalance", f"{imbalance:g}, max / mean", fix)


def divided_experts(work: LayerWork, group: int, imbalance: float = 1.0, copies: float | None = None) -> LayerWork:
    """Return the work of a layer on the busiest of ``group`` devices that divide its experts.

    It holds 1/group of them. It computes as many rows as before, times ``imbalance``, of fewer experts: that is what
    makes its products larger. Tokens are copied to be sent, and summed up where they come from.

    Args:
        work: of the whole layer; without experts, it is returned as it is.
        group: devices, E.
        imbalance: rows of the busiest device, over the mean.
        copies: how often a token is sent on average, what stays included; None: as ``reached`` says.

    Raises:
        SpecError: the experts do not divide, or their loads cannot be so uneven.
    """
    own = work.experts
    if own is None or group == 1:
        return work
    sent, changed = _on_busiest(work, own, group, imbalance, copies)
    gone = own.parameters - own.parameters // group
    weights = 1 - gone / work.parameters
    moved = 2 * (1 + imbalance) * sent  # each sent row is read and written at both ends

    def task(one: TaskWork, share: float, more: float) -> TaskWork:
        grouped = grouped_share(one)
        rows = 1 + (imbalance - 1) * share
        return replace(
            one,
            flops=one.flops * (1 + (imbalance - 1) * grouped),
            operands=one.operands * (1 + (imbalance - 1) * grouped),
            weights=one.weights * weights,
            traffic=one.traffic * rows + more,
            fused_traffic=None if one.fused_traffic is None else one.fused_traffic * rows + more,
            products=tuple(p.of_experts(group, imbalance) for p in one.products),
        )

    rows = 1 + (imbalance - 1) * own.kept
    more = 2 * imbalance * sent
    return replace(
        work,
        **changed,
        forward=task(work.forward, own.traffic, moved),
        input_grad=task(work.input_grad, own.back_traffic, moved),
        weight_grad=task(work.weight_grad, own.back_traffic, 0.0),
        fused_kept_bytes=None if work.fused_kept_bytes is None else work.fused_kept_bytes * rows,
        fused_workspace_bytes=None
        if work.fused_workspace_bytes is None
        else work.fused_workspace_bytes * imbalance + more,
        experts=own._replace(parameters=own.parameters - gone),
    )


def grouped_share(*tasks: TaskWork) -> float:
    """Return the share of the tasks' operations that are experts' grouped products."""
    every = sum(task.flops for task in tasks)
    return sum(p.flops for task in tasks for p in task.products if p.groups) / every if every else 0.0


def _on_busiest(
    of: LayerWork | LayerProfile, own: ExpertsWork, group: int, imbalance: float, copies: float | None = None
) -> tuple[float, dict[str, Any]]:
    """Return the bytes that a device sends of a sample, and what else than times changes on the busiest device.

    Arguments and errors are those of ``divided_experts``.
    """
    check_group(own.experts, group)
    check_imbalance(imbalance, own)
    gone = own.parameters - own.parameters // group
    sent = (reached(own.experts, own.per_token, group) if copies is None else copies) * own.tokens * own.row_bytes
    rows = 1 + (imbalance - 1) * own.kept
    more = 2 * imbalance * sent  # what arrives, and what is made of it
    trained, waiting, split = of.trained_parameters, of.waiting_bytes, of.split_workspace_bytes
    return sent, {
        "parameters": of.parameters - gone,
        "trained_parameters": None if trained is None else trained - (gone if own.trained else 0),
        "kept_bytes": of.kept_bytes * rows,
        "waiting_bytes": None if waiting is None else waiting * rows,
        "workspace_bytes": of.workspace_bytes * imbalance + more,
        "split_workspace_bytes": None if split is None else split * imbalance + more,
        "workspace_fixed_bytes": max(own.fixed_beside, of.workspace_fixed_bytes / group),
        "exchanged_bytes": sent * imbalance,
    }


def with_divided_experts(
    profile: Profile, group: int, imbalance: float | None = None, orders: Sequence[Sequence[int]] | None = None
) -> Profile:
    """Return a measured profile as it is on the busiest of ``group`` copies that divide the experts of each layer.

    A copy computes as many rows as before, times the imbalance. What larger products gain is not counted: each expert
    gets the rows of all copies, and how much faster that is was not measured.

    Args:
        profile: measured with all experts on each device.
        group: copies, E.
        imbalance: rows of the busiest copy, over the mean; None: as measured.
        orders: of each layer with experts, the order in which copies hold them; empty: ascending, None: the most even.

    Raises:
        SpecError: the experts do not divide, or their loads cannot be so uneven.
    """
    having = [n for n, layer in enumerate(profile.layers) if layer.experts is not None]

    def divided(number: int, layer: LayerProfile) -> LayerProfile:
        own = layer.experts
        if own is None:
            return layer
        check_group(own.work.experts, group)
        order = orders[having.index(number)] if orders else None if orders is None else ()
        uneven = own.imbalance(group, order) if imbalance is None else imbalance
        _, changed = _on_busiest(layer, own.work, group, uneven)

        def longer(seconds: float, share: float) -> float:
            return seconds * (1 + (uneven - 1) * share)

        def task(t: TaskTimes) -> TaskTimes:
            ahead = {name: longer(getattr(t, name), own.forward) for name in ("forward", "recompute")}
            back = longer(t.input_grad, own.input_grad), longer(t.weight_grad, own.weight_grad)
            apart = t.input_grad + t.weight_grad
            joint = t.joint * sum(back) / apart if apart else t.joint
            grads = {"input_grad": back[0], "weight_grad": back[1], "joint": joint}
            return t.model_copy(update={**ahead, **grads})

        held = own.work.parameters // group if own.work.trained else 0
        times = {size: task(t) for size, t in layer.times.items()}
        return layer.model_copy(update={**changed, "times": times, "expert_parameters": held, "experts": None})

    return profile.each_kind(
        lambda one: one.model_copy(
            update={"layers": tuple(divided(n, layer) for n, layer in enumerate(one.layers)), "experts": group}
        )
    )


def all_to_all_seconds(profile: Profile, size_bytes: float, layout: Layout, sharing: int = 1) -> float:
    """Return the seconds of an all-to-all in which each device sends ``size_bytes``, what it keeps included.

    All messages are posted at once, so there is one latency (NCCL's grouped sends and receives: NVIDIA's NCCL User
    Guide, "Point-to-point communication"). Those inside a host and those over its cards travel side by side; the k
    devices of a host share its cards, with those of ``sharing`` groups.

    >>> from raypipe.cost.hosts import Layout
    >>> from raypipe.cost.profile import LinkFit, Profile
    >>> profile = Profile.model_construct(inside=LinkFit(alpha_s=0, beta_s_per_byte=1), other_kinds=(), host_links=1,
    ...     between=LinkFit(alpha_s=0, beta_s_per_byte=8))
    >>> all_to_all_seconds(profile, 8.0, Layout(1, 4)), all_to_all_seconds(profile, 8.0, Layout(2, 4))
    (6.0, 128.0)
    """
    if profile.other_kinds:
        return max(all_to_all_seconds(kind, size_bytes, layout, sharing) for kind in profile.kinds)
    group, k = layout.group, layout.per_host
    if group <= 1 or size_bytes <= 0:
        return 0.0
    each = size_bytes / group
    inside = profile.inside.seconds((k - 1) * each) if k > 1 else 0.0
    if group == k:
        return inside
    between = profile.between.shared(k * sharing / profile.host_links)
    return max(inside, between.seconds((group - k) * each))


def least_exchange_seconds(profile: Profile, size_bytes: float) -> float:
    """Return the least seconds of an all-to-all between the copies that divide something, wherever they are.

    A host has 1 to all of them, if each has as many.
    """
    group, most = profile.exchanging, max(profile.placed.of_first(profile.devices), default=1)
    layouts = [Layout(group // k, k) for k in range(1, min(group, most) + 1) if group % k == 0]
    return min(all_to_all_seconds(profile, size_bytes, layout) for layout in layouts)


def with_gathers(costs: CostTable, seconds: Sequence[float], times: tuple[int, int]) -> CostTable:
    """Return a table whose F, B and R also wait for keys and values of other copies; ``times``: F and R, and B."""
    if not any(seconds):
        return costs
    ahead, back = times

    def longer(tasks: Sequence[float], often: int) -> tuple[float, ...]:
        return tuple(t + often * s for t, s in zip(tasks, seconds, strict=True))

    return replace(
        costs,
        forward=longer(costs.forward, ahead),
        input_grad=longer(costs.input_grad, back),
        recompute=longer(costs.recompute, ahead),
    )


def with_exchange(costs: CostTable, seconds: Sequence[float], overlap: float = 0.0) -> CostTable:
    """Return a table whose F, B and R also wait for tokens, as runs have it: all-to-all inside the tasks.

    Args:
        costs: times without all-to-all.
        seconds: of each stage's dispatches of a micro-batch; its combines take as long.
        overlap: share of it that pairs hide; 0 where their halves run one after another, as on GPUs.
    """
    if not any(seconds):
        return costs
    longer = with_gathers(costs, seconds, (2, 2))
    return replace(longer, dispatch=tuple(seconds), combine=tuple(seconds), overlap=overlap)
