import csv
import io
from types import SimpleNamespace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.forms.text import from_text, to_torch_csv

SPLIT = from_text(
    "device 0: 0F0 0F1 0B0 0W0 0BW1 0AR 0U\ndevice 1: 1F0 1B0 1F1 1BW1 1W0 1AR 1U\n", "split"
)  # B and W apart, a joint BW, and the bookkeeping that torch does itself


def torch_loads(text, path, devices, stages, microbatches):
    """Give ``text`` to torch's own loader, which checks the orders and plans the messages (or says it cannot)."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path.write_text(text)
    stage = SimpleNamespace(
        group_size=devices, group_rank=0, num_stages=stages, stage_index=0, is_last=stages == 1, has_backward=False,
        stage_index_to_group_rank={}, group=None, device="cpu", submod=None,
    )  # fmt: skip
    runtime = schedules._PipelineScheduleRuntime([stage], microbatches)
    runtime._load_csv(str(path))
    return runtime


def test_letters():
    assert to_torch_csv(SPLIT) == "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n"


def test_torch_loads_it(tmp_path):
    runtime = torch_loads(to_torch_csv(SPLIT), tmp_path / "s.csv", 2, 2, 2)
    rows = list(csv.reader(io.StringIO(to_torch_csv(SPLIT))))
    assert {d: [str(a) for a in actions] for d, actions in runtime.pipeline_order.items()} == dict(enumerate(rows))
    sends = [str(a) for a in runtime.pipeline_order_with_comms[0] if "SEND" in str(a)]
    assert sends == ["0SEND_F0", "0SEND_F1"]
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("device 0: 0F0 1F1@1\ndevice 1: 1F0 0F1@1", "2 replicas put stage 0 on devices 0 and 1"),
        ("device 0: 0F0 0R0 0BW0", "0R0 on device 0 is a recompute task"),
        ("device 0: 0F0,1 0BW0 0BW1", "carries 2 micro-batches"),
        ("w_dep grad\ndevice 0: 0F0 0W0 0B0", "0W0 on device 0 runs with no B"),
        ("skip_first_B\ndevice 0: 0F0 0W0", "runs with no B"),
        ("edges 0>1 0>2 1>2\ndevice 0: 0F0\ndevice 1: 1F0\ndevice 2: 2F0", "not a chain"),
        ("versions stash\ndevice 0: 0F0 0BW0", "weight versions"),
        ("device 0: 0F0 0BW0 0U 0F1 0BW1", "before the end of the step"),
        ("placement 0\ndevice 0: 0F0 0BW0\ndevice 1:", "device 1 has no task"),
    ],
)
def test_refuses_what_torch_cannot_express(text, why):
    with pytest.raises(ScheduleError, match="torch CSV") as caught:
        to_torch_csv(from_text(text, "s"))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpipe", {}), ("1f1b", {}), ("interleaved-1f1b", {"chunks": 2}), ("bfs", {"chunks": 2}), ("zb-h1", {}),
     ("zb-h2", {}), ("zb-v", {}), ("zeropp", {"chunks": 2, "unit": 4})],
)  # fmt: skip
def test_torch_loads_every_schedule_it_can_express(name, options, tmp_path):
    schedule = generate(name, Shape(devices=4, microbatches=8, **options))
    runtime = torch_loads(to_torch_csv(schedule), tmp_path / "s.csv", 4, schedule.stages, 8)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement[0]))
    assert [len(actions) for actions in runtime.pipeline_order.values()] == [len(order) for order in schedule.orders]


@pytest.mark.parametrize(
    "name", ["chimera", "gems", "pipedream", "pipedream-2bw", "early-recompute", "fast-forward", "modulo"]
)
def test_says_so_for_every_schedule_it_cannot(name):
    shape = Shape(devices=2, microbatches=1 if name in ("fast-forward", "modulo") else 4)
    with pytest.raises(ScheduleError, match="torch"):
        to_torch_csv(generate(name, shape))
