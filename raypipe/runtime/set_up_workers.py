"""Set up the workers before the first step, and send them new programs when the plan changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ray

from raypipe.checkpoint import Checkpoint
from raypipe.data import known_fields
from raypipe.errors import SpecError
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel, build_model
from raypipe.plan.online.better_order import Running
from raypipe.plan.plan import Plan
from raypipe.plan.shard_ways import check_statistics
from raypipe.runtime.graphs.device_graphs import check_graphs
from raypipe.runtime.hosts.host_check import check_hosts
from raypipe.runtime.hosts.node_files import files_of_nodes
from raypipe.runtime.setup.communicators import Topology, check_devices, rendezvous_of
from raypipe.runtime.setup.setup import (
    Setup,
    tensor_rank_edges,
    tensor_rank_groups,
    tensor_rank_of,
)
from raypipe.runtime.update.gradients import TiedHolders, groups_of_ties
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program, check_counted, edges, programs, step_programs
from raypipe.schedule.lowering.safe_order import gpu_programs
from raypipe.schedule.passes import forwards_alone
from raypipe.schedule.passes.sync import are_copies
from raypipe.schedule.sharding import run_groups, shard_members


def set_up(
    workers: WorkerGroup,
    job: JobSpec,
    running: Running,
    directory: Path,
    checkpoint: Path | Checkpoint | None,
    search_recompute: bool,
    done: int = 0,
    recovers: bool = False,
    left_out: int = 0,
) -> list[tuple[int, list[str]]]:
    """Set up every worker for the first step.

    Args:
        workers: the running worker group, with at least one worker per rank of the plan.
        job: the job; of its ``parallel`` section the plan's counts.
        running: the plan to begin with.
        directory: the run's directory, with the prepared data in ``data``.
        checkpoint: where to read parameters and optimizer state from; None to start afresh.
        search_recompute: whether the recomputed layers may change during the run; memory is then measured.
        done: number of steps that ``checkpoint`` was trained for.
        recovers: whether a device that dies is replaced in place.
        left_out: number of mini-batches of training data that were left out before.

    Returns:
        Per rank, the number of parameters (elements) it holds, and the names of the parameters whose weight gradient
        is computed in B because it cannot be deferred to W.

    Raises:
        ClusterError: the nodes cannot run the job together.
        ScheduleError: a program would not count every micro-batch exactly once, or could deadlock on GPUs.
    """
    check_devices(workers.locations)
    workers.apart = check_hosts(workers.actors, workers.locations, directory, job.train.message_timeout_s)
    setups = setups_of(workers, job, running, directory, checkpoint, search_recompute, done, recovers, left_out)
    return list(ray.get(workers.call_each("setup", [(one,) for one in setups])))


def setups_of(
    workers: WorkerGroup,
    job: JobSpec,
    running: Running,
    directory: Path,
    checkpoint: Path | Checkpoint | None,
    search_recompute: bool,
    done: int,
    recovers: bool,
    left_out: int,
) -> list[Setup]:
    """Return what every worker is sent, by rank; see ``set_up``."""
    sent = files_of_nodes(workers.leaders_apart(), directory, checkpoint if isinstance(checkpoint, Path) else None)
    plan, schedule, _ = running
    tensor = plan.parallel.tensor
    fields = known_fields(directory / "data")
    model = build_model(job, fields, 0, plan.parallel)
    check_statistics(plan.parallel.shard, model.batch_statistics)
    if job.train.on_nonfinite == "skip" and model.batch_statistics and not workers.on_cpus():
        why = "on GPUs, a batch norm's statistics are moved before the host knows the norm of the gradients"
        raise SpecError("train.on_nonfinite", why, "use rewind or stop")
    check_graphs(job.train.cuda_graphs, not workers.on_cpus())
    if wrong := set(schedule.rules.frozen) - set(model.frozen_stages(plan.cut)):
        raise SpecError(
            "plan: program",
            f"stage {min(wrong)} has parameters to train, and the schedule would not train them",
            "use a plan made for this job",
        )
    tied = tied_holders(plan, schedule, model)
    train, evaluate = lower(running, not workers.on_cpus())
    groups = run_groups(
        schedule.placement,
        schedule.sharding,
        plan.parallel.replicas,
        tied=groups_of_ties(tied, schedule.sharding),
        experts=plan.parallel.experts,
        context=plan.parallel.context,
        # Where sums are started by a queue of their own, their order depends on time.
        in_order=not plan.parallel.late_updates and are_copies(schedule),
    )
    setup = Setup(
        device=0,
        tensor_rank=0,
        job=job,
        parallel=plan.parallel,
        cut=plan.cut,
        graph=schedule.graph,
        recomputed=layers_to_recompute(plan.parallel, plan.cut),
        search_recompute=search_recompute,
        placement=schedule.placement,
        topology=Topology(
            peers=tuple(x.peer for x in workers.locations),
            rendezvous=rendezvous_of(workers.locations),
            edges=tensor_rank_edges(edges(schedule), tensor),
            groups=tensor_rank_groups(groups.opened, schedule.devices, tensor),
            transport=plan.parallel.transport,
            run_id=workers.run_id,
            timeout_s=job.train.message_timeout_s,
            served_by=groups.served_by,
            addresses=tuple(x.address for x in workers.locations),
        ),
        tied=tied,
        samples_per_microbatch=int(plan.parallel.microbatch * schedule.share_of_samples),
        microbatches=schedule.microbatches,
        slices=schedule.rules.slices,
        versions=schedule.versions,
        sharding=schedule.sharding,
        train={},
        evaluate=evaluate[0],
        data=directory / "data",
        fields=fields,
        checkpoint=checkpoint,
        samples=workers.samples,
        done=done,
        left_out=left_out,
        recovers=recovers,
    )
    workers.process_groups = setup.topology.process_groups()
    result = []
    at = [None] * len(workers.actors) if workers.places is None else workers.places.of_ranks()
    for rank in range(len(workers.actors)):
        device, tensor_rank = tensor_rank_of(rank, tensor)
        own = {part: rows[device] for part, rows in train.items()}
        mine = replace(setup, device=device, tensor_rank=tensor_rank, train=own, evaluate=evaluate[device])
        mine = replace(mine, place=at[rank])
        if (files := sent.get(workers.locations[rank].peer.node)) is not None:
            mine = replace(mine, data=files.data, checkpoint=files.checkpoint or mine.checkpoint, sends_shards=True)
        result.append(mine)
    return result


def install(workers: WorkerGroup, running: Running, measures_memory: bool) -> None:
    """Run another plan from the next step on, by sending every worker its new programs between two steps."""
    train, evaluate = lower(running, not workers.on_cpus())
    parallel, cut = running.plan.parallel, running.plan.cut
    recomputed = layers_to_recompute(parallel, cut)
    of_rank = [tensor_rank_of(rank, parallel.tensor)[0] for rank in range(len(workers.actors))]
    own = [({part: rows[device] for part, rows in train.items()}, evaluate[device]) for device in of_rank]
    workers.call_each("install", [(*programs, recomputed, measures_memory) for programs in own])


def lower(running: Running, gpus: bool) -> tuple[dict[Part, list[Program]], list[Program]]:
    """Lower a plan to one program per device: for training steps, by how they begin and end, and for validation.

    Args:
        running: the plan.
        gpus: whether devices are GPUs, whose transfers then get an order that cannot deadlock.

    Raises:
        ScheduleError: a program would not count every micro-batch exactly once, or could deadlock on GPUs.
    """
    schedule = running.schedule
    train, evaluate = step_programs(schedule, running.ahead), programs(forwards_alone(schedule))
    check_counted(train, evaluate, schedule)
    if not gpus:
        return train, evaluate
    return gpu_programs(
        train, evaluate, schedule.microbatches, schedule.versions, shard_members(schedule.sharding, schedule.placement)
    )


def tied_holders(plan: Plan, schedule: Schedule, model: LayeredModel) -> tuple[TiedHolders, ...]:
    """Return the model's groups of tied parameters with the devices that hold them under a plan."""
    stage_of = {layer: stage for stage, layers in enumerate(plan.cut) for layer in layers}
    held_by = [{stage_of[layer] for layer, _ in group.parameters} for group in model.tied]
    return tuple(
        TiedHolders(
            name=group.name,
            parameters=tuple(dict.fromkeys(name for _, name in group.parameters)),
            layer=group.parameters[0][0],
            stage=min(stages) if len(stages) == 1 else None,
            ranks=tuple(
                sorted({devices[stage_of[layer]] for devices in schedule.placement for layer, _ in group.parameters})
            ),
        )
        for group, stages in zip(model.tied, held_by, strict=True)
    )
