"""What a failure is called, which of several errors is the cause, and whether a restart may mend it."""

from __future__ import annotations

import errno
import importlib.util
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from raypipe.errors import CheckpointError, DeviceError, DevicesError, RunError, SpecError, TransportError
from raypipe.runtime.recovery.failure import (
    describe,
    failure_message,
    is_final,
    keep_traceback,
    kind_of,
    outside_a_run,
    own_error,
    raises_device_errors,
    root_cause,
    shows_loss,
    source_line,
)
from raypipe.runtime.recovery.replacement import parts_when_lost
from raypipe.runtime.worker.worker_group import StageStandby

GONE = TransportError("1F0 of step 1, rank 0", "connection closed by peer", "see that device's log")


class Device:
    """What ``raises_device_errors`` needs of an actor."""

    title = "stage 1 · replica 0"

    def whereabouts(self) -> str:
        return f"{self.title} · device 1, 1F0 of step 3"

    @raises_device_errors
    def work(self, error: Exception | None = None, after_s: float = 0.0) -> int:
        time.sleep(after_s)
        if error is not None:
            raise error
        return 7


def through_ray(error: Exception) -> Exception:
    """The error as ``ray.get`` raises it: of the cause's class, with a traceback for its text."""
    return ray.exceptions.RayTaskError("run_step", "Traceback ...", error).as_instanceof_cause()


def raised(error: Exception) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        Device().work(error)
    return caught.value


def cuda_error(code: int, text: str) -> torch.AcceleratorError:
    """An error of CUDA's runtime, as torch raises it."""
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


def test_an_actors_error_names_device_task_and_cause() -> None:
    assert Device().work() == 7
    error = raised(IndexError("Target 300 is out of bounds.\nmore"))
    assert error.where == "stage 1 · replica 0 · device 1, 1F0 of step 3"
    assert error.why.startswith("IndexError: Target 300 is out of bounds.")
    assert "Traceback" in error.details
    assert pickle.loads(pickle.dumps(error)).args == error.args
    assert describe(through_ray(error)) == str(error)


@pytest.mark.parametrize("own", [GONE, SpecError("model", "is wrong"), CheckpointError("step-1", "is damaged")])
def test_raypipes_own_errors_pass_as_they_are(own: Exception) -> None:
    with pytest.raises(type(own)) as caught:
        Device().work(own)
    assert caught.value is own


def test_the_users_own_line_is_told_and_no_librarys(tmp_path: Path) -> None:
    source = tmp_path / "my_model.py"
    source.write_text("import torch\ndef forward(x):\n    return torch.nn.functional.linear(x, x.new_zeros(3, 9))\n")
    spec = importlib.util.spec_from_file_location("my_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RuntimeError) as caught:
        module.forward(torch.zeros(2, 2))
    line = source_line(caught.value.__traceback__)
    assert line == f"{source}:3 in forward: return torch.nn.functional.linear(x, x.new_zeros(3, 9))"
    with pytest.raises(RuntimeError) as library:
        torch.nn.functional.linear(torch.zeros(2, 2), torch.zeros(3, 9))
    assert source_line(library.value.__traceback__.tb_next) == ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IndexError("Target 300 is out of bounds."), "bug"),
        (TypeError("x"), "bug"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x2 and 9x3)"), "bug"),
        (cuda_error(710, "CUDA error: device-side assert triggered"), "bug"),
        (cuda_error(700, "CUDA error: an illegal memory access was encountered"), "lost"),
        (cuda_error(2, "CUDA error: out of memory"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), "lost"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (RuntimeError("a library's text about a timeout of a socket"), "bug"),
        (NotImplementedError("no timeout here"), "bug"),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "lost"),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."), "lost"),
        (torch.distributed.DistNetworkError("the client socket has failed to connect"), "lost"),
        (ConnectionResetError("reset"), "lost"),
        (OSError(28, "No space left on device"), "lost"),
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "memory"),
    ],
)
def test_kinds(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert is_final(raised(error)) == (kind == "bug")


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (cuda_error(700, "CUDA error: an illegal memory access was encountered"), True),
        (cuda_error(710, "CUDA error: device-side assert triggered"), True),
        (cuda_error(2, "CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."), False),
        (ConnectionResetError("reset"), False),
    ],
)
def test_a_worker_whose_context_is_broken_does_not_serve_on(error: Exception, broken: bool) -> None:
    worker = StageStandby()
    job = SimpleNamespace(train=SimpleNamespace(elastic=object()))
    worker.setup_data = SimpleNamespace(job=job, place="here")  # type: ignore[assignment]
    worker.device, worker.rank, parted = torch.device("cuda", 0), 0, []
    worker.part = lambda: parted.append(True)  # type: ignore[assignment,method-assign,func-returns-value]
    worker.shard_writer, worker.compilation = SimpleNamespace(drop=lambda: None), None  # type: ignore[assignment]

    def step(self: object) -> None:
        raise ValueError("in the model") from error

    with pytest.raises(DeviceError, match="in the model"):
        parts_when_lost(step)(worker)
    assert worker.broken == broken
    if broken:
        assert not parted
        with pytest.raises(TransportError, match="context is broken"):
            worker.leave()
    else:
        assert worker.leave() == "here"


def test_what_an_error_was_raised_from_counts() -> None:
    error = ValueError("no data")
    error.__cause__ = ConnectionResetError("reset")
    assert kind_of(error) == "lost"


@pytest.mark.parametrize("error", [GONE, CheckpointError("step-1", "is damaged", "use an earlier one")])
def test_raypipes_own_error_is_told_without_rays_wrapping(error) -> None:
    assert isinstance(through_ray(error), type(error))
    assert describe(error) == str(error)
    assert describe(through_ray(error)) == str(error)
    assert describe(through_ray(through_ray(error))) == str(error)
    outer = RuntimeError("training failed")
    outer.__cause__ = through_ray(error)
    assert describe(outer) == str(error)


def test_other_errors_are_one_line() -> None:
    assert describe(ValueError("a\nb\nc")) == "ValueError: a"
    assert describe(KeyError()) == "KeyError"
    assert "\n" not in describe(through_ray(ZeroDivisionError("division by zero")))


def test_the_innermost_of_our_errors_is_the_cause() -> None:
    outer = RunError("run", "failed")
    outer.__cause__ = ValueError("x")
    assert describe(outer) == "run: failed"


def test_what_no_restart_mends() -> None:
    assert is_final(SpecError("a", "b"))
    assert is_final(RunError("layer 3", "more rows than it was captured for"))
    assert is_final(DevicesError("devices", "not free"))
    assert is_final(ZeroDivisionError())  # in the driver itself
    assert not is_final(GONE)
    assert not is_final(ray.exceptions.RayActorError())
    assert not is_final(ray.exceptions.GetTimeoutError("locate"))


def test_a_full_disk_shows_no_loss_of_a_worker() -> None:
    """Nor does another error of the system, which a run may be restarted for."""
    full = raised(OSError(errno.ENOSPC, "No space left on device"))
    assert full.kind == "lost"
    assert [shows_loss(error) for error in (full, through_ray(full))] == [False, False]
    assert [shows_loss(error) for error in (GONE, through_ray(GONE), ray.exceptions.RayActorError())] == [True] * 3


def test_the_message_says_what_to_do_and_where_the_traceback_is(tmp_path: Path) -> None:
    bug, full = raised(IndexError("no")), raised(MemoryError())
    first, second = keep_traceback(tmp_path, bug), keep_traceback(tmp_path, full)
    assert first == second
    kept = first.read_text()
    assert kept.index("IndexError: no") < kept.index("MemoryError")
    assert kept.count("Traceback (most recent call last)") == 2
    assert failure_message(bug, first).startswith(str(bug) + "\n  fix: correct the model")
    assert str(first) in failure_message(bug, first)
    assert str(first) in failure_message(full, first)
    assert "correct" not in failure_message(full, first)
    assert failure_message(GONE, first) == str(GONE)


DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: Stage
\tactor_id: 1d2c3b
\tpid: 4711
\tname: stage 1 · replica 0 · device 1 · 0123abcd-4567
\tnamespace: 5f
\tip: 10.0.0.3
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage."""


def test_a_death_names_the_device() -> None:
    error = ray.exceptions.RayActorError("1d2c3b", DEATH)
    assert describe(error) == (
        "stage 1 · replica 0 · device 1: its process (pid 4711) died: "
        "Worker unexpectedly exits with a connection error code 2. End of file."
    )
    assert describe(ray.exceptions.RayActorError()).startswith("a device: its process died")


USERS = """
import torch

def words():
    raise RuntimeError("the timeout token is not in the vocabulary")

def leaves():
    raise SystemExit("bye")

def row():
    return open("/no/such/row").read()

def label():
    return torch.nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([7]))

def token():
    return torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(3, 2))

def broken():
    torch.zeros(1).view(2)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("words", "RuntimeError: the timeout token is not in the vocabulary"),
        ("leaves", "SystemExit: bye"),
        ("row", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/row'"),
        ("label", "IndexError: Target 7 is out of bounds."),
        ("token", "IndexError: index out of range in self"),
        ("broken", "RuntimeError: shape '[2]' is invalid"),
    ],
)
def test_what_the_users_code_raises_ends_the_run_at_once(name: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "users.py"
    source.write_text(USERS)
    space: dict[str, Any] = {}
    exec(compile(USERS, str(source), "exec"), space)

    class Calls(Device):
        @raises_device_errors
        def work(self) -> object:
            return space[name]()

    with pytest.raises(DeviceError) as caught:
        Calls().work()
    assert caught.value.why.startswith(words)
    assert f"users.py:{USERS[: USERS.index(f'def {name}')].count(chr(10)) + 2} in {name}" in caught.value.why
    assert is_final(own_error(through_ray(caught.value)))


def test_a_call_that_tells_no_device_is_judged_by_its_cause() -> None:
    final, passing = through_ray(ValueError("no such row")), through_ray(ConnectionResetError("peer"))
    assert is_final(own_error(final))
    assert not is_final(own_error(passing))
    assert describe(final) == "ValueError: no such row"


def test_outside_a_run_the_cause_is_told_without_rays_traceback() -> None:
    bug = outside_a_run(through_ray(raised(IndexError("Target 7"))), [], "profile")
    assert type(bug) is RunError
    assert str(bug).startswith("stage 1 · replica 0 · device 1, 1F0 of step 3: IndexError: Target 7")
    assert "fix: correct the model" in str(bug)
    plain = outside_a_run(through_ray(ValueError("no such row")), [], "profile")
    assert str(plain) == "profile: ValueError: no such row\n  fix: correct the model, its data or the job"
    dead = outside_a_run(ray.exceptions.RayActorError("1d2c3b", DEATH), [], "profile")
    assert "a device died: stage 1 · replica 0 · device 1: its process (pid 4711) died" in str(dead)
    own = SpecError("model", "is wrong")
    assert outside_a_run(through_ray(own), [], "profile").args == own.args
    mine = KeyError("a defect of the driver")
    assert outside_a_run(mine, [], "profile") is mine


@pytest.mark.runs
def test_the_cause_wins_over_what_it_does_to_the_others(local_ray) -> None:
    devices = [ray.remote(Device).options(num_cpus=0).remote() for _ in range(3)]
    ray.get([device.work.remote() for device in devices])  # a process that still starts would answer too late

    def cause(*errors: tuple[Exception | None, float]) -> BaseException:
        refs = [device.work.remote(*what) for device, what in zip(devices, errors, strict=True)]
        with pytest.raises(Exception) as met:  # noqa: PT011
            ray.get(refs[0])
        return root_cause(met.value, refs)

    result = cause((GONE, 0.0), (None, 0.0), (IndexError("mine"), 0.3))
    assert isinstance(result, DeviceError)
    assert result.why.startswith("IndexError: mine")
    assert cause((GONE, 0.0), (None, 0.0), (None, 0.0)).args == GONE.args
    begun = time.monotonic()
    assert isinstance(cause((ValueError("at once"), 0.0), (None, 2.0), (None, 2.0)), DeviceError)
    assert time.monotonic() - begun < 2.0  # what explains itself is not waited with
    refs = [
        device.work.remote(*what)
        for device, what in zip(devices, [(GONE,), (RuntimeError("left"),), (None, 60)], strict=True)
    ]
    ray.kill(devices[2])
    with pytest.raises(TransportError) as first:
        ray.get(refs[0])
    dead = root_cause(first.value, refs)
    assert isinstance(dead, ray.exceptions.RayActorError)
    assert own_error(dead) is dead
    for device in devices[:2]:
        ray.kill(device)
