"""A plan on other hosts than it was made for: what its step takes there, by the planner's own prediction."""

from __future__ import annotations

import pytest

from raypipe.cost.profile import Profile
from raypipe.errors import ClusterError
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import deepest
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import check_tensor_groups, on_hosts
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.schedule.shape import Grid
from tests.plan.conftest import make_job, make_profile

GRID = Grid(stages=4, replicas=1, microbatch=2, microbatches=4)


def plan_with(profile: Profile, job: JobSpec) -> Plan:
    """1F1B on four devices as the planner predicts it with this profile."""
    predictor = Predictor(without_noise(profile), job.train, deepest(job, profile))
    result = predictor.time(predictor.predict(Candidate.on(GRID, "1f1b")), final=True)
    return plan_of(result, job).planned_for(job, profile.device, profile.placed.of_first(4))


def slow_between(**changes):
    """Links between hosts cost ten times what a task does; those inside a host next to nothing."""
    link = make_profile().between.model_copy(update={"alpha_s": 0.2})
    return make_profile(between=link, **changes)


def test_on_the_hosts_that_it_was_made_for_nothing_changes():
    job, profile = make_job(), slow_between()
    plan = plan_with(profile, job)
    assert plan.made_for.hosts == (2, 2)
    assert on_hosts(plan, job, (2, 2), profile) is None
    assert on_hosts(plan.model_copy(update={"made_for": None}), job, (3, 1), profile) is None


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("came", [(1, 1, 1, 1), (3, 1), (4,)])
def test_on_others_it_is_what_the_planner_says_of_them(came, clip):
    job, profile = make_job(clip=clip), slow_between()
    plan = plan_with(profile, job)
    there = plan_with(profile.on_hosts(came), job)
    assert there.cut == plan.cut
    assert there.made_for.hosts == came
    result = on_hosts(plan, job, came, profile)
    assert result.plan.predicted_step_s == pytest.approx(there.predicted_step_s, rel=1e-9)
    assert result.plan.made_for.hosts == came
    assert result.plan.differences(job) == []  # still the planner's own decision
    assert result.message.startswith("planned for 2 + 2 devices on 2 hosts, runs on ")
    assert f"{plan.predicted_step_s:.4g} s there, {result.plan.predicted_step_s:.4g} s here" in result.message
    assert on_hosts(result.plan, job, came, profile) is None
    if came == (1, 1, 1, 1):
        assert there.predicted_step_s > 1.5 * plan.predicted_step_s


def test_without_its_profile_the_prediction_goes():
    job, profile = make_job(), slow_between()
    plan = plan_with(profile, job)
    other = slow_between(layers=5)
    for known in (None, other):
        result = on_hosts(plan, job, (3, 1), known)
        assert result.plan.predicted_step_s is None
        assert result.plan.made_for is None
        assert "does not apply" in result.message


@pytest.mark.slow
def test_the_planner_chooses_another_plan_where_hosts_differ():
    """Four devices of one host train as a pipeline; of four hosts with such links, two are as fast as any."""
    job = make_job()
    plans = [choose(job, slow_between().on_hosts(counts), search_s=0).plan for counts in ((4,), (1, 1, 1, 1))]
    assert [plan.parallel.stages * plan.parallel.replicas for plan in plans] == [4, 2]
    assert [plan.made_for.hosts for plan in plans] == [(4,), (1, 1)]


@pytest.mark.parametrize(("size", "came"), [(1, (3, 1)), (2, (4, 2)), (4, (8, 4)), (2, (2,))])
def test_tensor_groups_on_one_host_each(size, came):
    check_tensor_groups(size, came)


@pytest.mark.parametrize(("size", "came", "ranks"), [(2, (3, 3), "2 to 3"), (4, (4, 2, 2), "4 to 7")])
def test_a_tensor_group_over_two_hosts_is_refused(size, came, ranks):
    with pytest.raises(ClusterError, match=f"ranks {ranks} is on several hosts") as caught:
        check_tensor_groups(size, came)
    assert f"a multiple of {size}" in caught.value.fix
    plan = plan_with(make_profile(), make_job())
    shared = plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"tensor": size})})
    with pytest.raises(ClusterError):
        on_hosts(shared, make_job(), came, None)
