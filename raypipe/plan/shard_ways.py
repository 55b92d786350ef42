"""Ways in which data-parallel copies of a candidate divide state: ZeRO level, size of the shard groups, gathers.

A plan without shards stays a candidate; these come beside it where memory is short (``predict.oom_fallback``), where a
plan that was found may be faster for them, and where a job asks for them. What needs as much memory as another way and
takes no less time is left out:

    level 3, one stage a device    the whole stage is gathered when most activations are alive, as at level 2
    gather: step                   the same
    other shard groups             those of one host have the fastest links, all copies the least memory; between the
                                   two, groups grow by a factor of four

On one device per copy, level 3 needs a model in several stages, of which few are gathered at a time, as FSDP wraps a
model layer by layer: powers of two, and where layers are large, each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raypipe.cost.hosts import Hosts
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.parallel_spec import GatherKey, Shard
from raypipe.plan.candidate import Asked, Candidate, chunk_counts, divisors
from raypipe.plan.predict.form import form_of
from raypipe.schedule.ir import ZERO_LEVELS

CHUNKED = ("interleaved-1f1b", "bfs")
"""Schedules of a model that one device holds in several stages: micro-batch by micro-batch, and stage by stage."""
GROWTH = 4
"""Shard groups grow by this factor, from those of one host to all copies."""
WORDS: dict[int, Shard] = {0: "none", 1: "zero1", 2: "zero2", 3: "zero3"}
"""ZeRO level -> the job's word for it."""


def shard_ways(
    c: Candidate, hosts: Hosts, most_stages: int, asked: Asked, highest: int = 3, each_layer: bool = False
) -> Iterator[Candidate]:
    """Yield the candidate with what its copies may divide; nothing where they cannot divide anything.

    Args:
        c: a candidate without shards.
        hosts: where devices are.
        most_stages: deepest cut of the model.
        asked: what the job asks for; its ``shard``, ``gather`` and ``shard_replicas`` are kept.
        highest: ZeRO level up to which ways are yielded.
        each_layer: whether a model on one device may also be cut into its layers, each a stage.
    """
    wish = asked.get("shard")
    if c.replicas == 1 or c.form.versions != "flush" or wish == "none":
        return
    waiting = replace(c, update="wait")  # all the runtime knows with shards
    for group in _groups(c, hosts, asked.get("shard_replicas")):
        for level in ZERO_LEVELS[1 : highest + 1]:
            if wish in (None, WORDS[level]):
                own = replace(waiting, shard=WORDS[level], shard_replicas=group)
                for one in _cut_finer(own, most_stages, asked, each_layer) if level == 3 else (own,):
                    yield from (replace(one, gather=gather) for gather in _gathers(one, level, asked))


def check_statistics(shard: Shard, batch_statistics: bool) -> None:
    """Check that a model may be trained with what its copies divide.

    Raises:
        SpecError: they divide something, and the model has batch norm.
    """
    if shard != "none" and batch_statistics:
        raise SpecError(
            "parallel.shard", "the model's batch norm sums its statistics over whole replicas", "use shard: none"
        )


def _cut_finer(c: Candidate, most_stages: int, asked: Asked, each_layer: bool) -> Iterator[Candidate]:
    """A candidate of level 3, where a device holds several stages; on one device, the model in several stages."""
    if c.stages > 1 or "shard" in asked:
        yield c
    if c.stages == 1:
        chunks = [v for v in chunk_counts(1, most_stages, asked.get("chunks")) if v > 1 and (v & (v - 1) == 0 or asked)]
        chunks += [most_stages] if each_layer and "chunks" not in asked and most_stages > max(chunks, default=1) else []
        for name in CHUNKED:
            if asked.get("schedule") in (None, name):
                made = (replace(c, schedule=name, chunks=v) for v in chunks)
                yield from (one for one in made if not isinstance(form_of(one), ScheduleError))


def _gathers(c: Candidate, level: int, asked: Asked) -> Iterator[GatherKey]:
    """Which tasks may share a gather; from level 2 on, as many share a reduce-scatter."""
    if "gather" in asked:
        yield asked["gather"]
        return
    several = c.form.stages * c.form.replicas > c.stages
    if level < 3 or several or "shard" in asked:
        yield "unit"
    if level == 3 and several and c.microbatches > 1:
        yield "microbatch"


def _groups(c: Candidate, hosts: Hosts, asked: int | None) -> list[int | None]:
    """Sizes of shard groups; None stands for all copies."""
    if asked is not None:
        return [asked] if asked > 1 and c.replicas % asked == 0 else []
    most = max(hosts.per_host // (c.stages if c.innermost == "stages" else 1), 1)
    size = max(n for n in divisors(c.replicas) if n <= most)
    result: list[int | None] = []
    while 1 < size < c.replicas:
        result.append(size)
        size = min(n for n in divisors(c.replicas) if n >= size * GROWTH or n == c.replicas)
    return [*result, None]
