"""Communicators over the GPU shim: real streams, events, allocator and ProcessGroupNCCL of torch, without a GPU."""

from __future__ import annotations

import pytest

from raypipe.runtime.transport.gpu.nccl import EDGE_CTAS
from tests.gpu_shim.shim import lacking, run_case, run_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=f"the GPU shim is not here: {lacking()}"),
]
DELAYS = {"kernel_us": 200}


def test_messages_pass_each_way_and_communicators_are_destroyed_in_order() -> None:
    *ranks, ends = run_case("exchange", **DELAYS)
    assert ends == {"exits": {"0": 0, "1": 0}}
    assert all((rank["aborts"], rank["destroys"], rank["open"]) == (0, 2, 0) for rank in ranks)
    assert len(ranks) == 2
    assert {rank["most_ctas"] for rank in ranks} == {EDGE_CTAS}


def test_a_device_whose_peer_was_killed_in_a_sum_leaves_at_once_and_its_process_lives() -> None:
    """Destroying the group waits for the peer for ever, and torch's watchdog ends the process at its own timeout."""
    left, ends = run_case("lost_in_a_sum", **DELAYS)
    assert ends == {"exits": {"0": 0, "1": 9}}
    assert left["left_s"] < 5
    assert left["works"]
    assert (left["aborts"], left["open"]) == (1, 0)


def test_a_silent_peer_is_an_error_with_a_name_within_the_timeout() -> None:
    said, ends = run_case("silent_peer", **DELAYS)
    assert "stage 1" in said["said"]
    assert said["took_s"] < said["timeout_s"] + 5
    assert said["left_s"] < 5
    assert ends["exits"]["0"] == 0


def test_an_edge_opened_40_times_does_not_come_to_the_second_stream() -> None:
    streams, _ = run_case("opened_again")
    assert streams == {"same": True, "alias": False}


def test_segments_of_the_allocator_grow_and_give_memory_back() -> None:
    memory, _ = run_case("memory")
    assert memory["grows"]
    assert memory["held"] - memory["before"] == pytest.approx(60 << 20, rel=0.05)
    assert memory["after"] == memory["before"]
    assert memory["cuda_module_loading"] == "LAZY"


def test_devices_whose_peer_is_lost_say_so_in_time_and_end() -> None:
    """Six of the trials of ``tests.bench.safety.lost_gpus``: killed, stopped and stalled, at once and later."""
    assert run_module("tests.bench.safety.lost_gpus", "--here", "--trials", "6", kernel_us=200, devices=3) == 0


def test_memory_of_a_killed_process_is_free_again() -> None:
    found, ends = run_case("killed")
    assert found["most"] > 60 << 20
    assert found["left"] == 0
    assert ends["exits"] == {"0": 0, "1": -9}


def test_attention_of_slices_runs_in_the_kernels_that_make_no_scores() -> None:
    """But for float64, which none takes; temporary memory in shares of what all scores would take."""
    found, _ = run_case("attention")
    assert {dtype: kernel for dtype, (kernel, _) in found.items()} == {
        "torch.bfloat16": "flash",
        "torch.float32": "efficient",
        "torch.float64": None,
    }
    assert found["torch.bfloat16"][1] < 0.3
    assert found["torch.float32"][1] < 0.3
    assert found["torch.float64"][1] > 1


def test_a_worker_whose_context_is_broken_serves_no_other_plan() -> None:
    said, _ = run_case("broken")
    failed, left = said["said"]
    assert "illegal memory access" in failed
    assert "its GPU's context is broken" in left
