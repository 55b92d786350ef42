"""Quick profiles are kept on disk, and taken again where one measurement agrees with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.models import GptLayers
from raypipe.profiling import effort as profiling_cache
from raypipe.profiling.effort import QUICK, Effort
from raypipe.profiling.layer_times import LayerBench
from raypipe.profiling.profile_job import at_present
from raypipe.profiling.profiling_worker import DeviceFacts
from tests.runtime.runs.small_runs import small_job


def small_profile() -> Profile:
    layer = LayerProfile(
        name="block", parameters=10, kept_bytes=1.0, output_bytes=1.0,
        times={n: TaskTimes(forward=n, input_grad=n, weight_grad=n, joint=2 * n, recompute=n) for n in (1, 2, 4)},
    )  # fmt: skip
    link = LinkFit(alpha_s=0.0, beta_s_per_byte=0.0)
    return Profile(
        source="measured", device="slow", dtype="float32", devices=2, devices_per_host=2, memory_bytes=1.0,
        layers=(layer,), update_s_per_parameter=0.0, inside=link, between=link,
    )  # fmt: skip


class Machine:
    """Instead of a ``LayerBench``: every task takes ``factor`` times as long as the profile says."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.long = False

    def known_seconds(self, profile: Profile, size: int) -> float:
        return LayerBench.known_seconds(SimpleNamespace(groups=[0]), profile, size)

    def probe(self, size: int, _effort: Effort) -> float:
        return self.factor * 3 * size


@pytest.mark.parametrize(
    ("factor", "device", "hosts", "kept"),
    [(1.0, "slow", "aa", True), (1.08, "slow", "aa", True), (1.2, "slow", "aa", False), (0.8, "slow", "aa", False),
     (1.0, "fast", "aa", False), (1.0, "slow", "ab", False)],
)  # fmt: skip
def test_a_kept_profile_holds_where_one_measurement_agrees(factor, device, hosts, kept) -> None:
    facts = [DeviceFacts(device, 1.0, 0.0, host) for host in hosts]
    said: list[str] = []
    result = at_present(Machine(factor), facts, small_profile(), "2 days", QUICK, said.append)
    assert (result is not None) == kept
    assert all("2 days" in text for text in said)
    if result is not None:  # at the speed that the machine has today
        before, now = small_profile().layers[0].times[2], result.layers[0].times[2]
        assert (now.forward, now.joint) == pytest.approx((factor * before.forward, factor * before.joint))
        assert result.inside == small_profile().inside
        assert result.layers[0].kept_bytes == small_profile().layers[0].kept_bytes


def test_kept_profiles_are_found_by_what_they_depend_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(profiling_cache.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])

    def path(sizes=(1, 2), devices=2, **job: Any) -> Path:
        spec = small_job(tmp_path, {}, **job)
        return profiling_cache.profile_path(spec, GptLayers(spec.model), sizes, devices)

    assert path() == path() == path(lr=0.5, steps=9, seed=4)
    others = [path(sizes=(1, 2, 4)), path(devices=1), path(model={"hidden": 32}), path(dtype="float32"), path(batch=16)]
    assert len({path(), *others}) == 1 + len(others)
    assert profiling_cache.read_kept(path()) is None
    profiling_cache.keep(path(), small_profile())
    assert profiling_cache.read_kept(path()) == (small_profile(), "less than a minute")
    path().write_text("{")
    assert profiling_cache.read_kept(path()) is None
