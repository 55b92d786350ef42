"""Hand-made profiles: small enough to time every candidate, uneven enough that it matters which one wins."""

from __future__ import annotations

import random
from typing import Any

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.errors import ScheduleError
from raypipe.job.spec import JobSpec
from raypipe.plan.predict.form import Form, form_of
from raypipe.schedule.shape import Grid, ParallelShape
from tests.job_files import minimal_job

MIB = 2**20


def make_profile(layers: int = 6, devices: int = 4, seed: int = 0, **changes: Any) -> Profile:
    """Blocks of about 10 ms a sample with an overhead per task, messages of about a millisecond."""
    rng = random.Random(seed)

    def layer(name: str, size: float) -> LayerProfile:
        once, each = 2e-3 * size, 8e-3 * size * rng.uniform(0.8, 1.2)
        back, weight = rng.uniform(0.9, 1.3), rng.uniform(0.7, 1.1)
        return LayerProfile(
            name=name, parameters=int(2e6 * size), kept_bytes=40 * MIB * size, kept_fixed_bytes=MIB * size,
            output_bytes=2 * MIB,
            times={
                n: TaskTimes(
                    forward=time, input_grad=time * back, weight_grad=time * weight,
                    joint=time * (back + weight) * 0.97, recompute=time,
                )
                for n in (1, 2, 4, 8, 16)
                for time in [once + n * each]
            },
        )  # fmt: skip

    names = ["embedding", *(f"block.{i}" for i in range(layers)), "head"]
    sizes = [0.2, *(1.0 for _ in range(layers)), 0.7]
    link = LinkFit(alpha_s=2e-4, beta_s_per_byte=1 / 4e9)
    values: dict[str, Any] = {
        "source": "measured", "device": "made up", "dtype": "float32", "devices": devices, "devices_per_host": 2,
        "memory_bytes": 8 * 2**30, "base_bytes": 90 * MIB, "code_bytes": 10 * MIB,
        "layers": tuple(map(layer, names, sizes)),
        "update_s_per_parameter": 2e-9, "inside": link,
        "between": LinkFit(alpha_s=3e-4, beta_s_per_byte=1 / 1e9), **changes,
    }  # fmt: skip
    return Profile(**values)


def make_job(layers: int = 6, batch: int = 8, parallel: Any = "auto", **train: Any) -> JobSpec:
    """A job that such a profile may be of."""
    return minimal_job(
        {"type": "gpt", "layers": layers, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 256},
        parallel=parallel,
        **{"batch": batch, **train},
    )


def make_shared(profile: Profile, size: int, halves: bool = False) -> Profile:
    """The same model with every layer shared by ``size`` devices: what they do takes its share and a sum, or, in
    halves, the longer of the two."""
    sum_s = 1.5e-3

    def layer(one: LayerProfile) -> LayerProfile:
        times = {}
        for n, t in one.times.items():
            if halves and n % 2:
                continue
            there, back, weight = (x / size + 1e-4 * halves for x in (t.forward, t.input_grad, t.weight_grad))
            joined = [max(x, n * sum_s) if halves else x + n * sum_s for x in (there, back)]
            times[n] = TaskTimes(
                forward=joined[0], input_grad=joined[1], weight_grad=weight, joint=joined[1] + weight,
                recompute=joined[0],
            )  # fmt: skip
        return one.model_copy(
            update={"times": times, "parameters": one.parameters // size, "kept_bytes": one.kept_bytes * 0.6}
        )

    return profile.model_copy(
        update={
            "layers": tuple(map(layer, profile.layers)), "devices": profile.devices // size,
            "devices_per_host": max(1, profile.devices_per_host // size),
        }
    )  # fmt: skip


def form_on(devices: int, schedule: str, **options: object) -> Form | ScheduleError:
    """``form_of`` a schedule on so many devices."""
    return form_of(ParallelShape.on(Grid(devices, 1, 1, 1), schedule, **options))
