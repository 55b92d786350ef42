"""A plan from joint scheduling: every layer a stage of one device, and weight gradients where they were put.

A weight gradient stands in the order where the second stream may begin it: behind the last task of the main stream that
it waits for. One that runs beside the next step's forward stands at the end, and ``parallel.side_stream`` says beside
which. Of several micro-batches, only the last one's can run there; those before run beside the next one's forward,
where the order has them.
"""

from __future__ import annotations

from raypipe.cost.profile import TakenFor
from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.regions.joint import Joint
from raypipe.plan.regions.profile import MADE_BY, RegionProfile
from raypipe.schedule.ir import Schedule, StageGraph, Task

NAME = "multi-region"


def held_until(profile: RegionProfile, joint: Joint) -> dict[int, int]:
    """Return, of layers whose weight gradient runs in the next forward, the first layer of its region there."""
    return {
        layer: profile.regions[region].layers[0]
        for region, layers in enumerate(joint.assigned)
        if profile.regions[region].kind == "F"
        for layer in layers
    }


def order_of(profile: RegionProfile, joint: Joint, microbatches: int) -> Schedule:
    """Return one step of all micro-batches on one device."""
    count = len(profile.layers)
    held = held_until(profile, joint)
    order: list[Task] = []
    for mb in range(microbatches):
        before = (mb - 1,)
        for layer in range(count):
            if mb:
                order += [Task("W", late, before) for late, begin in held.items() if begin == layer]
            order.append(Task("F", layer, (mb,)))
        for region, layers in zip(profile.regions, joint.assigned, strict=True):
            if region.kind == "F":
                continue
            waiting = list(layers)
            done: set[int] = {layer for layer in range(count) if layer > max(region.layers)}
            for layer in region.layers:
                while waiting and waiting[0] in done:
                    order.append(Task("W", waiting.pop(0), (mb,)))
                order.append(Task("B", layer, (mb,)))
                done.add(layer)
            order += [Task("W", late, (mb,)) for late in waiting]
        order.append(Task("W", 0, (mb,)))
    order += [Task("W", late, (microbatches - 1,)) for late in held]
    return Schedule(
        name=NAME,
        placement=((0,) * count,),
        orders=(tuple(order),),
        microbatches=microbatches,
        graph=StageGraph.chain(count),
    )


def check_same(job: JobSpec, profile: RegionProfile, source: str) -> None:
    """Check that a profile was measured for a job's model.

    Raises:
        SpecError: it was measured for another.
    """
    if profile.taken_for is not None and profile.taken_for.model != TakenFor.job(job).model:
        raise SpecError(source, "was measured for another model", f"measure again: {MADE_BY}")


def plan_of(job: JobSpec, profile: RegionProfile, joint: Joint) -> Plan:
    """Return the plan that ``raypipe train --plan`` runs; on one stream, where a second one does not pay.

    Raises:
        SpecError: the mini-batch is no multiple of the micro-batch that was measured, or the job clips.
    """
    microbatches, rest = divmod(job.train.batch, profile.microbatch)
    if rest:
        raise SpecError(
            "train.batch",
            f"{job.train.batch} is no multiple of the measured micro-batch of {profile.microbatch}",
            "measure again, or use another batch",
        )
    cut = tuple((n,) for n in range(len(profile.layers)))
    transport = job.parallel.transport
    if not joint.gains:
        parallel = ParallelSpec(schedule="1f1b", microbatch=profile.microbatch, transport=transport)
        whole = tuple(range(len(profile.layers)))
        plan, step_s = Plan.of(parallel, (whole,), job.train.batch), joint.usual.step_s
        return plan.model_copy(update={"predicted_step_s": step_s * microbatches})
    if job.train.clip is not None:
        raise SpecError(
            "train.clip",
            "with a second stream, layers are updated before the norm of all gradients is known",
            "set train.clip to null",
        )
    parallel = ParallelSpec(
        schedule="auto",
        placement="free",
        chunks=len(profile.layers),
        microbatch=profile.microbatch,
        replan=False,
        side_stream=held_until(profile, joint),
        transport=transport,
    )
    plan = Plan.of(parallel, cut, job.train.batch, order_of(profile, joint, microbatches))
    return plan.model_copy(update={"predicted_step_s": joint.found.step_s * microbatches})
