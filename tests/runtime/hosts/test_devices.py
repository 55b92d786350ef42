"""What a device takes from a cluster, on tables of resources."""

import itertools

import pytest

from raypipe.errors import SpecError
from raypipe.runtime.hosts.devices import OVERSUBSCRIPTION, DeviceRequest, local_cpus, request_devices


@pytest.mark.parametrize(
    ("devices", "resources", "wanted"),
    [
        (1, {"CPU": 1.0}, DeviceRequest(cpus=1.0, gpus=0.0)),
        (4, {"CPU": 4.0, "memory": 1e9}, DeviceRequest(cpus=1.0, gpus=0.0)),
        (8, {"CPU": 96.0, "GPU": 8.0}, DeviceRequest(cpus=1.0, gpus=1.0)),
        (2, {"CPU": 96.0, "GPU": 8.0}, DeviceRequest(cpus=1.0, gpus=1.0)),
        (4, {"CPU": 16.0, "GPU": 1.0}, DeviceRequest(cpus=1.0, gpus=0.25)),  # four stages on one GPU
        (5, {"CPU": 16.0, "GPU": 2.0}, DeviceRequest(cpus=1.0, gpus=1 / 3)),  # three on one, two on the other
        (8, {"CPU": 4.0, "GPU": 8.0}, DeviceRequest(cpus=0.5, gpus=1.0)),  # few cores: the GPUs compute
        (3, {"CPU": 4.0, "GPU": 0.0}, DeviceRequest(cpus=1.0, gpus=0.0)),
    ],
)
def test_each_device_takes_a_gpu_where_there_are_any(devices, resources, wanted) -> None:
    assert request_devices(devices, resources) == wanted


def test_shares_of_gpus_always_fit() -> None:
    """Ray counts resources in ten-thousandths, rounding down, and places a share on one GPU, never across two."""
    for gpus, devices in itertools.product((1, 2, 3, 7, 8), range(1, 40)):
        request = request_devices(devices, {"CPU": 64.0, "GPU": float(gpus)})
        assert 10_000 // int(request.gpus * 10_000) * gpus >= devices


def test_more_than_the_cluster_has_is_refused_with_what_it_has() -> None:
    with pytest.raises(SpecError) as caught:
        request_devices(9, {"CPU": 8.0})
    assert caught.value.where == "parallel"
    assert "asks for 9 devices" in caught.value.why
    assert "8 CPUs and no GPU" in caught.value.why
    assert "at most 8" in caught.value.fix
    with pytest.raises(SpecError, match="0 CPUs"):
        request_devices(1, {})


def test_bundles_and_words() -> None:
    assert DeviceRequest(1.0, 0.0).bundle() == {"CPU": 1.0}
    assert DeviceRequest(1.0, 0.5).bundle() == {"CPU": 1.0, "GPU": 0.5}
    assert DeviceRequest(1.0, 0.0).describe() == "1 CPU"
    assert DeviceRequest(1.0, 0.25).describe() == "0.25 GPU"


def test_a_ray_started_here_has_a_cpu_per_device_and_at_least_the_cores() -> None:
    assert local_cpus(1, 2) == 2
    assert local_cpus(7, 2) == 7
    assert local_cpus(2 * OVERSUBSCRIPTION, 2) == 2 * OVERSUBSCRIPTION


def test_too_many_processes_for_this_machine() -> None:
    most = 2 * OVERSUBSCRIPTION
    with pytest.raises(SpecError) as caught:
        local_cpus(most + 1, 2)
    assert f"asks for {most + 1} devices" in caught.value.why
    assert f"2 cores give at most {most}" in caught.value.why
    assert "RAY_ADDRESS" in caught.value.fix
