"""Compute a profile from a description of the devices, without measuring.

``cost.kernels`` times the kernels of each layer; this adds what a process and its communicators hold, and the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypipe.cost.gpt_work import SOFTWARE, STATISTIC, Software, gpt_work, master_width
from raypipe.cost.kernels import Kernels
from raypipe.cost.layer_work import LayerWork
from raypipe.cost.memory.parameter import parameter_bytes
from raypipe.cost.profile import (
    CollectivePath,
    HeadProfile,
    LayerProfile,
    LinkFit,
    Profile,
    Reserved,
    Slicing,
    TaskTimes,
)
from raypipe.errors import SpecError
from raypipe.job.cluster import ClusterSpec, CollectiveModel, DeviceModel, LinkModel
from raypipe.job.field_types import WIDTH
from raypipe.job.model_spec import GptSpec

GIB, MIB = 2**30, 2**20
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Default micro-batch sizes of a profile."""


def analytic_profile(
    model: GptSpec | Sequence[LayerWork],
    cluster: ClusterSpec,
    dtype: str,
    sizes: Sequence[int] = SIZES,
    optimizer: str = "adamw",
    momentum: bool = False,
    tied: int = 0,
    trained_tied: int | None = None,
    slicing: Slicing | None = None,
    compiled: bool = False,
    loss_chunk: int | None = None,
    head: HeadProfile | None = None,
) -> Profile:
    """Compute the costs of a model's layers on a cluster's devices.

    Args:
        model: a GPT, as the cluster's ``software`` runs it; or the work of any other model's layers.
        cluster: the machine; with hosts of several kinds, the first.
        dtype: ``train.dtype``.
        sizes: micro-batch sizes, in samples.
        optimizer: ``train.optimizer``; it decides how many bytes an update moves.
        momentum: whether ``sgd`` uses momentum.
        tied: parameter values that the first and last layer share; ignored for a GPT, which says so itself.
        trained_tied: those of ``tied`` that are trained; None: all.
        slicing: how the model runs in slices of a sequence; ignored for a GPT, which does.
        compiled: ``train.compile`` fuses kernels.
        loss_chunk: ``train.loss_chunk_tokens``; of a GPT, others' work says it itself.
        head: the model's linear head; ignored for a GPT, whose is known.

    Raises:
        SpecError: the device has no peak for this dtype, or there are no layers or sizes to profile.
    """
    device = cluster.device
    if not sizes or min(sizes) < 1:
        raise SpecError("sizes", f"{list(sizes)} are not valid micro-batch sizes", "give whole numbers from 1")
    software = SOFTWARE[cluster.software]
    works = tuple(model) if isinstance(model, Sequence) else gpt_work(model, dtype, software, loss_chunk)
    if not works:
        raise SpecError("model", "has no layers", "give at least one")
    kernels = Kernels.of(device, dtype, software, compiled, grouped=any(work.experts for work in works))
    # torch's Muon iterates in bfloat16, whatever the weights.
    widest = "bfloat16" if optimizer == "muon" and "bfloat16" in map(str, device.peak_tflops) else dtype
    muon = optimizer == "muon"
    if isinstance(model, GptSpec):
        slicing = Slicing(positions=model.sequence)
    base_bytes, reserved = reserved_of(device)
    known: dict[LayerWork, LayerProfile] = {}

    def layer(work: LayerWork) -> LayerProfile:
        """Return its profile; layers that are alike but for their names are timed once."""
        bare = replace(work, name="")
        if bare not in known:
            known[bare] = _layer(bare, kernels, sizes, muon)
        return known[bare].model_copy(update={"name": work.name})

    return Profile(
        source="analytic",
        device=device.name,
        accelerator_type=device.accelerator_type,
        dtype=dtype,
        slicing=slicing,
        devices=cluster.hosts * cluster.devices_per_host,
        devices_per_host=cluster.devices_per_host,
        host_links=cluster.host_links,
        memory_bytes=device.memory_gib * GIB,
        base_bytes=base_bytes,
        reserved=reserved,
        communication_share=device.communication_processors / (device.multiprocessors or 1),
        layers=tuple(map(layer, works)),
        head=gpt_head(model, dtype, software, loss_chunk) if isinstance(model, GptSpec) else head,
        tied_parameters=_tied(model, tied),
        trained_tied_parameters=trained_tied,
        update_s_per_parameter=update_bytes(optimizer, momentum, dtype) / kernels.bytes_s,
        iteration_flops_s=Kernels.of(device, widest, software).flops_s if muon else None,
        inside=_link(cluster.inside),
        between=_link(cluster.between),
        collective=_path(cluster.collective) if cluster.collective else None,
    )


def update_bytes(optimizer: str, momentum: bool, dtype: str) -> int:
    """Return the bytes that a fused optimizer step reads and writes per parameter: weight, gradient and state.

    Of a master weight, too: the gradient is read and written in float32, and the weight is rounded from the master.

    >>> update_bytes("adamw", False, "float32"), update_bytes("adamw", False, "bfloat16-true")
    (28, 40)
    """
    each = parameter_bytes(dtype, optimizer, momentum)
    if not each.master:
        return each.gradient + 2 * (each.weight + each.optimizer)  # gradients are read, all else read and written
    # gradient to float32; the step; master to weight
    return (each.gradient + each.master) + (3 * each.master + 2 * each.optimizer) + (each.master + each.weight)


def reserved_of(device: DeviceModel) -> tuple[float, Reserved]:
    """Return what a device's process takes, and what else no tensor can have; a figure that users give is all of it."""
    if device.usable_gib is not None:
        return (device.memory_gib - device.usable_gib) * GIB, Reserved()
    result = device.reserved
    if result is None:
        return (1 - device.usable) * device.memory_gib * GIB, Reserved()
    channels = result.channels * result.channel_mib * MIB
    return result.context_mib * MIB, Reserved(
        libraries_bytes=result.workspace_mib * MIB,
        fragmentation_bytes=result.fragmentation * device.memory_gib * GIB,
        headroom_bytes=result.headroom * device.memory_gib * GIB,
        group_bytes=2 * channels,  # of a ring, two neighbours
        edge_bytes=channels,
        context_bytes=result.context_mib * MIB,
    )


def _tied(model: GptSpec | Sequence[LayerWork], given: int) -> int:
    if isinstance(model, Sequence):
        return given
    return model.vocabulary * model.hidden if model.tie_embeddings else 0


def gpt_head(model: GptSpec, dtype: str, software: Software, loss_chunk: int | None) -> HeadProfile:
    """Return a GPT's head. The norm before it, which the last layer has too, is nothing beside it."""
    master = master_width(dtype, software)
    return HeadProfile(
        rows=model.vocabulary,
        row_parameters=model.hidden,
        tokens=model.sequence,
        inputs=model.hidden,
        share=1.0,
        input_bytes=float(master * model.sequence * model.hidden),
        width=WIDTH[dtype],
        master=master,
        statistic=STATISTIC[dtype],
        chunk=loss_chunk,
    )


def _link(link: LinkModel) -> LinkFit:
    return LinkFit(alpha_s=link.latency_us * 1e-6, beta_s_per_byte=1e-9 / link.bandwidth_gb_s)


def _path(path: CollectiveModel) -> CollectivePath:
    link = _link(path)
    return CollectivePath(
        alpha_s=link.alpha_s,
        beta_s_per_byte=link.beta_s_per_byte,
        algorithm=path.algorithm,
        at_once=path.at_once,
        piece_bytes=None if path.piece_mib is None else path.piece_mib * 2**20,
    )


def _layer(work: LayerWork, kernels: Kernels, sizes: Sequence[int], muon: bool) -> LayerProfile:
    """Return a layer's profile; ``muon``: it updates the layer's matrices."""
    times: dict[int, TaskTimes] = {}
    for size in sorted(set(sizes)):
        f, b, w = (
            kernels.seconds(task, size, backward=task is not work.forward)
            for task in (work.forward, work.input_grad, work.weight_grad)
        )
        times[size] = TaskTimes(forward=f, input_grad=b, weight_grad=w, joint=b + w, recompute=f)
    kept, workspace, in_b = work.kept_bytes, work.workspace_bytes, work.split_workspace_bytes
    if kernels.fused:
        kept = kept if work.fused_kept_bytes is None else work.fused_kept_bytes + work.fused_operand_bytes
        workspace = workspace if work.fused_workspace_bytes is None else work.fused_workspace_bytes
        if work.operand_bytes:  # beside them the gradient that passes the layer, before and after
            workspace = in_b = max(workspace, work.operand_bytes + 2 * work.output_bytes)
    return LayerProfile(
        name=work.name,
        parameters=work.parameters,
        trained_parameters=work.trained_parameters,
        times=times,
        kept_bytes=kept,
        unread_input_bytes=work.unread_input_bytes,
        kept_fixed_bytes=work.kept_fixed_bytes,
        cast_bytes=work.cast_bytes,
        waiting_bytes=work.waiting_bytes,
        output_bytes=work.output_bytes,
        output_floats=work.output_floats,
        workspace_bytes=workspace,
        workspace_fixed_bytes=work.workspace_fixed_bytes,
        split_workspace_bytes=in_b,
        operand_bytes=work.operand_bytes if kernels.fused else None,
        chunk_bytes=work.chunk_bytes,
        matrices=work.matrices if muon else (),
        attention_share=kernels.attention_share(work.forward, max(sizes)),
        attention_grad_share=kernels.attention_share(work.input_grad, max(sizes), backward=True),
        key_value_bytes=work.key_value_bytes,
        expert_parameters=work.experts.parameters if work.experts is not None and work.experts.trained else 0,
        exchanged_bytes=work.exchanged_bytes,
    )
