import io

from rich.console import Console

from raypipe.observe.palette import LOOKS
from raypipe.observe.terminal import caption, draw, draw_coloured, folded, legend, show


def test_the_readme_picture(timeline):
    assert draw(timeline("1f1b")) == [
        "device 0  0123......aa.bb.cc.dd",
        "device 1  .012....aa3bb.cc.dd..",
        "device 2  ..01..aa2bb3cc.dd....",
        "device 3  ...0aa1bb2cc3dd......",
    ]


def test_every_kind_has_its_character(written):
    spans = written("device 0: 0F0 0F1 0R0 0B0 0W0 0BW1\n", recompute=1.0)
    assert draw(spans) == ["device 0  01⁰aAbb"]
    assert legend([spans]).plain == (
        "digit: forward of that micro-batch, letter: input gradient, letter: backward, "
        "capital: weight gradient, raised digit: recompute"
    )


def test_scales_to_the_width(timeline):
    long = timeline("1f1b", microbatches=16, forward=1.37, input_grad=2.1)
    lines = draw(long, width=80)
    assert {len(line) for line in lines} == {80}
    idle = sum(line[10:].count(".") for line in lines) / (4 * 70)
    assert abs(idle - long.bubble_ratio) < 0.02  # columns are in proportion to time


def test_a_column_is_the_largest_step_that_divides_all_times(timeline):
    lines = draw(timeline("1f1b", devices=2, microbatches=2, forward=0.5, input_grad=0.5))
    assert lines == ["device 0  01...aaa.bbb", "device 1  .0aaa1bbb..."]


def test_colours_show_numbers_and_bounds(timeline):
    rows = draw_coloured(timeline("1f1b", microbatches=12), width=200)
    assert all(row.cell_len <= 200 for row in rows)
    assert " 11" in f" {rows[0].plain.split()[-1]}"
    assert len({look.style for look in LOOKS.values()}) == len(LOOKS)


def test_plain_text_into_a_file_and_colour_on_a_terminal(timeline):
    plain, coloured = io.StringIO(), io.StringIO()
    show([timeline("1f1b")], Console(file=plain, width=100))
    show([timeline("1f1b")], Console(file=coloured, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b" not in plain.getvalue()
    assert "device 3  ...0aa1bb2cc3dd......\n1f1b: makespan 21, bubble 42.9 %" in plain.getvalue()
    assert "\x1b[30;104m" in coloured.getvalue()


def test_several_share_one_time_axis(timeline):
    out = io.StringIO()
    show([timeline("1f1b"), timeline("1f1b", microbatches=8)], Console(file=out, width=44))
    lines = out.getvalue().splitlines()
    assert len(lines[7]) == 43  # 33 units, one column each; the shorter one keeps that scale
    assert (len(lines[0]), lines[4][:6]) == (31, "1f1b: ")


def test_empty_device_and_zero_times(written):
    assert draw(written("placement 0\ndevice 0: 0F0 0BW0\ndevice 1:\n")) == ["device 0  0aa", "device 1  ..."]
    assert draw(written("device 0: 0F0 0BW0\n", forward=0.0, input_grad=0.0, weight_grad=0.0)) == ["device 0  "]


def test_caption(timeline):
    assert caption(timeline("1f1b")) == "1f1b: makespan 21, bubble 42.9 %, peak activations 4 3 2 1"
    assert folded([2, 2, 2, 2, 1, 1]) == "2 (x4) 1 1"
