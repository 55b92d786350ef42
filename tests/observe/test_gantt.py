import xml.etree.ElementTree as ElementTree

import pytest

from raypipe.errors import RequestError
from raypipe.observe.figures import gantt, memory_plot, save
from raypipe.observe.palette import colour, oklch
from raypipe.schedule.forms.text import parse_task
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.simulate.timeline import critical_path

SVG = "{http://www.w3.org/2000/svg}"


def boxes(axes):
    """Corners of the boxes, by the collection that draws them."""
    return [path.get_extents().extents for c in axes.collections for path in c.get_paths()]


def test_one_box_per_task_at_its_time(timeline):
    spans = timeline("1f1b")
    result = boxes(gantt([spans]).axes[0])
    expected = [(s.start, s.end, d) for d, row in enumerate(spans.spans) for s in row]
    assert sorted((x0, x1, round((y0 + y1) / 2)) for x0, y0, x1, y1 in result) == sorted(expected)


def test_replicas_are_hatched_and_named(timeline):
    figure = gantt([timeline("chimera")])
    assert [bool(c.get_hatch()) for c in figure.axes[0].collections] == [False, True]
    assert "replica 1" in [t.get_text() for t in figure.legends[0].get_texts()]


def test_later_chunks_get_a_foot(timeline):
    spans = timeline("interleaved-1f1b", chunks=2)
    tasks = sum(map(len, spans.spans))
    assert len(boxes(gantt([spans]).axes[0])) == tasks + tasks // 2


def test_one_time_axis_for_several(timeline):
    figure = gantt([timeline("1f1b", microbatches=8), timeline("gpipe")])
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 33), (0, 33)]


def test_the_critical_path_is_outlined(timeline):
    spans = timeline("chimera")
    plain, outlined = (gantt([spans], critical=flag).axes[0].collections for flag in (False, True))
    assert len(outlined) == len(plain) + 1
    boxes = [path.get_extents() for path in outlined[-1].get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(s.start, s.end) for s in critical_path(spans).spans]
    assert (boxes[0].x0, boxes[-1].x1) == (0, spans.makespan)


def test_one_micro_batch_is_numbered_by_stage(timeline):
    figure = gantt([timeline("model-parallel", devices=2, microbatches=1, chunks=2)])
    assert sorted(text.get_text() for text in figure.axes[0].texts) == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_svg_is_small_valid_and_the_same_every_time(timeline, tmp_path):
    for name in ("a.svg", "b.svg"):
        save(gantt([timeline("chimera", microbatches=8)]), tmp_path / name)
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    assert len(first) < 25_000
    words = {"".join(t.itertext()) for t in ElementTree.fromstring(first).iter(f"{SVG}text")}
    assert {"chimera", "device 0", "7"} <= words
    assert any("bubble 20.0 %" in " ".join(w.split()) for w in words)


def test_png_and_refusals(timeline, tmp_path):
    save(gantt([timeline("1f1b")]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="picture format"):
        save(gantt([timeline("1f1b")]), tmp_path / "a.gif")
    with pytest.raises(RequestError, match="No such file"):
        save(gantt([timeline("1f1b")]), tmp_path / "none" / "a.svg")


def test_memory_plot_reaches_each_peak(timeline):
    spans = timeline("1f1b", microbatches=8)
    figure = memory_plot([spans])
    tops = [max(axes.lines[0].get_ydata()) for axes in figure.axes]
    assert tops == list(spans.peak_activations) == [4, 3, 2, 1]


def test_memory_plot_of_many_devices_shows_a_choice_of_them(timeline):
    figure = memory_plot([timeline("1f1b", devices=40, microbatches=2)])
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert len(labels) == 16
    assert (labels[0], labels[-1]) == ("device 0", "device 39")


def test_colours_tell_micro_batch_and_kind():
    tasks = [parse_task(f"0{kind}{mb}") for kind in ("F", "B", "BW", "W", "R") for mb in range(8)]
    eight = Schedule(name="s", placement=((0,),), orders=((),), microbatches=8, graph=StageGraph.chain(1))
    shades = [colour(task, eight) for task in tasks]
    assert len({tuple(round(255 * c) for c in shade) for shade in shades}) == len(tasks)
    assert oklch(1, 0, 0) == pytest.approx((1, 1, 1), abs=1e-6)
    assert oklch(0, 0, 0) == (0, 0, 0)
    assert oklch(0.627955, 0.257683, 29.2339) == pytest.approx((1, 0, 0), abs=2e-3)  # sRGB red


def test_an_all_reduce_is_a_strip_over_the_compute_beside_it(written):
    spans = written(
        "device 0: 0F0 1F1@1 1BW1@1 1AR@1 0BW0 0AR\ndevice 1: 1F0 0F1@1 1BW0 1AR 0BW1@1 0AR@1\n", all_reduce=1.5
    )
    last = gantt([spans]).axes[0].collections[-2:]
    strips = [path.get_extents() for collection in last for path in collection.get_paths()]
    reduces = [s for row in spans.spans for s in row if s.task.kind == "AR"]
    assert sorted((b.x0, b.x1) for b in strips) == sorted((s.start, s.end) for s in reduces)
    assert all(box.height < 0.3 for box in strips)
