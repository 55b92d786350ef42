"""Make the plan of a job with ``placement: branches``: costs of the model's pieces, then stages, devices and order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from raypipe.errors import SpecError
from raypipe.graph.dims import count
from raypipe.graph.subgraph_work import captured_work
from raypipe.job.field_types import arithmetic
from raypipe.job.spec import JobSpec
from raypipe.partition.this_machine import this_machine
from raypipe.plan.branches.arranged import LayerCosts
from raypipe.plan.branches.choose import Branches, choose_branches
from raypipe.plan.plan import Plan

if TYPE_CHECKING:
    from raypipe.job.cluster import ClusterSpec
    from raypipe.models import LayeredModel


def branch_plan(job: JobSpec, model: LayeredModel) -> Plan:
    """Cut a model's graph of layers for the devices of one data-parallel copy, and search its order.

    Costs are estimates for cores of this machine.

    Raises:
        SpecError: the model is no captured one, or has fewer pieces than devices.
    """
    parallel = job.parallel
    costs = layer_costs(job, model, this_machine(job.train.dtype, 1))
    found = choose_branches(costs, parallel.stages, parallel.shape(job.train.batch).microbatches)
    return plan_of(job, found, model.frozen_stages(found.arranged.cut))


def plan_of(job: JobSpec, found: Branches, frozen: Collection[int] = ()) -> Plan:
    """Return stages on devices with their order as the plan of a job."""
    return Plan.of(job.parallel, found.arranged.cut, job.train.batch, replace(found.schedule, name="auto"), frozen)


def layer_costs(job: JobSpec, model: LayeredModel, machine: ClusterSpec) -> LayerCosts:
    """Estimate what a micro-batch of a job's model costs on a machine's devices, from its operations.

    Messages go over the links inside a host, or where a host has a single device, between hosts.

    Raises:
        SpecError: the model has no graph of operations.
    """
    from raypipe.models.captured import CapturedModel

    if not isinstance(model, CapturedModel):
        raise SpecError("parallel.placement", "the model is a chain without branches", "use line")
    device, kind = machine.device, arithmetic(job.train.dtype)
    link = machine.inside if machine.devices_per_host > 1 or machine.hosts == 1 else machine.between
    shares = {str(name): share for name, share in device.efficiency_by_dtype.items()}
    peaks = {str(name): peak for name, peak in device.peak_tflops.items()}
    rates = (
        peaks[kind] * 1e12 * shares.get(kind, device.efficiency),
        device.memory_gb_s * 1e9,
        device.layer_overhead_us * 1e-6,
    )
    samples = job.parallel.microbatch
    works = [each.work for each in captured_work(model.graph, model.sharding, model.sizes(1))]
    tensors = model.tensors(range(len(model.results)), samples)
    sizes = [float(count(t.shape, {}) * t.dtype.itemsize) for t in tensors]
    return LayerCosts(
        results=model.results,
        result_bytes=tuple(sizes),
        gradient_bytes=tuple(size * t.differentiable for size, t in zip(sizes, tensors, strict=True)),
        forward=tuple(w.forward.seconds(samples, *rates) for w in works),
        input_grad=tuple(w.input_grad.seconds(samples, *rates) for w in works),
        weight_grad=tuple(w.weight_grad.seconds(samples, *rates) for w in works),
        latency_s=link.latency_us * 1e-6,
        bytes_per_s=link.bandwidth_gb_s * 1e9,
    )
