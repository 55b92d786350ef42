"""Plans from joint scheduling: orders that verify, weight gradients where they were put, and one clear error each."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.regions.joint import (
    Joint,
    assign,
    held_until,
    in_turn,
    joint_schedule,
    on_two_streams,
    order_of,
    plan_of,
)
from raypipe.plan.regions.profile import load_regions
from raypipe.schedule.verify import verify
from tests.job_files import minimal_job
from tests.plan.regions.profiles import made, random_profile


def job(layers: int, **train):
    return minimal_job(
        {"type": "gpt", "layers": layers, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256},
        parallel={"microbatch": 1},
        **{"steps": 4, "clip": None, **train},
    )


def joint_of(profile, assigned) -> Joint:
    return Joint(assigned, 0, in_turn(profile), on_two_streams(profile, assigned))


def test_an_order_by_hand() -> None:
    profile = made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2], 2.0)
    joint = joint_of(profile, ((3,), (2,), (1,), ()))
    assert held_until(profile, joint) == {1: 0}
    (order,) = order_of(profile, joint, 2).orders
    expected = "0F0 1F0 2F0 3F0 3B0 3W0 2B0 2W0 1B0 0B0 0W0 1W0 0F1 1F1 2F1 3F1 3B1 3W1 2B1 2W1 1B1 0B1 0W1 1W1"
    assert " ".join(map(str, order)) == expected


def test_every_plan_builds_and_verifies() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(3, 9))
        joint = joint_of(profile, assign(profile))
        for microbatches in (1, 2, 4):
            verify(order_of(profile, joint, microbatches))
        plan = plan_of(job(len(profile.layers)), profile, joint)
        assert build_schedule(plan, 4).devices == 1
        assert (plan.parallel.side_stream is not None) == joint.gains
        assert Plan.model_validate_json(plan.text()).parallel == plan.parallel


def test_without_a_gain_the_plan_has_one_stream() -> None:
    profile = made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2], 0.8)
    plan = plan_of(job(4), profile, joint_schedule(profile, 1e6))
    assert plan.parallel.side_stream is None
    assert plan.predicted_step_s == 4 * 12


@pytest.mark.parametrize(
    ("train", "where"), [({"clip": 1.0}, "train.clip"), ({"batch": 3}, "train.batch")]
)  # fmt: skip
def test_what_cannot_be_planned(train, where) -> None:
    profile = made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2], 2.0).model_copy(update={"microbatch": 2})
    with pytest.raises(SpecError) as error:
        plan_of(job(4, **train), profile, joint_schedule(profile, 1e6))
    assert error.value.where == where


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d["together"].pop(), "together: does not have every region"),
        (lambda d: d["regions"].pop(0), "are not a backward from the last"),
        (lambda d: d["regions"][0]["layers"].reverse(), "are not a backward from the last"),
        (lambda d: d.update(tied=[[0, 9]]), "tied: names a layer"),
        (lambda d: d["layers"][0].update(forward=-1), "layers"),
    ],
)  # fmt: skip
def test_damaged_profiles_are_one_clear_error(change, why, tmp_path: Path) -> None:
    document = json.loads(made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2]).model_dump_json())
    path = tmp_path / "regions.json"
    path.write_text(json.dumps(document))
    load_regions(path)
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError) as error:
        load_regions(path)
    assert why in str(error.value)
    assert str(path) in str(error.value)
