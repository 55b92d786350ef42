"""Weight gradients and updates on a second stream: the parameters of one stream, however late that stream is."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.update import late_updates
from raypipe.runtime.update.side_stream import DeviceStream, ThreadStream
from tests.runtime.host_waits import side_order
from tests.runtime.runs.one_device import LR, even_cut, one_device

MODEL = GptSpec(layers=4, hidden=16, heads=2, sequence=8, vocabulary=32, dropout=0.1, tie_embeddings=True)
BATCH, MICROBATCH, STEPS = 8, 2, 4


class Slow(ThreadStream):
    """A second stream that begins its work late, so that whoever does not wait is found out."""

    def run(self, work, keep=()):
        def later() -> None:
            time.sleep(0.003)
            work()

        return super().run(later, keep)


def rows() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (BATCH, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}


def trained(tied: bool, stages: int, held: dict[int, int] | None, order: str | None = None, validates: int = -1) -> Any:
    """Losses, norms and parameters after a few steps; results are asked for as the driver does, a step late."""
    spec = MODEL.model_copy(update={"tie_embeddings": tied})
    model = GptLayers(spec, torch.float64)
    count = BATCH // MICROBATCH
    text = order or side_order(stages, count, held or {})
    made = one_device(
        model, even_cut(model, stages), rows(), torch.float64, MICROBATCH, split=True, text=text, side_stream=held
    )
    for optimizer in made.executor.updates.optimizers.values():  # momentum: the order of updates shows
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
    results, before = [], None
    for step in range(STEPS):
        started = made.executor.start(made.program, step, 0.001 * LR)
        if before is not None:
            results.append(before.result())
        before = started
        if step == validates:
            made.executor.updates.commit()
            assert not made.executor.updates._held or not any(made.executor.updates._held.values())
    assert before is not None
    results.append(before.result())
    made.executor.updates.commit()
    made.executor.close()
    values = {name: p.detach().clone() for stage in made.stages for name, p in stage.named.items()}
    return [(r.loss_sum, r.norm_squared) for r in results], values


def assert_alike(one: Any, two: Any) -> None:
    for (loss, norm), (other, its) in zip(one[0], two[0], strict=True):
        assert loss == pytest.approx(other, abs=1e-9, rel=0)
        assert norm == pytest.approx(its, rel=1e-9)
    for name, value in one[1].items():
        assert (value - two[1][name]).abs().max() <= 1e-9, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("stages", "held"),
    [(4, {}), (4, {1: 0, 2: 1}), (6, {1: 1, 3: 0, 4: 2, 5: 5}), (6, {5: 0, 4: 0, 3: 0, 2: 0, 1: 0}), (1, {})],
)
def test_the_numbers_of_one_stream(tied, stages, held, monkeypatch) -> None:
    """In float64 with dropout; also where a held weight gradient is due before the forward that it was to wait for."""
    monkeypatch.setattr("raypipe.runtime.executor.executor.side_stream", lambda device: Slow())
    assert_alike(trained(tied, stages, held), trained(tied, stages, None))


def test_a_joint_backward_and_a_validation_between_steps(monkeypatch) -> None:
    monkeypatch.setattr("raypipe.runtime.executor.executor.side_stream", lambda device: Slow())
    count = BATCH // MICROBATCH
    order = "device 0: " + " ".join(
        f"0F{m} 1F{m} 2F{m} 2BW{m} 1BW{m} 0BW{m}" for m in range(count)
    )  # fmt: skip
    assert_alike(trained(True, 3, {2: 1}, order, validates=1), trained(True, 3, None, order))


@pytest.mark.parametrize("forgets", ["before_forward", "before_backward"])
def test_a_main_stream_that_does_not_wait_is_found_out(forgets, monkeypatch) -> None:
    monkeypatch.setattr("raypipe.runtime.executor.executor.side_stream", lambda device: Slow())
    expected = trained(False, 4, None)
    monkeypatch.setattr(late_updates.SideUpdates, forgets, lambda self, key: None)
    if forgets == "before_backward":  # only a parameter that both streams add to has to be waited for
        assert_alike(trained(False, 4, {}), expected)
        return
    with pytest.raises((AssertionError, RuntimeError)):
        assert_alike(trained(False, 4, {}), expected)


def test_an_error_of_the_second_stream_comes_out(monkeypatch) -> None:
    class Broken(ThreadStream):
        def run(self, work, keep=()):
            def fail() -> None:
                raise ArithmeticError("planted")

            return super().run(fail, keep)

    monkeypatch.setattr("raypipe.runtime.executor.executor.side_stream", lambda device: Broken())
    with pytest.raises(ArithmeticError, match="planted"):
        trained(False, 4, {})


class Event:
    """An event that passes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Stream:
    def wait_event(self, event: Event) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_what_a_device_still_reads_lives_until_it_has_read_it(monkeypatch) -> None:
    """The allocator gives freed memory of the main stream to its next kernel at once."""
    events: list[Event] = []

    def event() -> Event:
        events.append(Event())
        return events[-1]

    for name, stand_in in {
        "make_stream": lambda _: Stream(), "current_stream": lambda _: Stream(), "make_event": event,
        "use": lambda stream: stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"raypipe.runtime.update.side_stream.{name}", stand_in)
    side = DeviceStream(torch.device("cpu"))
    x = torch.ones(3)
    alive = weakref.ref(x)
    side.run(lambda: None, keep=[x])
    del x
    side.run(lambda: None)
    assert alive() is not None
    events[1].passed = True  # the end of the first work
    side.run(lambda: None)
    assert alive() is None
    side.close()


@pytest.mark.gpu
def test_a_gpu_s_second_stream_gives_the_numbers_of_its_first() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from raypipe.runtime.update.optimizer import learning_rate
    from tests.runtime.host_waits import executor

    result = []
    for how in ({"side": {1: 0, 2: 1}}, {"split": True}):
        runner, program, train = executor(torch.device("cuda", 0), {"clip": None, **how})
        results = [runner.run(program, step, learning_rate(train, step)) for step in range(5)]
        result.append([(r.loss_sum, r.norm_squared) for r in results])
        runner.close()
    for one, two in zip(*result, strict=True):
        assert one == pytest.approx(two, abs=1e-9, rel=1e-9)
