"""A profile in the terminal: every kind of layer once, every size a row."""

import io

from rich.console import Console

from raypipe.cost.profile import CollectiveFit, LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.observe.tables import profile_tables


def layer(name: str, parameters: int) -> LayerProfile:
    times = {
        n: TaskTimes(
            forward=n * 1e-3, input_grad=n * 2e-3, weight_grad=n * 1.5e-3, joint=n * 3e-3, recompute=n * 1.1e-3,
            spread=0.04,
        )
        for n in (2, 4)
    }  # fmt: skip
    return LayerProfile(
        name=name, parameters=parameters, times=times, kept_bytes=2048.0, waiting_bytes=512.0, output_bytes=64.0
    )


def test_the_table_holds_everything() -> None:
    fit = LinkFit(alpha_s=3e-5, beta_s_per_byte=1e-9, error=0.02)
    tree = CollectiveFit(kind="all_reduce", group=2, model="tree", alpha_s=1e-4, beta_s_per_byte=2e-9, error=0.1)
    profile = Profile(
        source="measured", device="a core", dtype="float32", devices=4, devices_per_host=2, memory_bytes=3 << 30,
        layers=(layer("embedding", 10), layer("block.0", 20), layer("block.1", 20), layer("head", 30)),
        update_s_per_parameter=3e-9, task_overhead_s=5e-6, inside=fit, between=fit, collectives=(tree,),
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(profile_tables(profile))
    lines = console.export_text().splitlines()
    (blocks,) = [k for k, line in enumerate(lines) if "block" in line]
    assert lines[blocks].split() == [
        "block.0",
        "-",
        "block.1",
        "20",
        "2",
        "KiB",
        "512",
        "bytes",
        "2",
        "2",
        "4%",
        "4",
        "3",
        "6",
        "2.2",
    ]
    assert lines[blocks + 1].split() == ["4", "4", "4%", "8", "6", "12", "4.4"]
    text = "\n".join(lines)
    for piece in (
        "3 GiB each",
        "30 us + bytes / 1.00 GB/s",
        "between hosts",
        "all_reduce over 2: tree",
        "3.00 ns per parameter",
    ):
        assert piece in text
