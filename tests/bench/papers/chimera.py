"""Chimera's evaluation (section 4) from costs: which configuration, how much faster than whom, who fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.chimera_model import closed_form
from raypipe.cost.profile import CollectivePath, LinkFit, Profile
from raypipe.job import load_cluster
from tests.bench.papers.models import bert_48, gpt2_64
from tests.bench.papers.steps import Config, costs, fits, memory, pipeline, step_seconds, table, throughput

GIB = 2**30
MACHINE = "cluster/devices/piz-daint.yaml"


def profiles() -> tuple[Profile, Profile]:
    """Bert-48 and GPT-2 on one and the same machine."""
    machine = load_cluster(MACHINE)
    bert, gpt = bert_48(), gpt2_64()
    assert sum(w.parameters for w in bert) == 669_790_012
    assert sum(w.parameters for w in gpt) == 1_389_327_360
    return analytic_profile(bert, machine, "float32"), analytic_profile(gpt, machine, "float32")


def chimera_choices(profile: Profile, nodes: int, batch: int) -> Iterator[Config]:
    """Chimera's own rule (section 3.4): per depth the largest B that fits and leaves N >= D; recompute if none does."""
    for depth in (2, 4, 8, 16, 32, 64):
        width = nodes // depth
        if width < 1 or depth > len(profile.layers) - 2:
            continue
        found = None
        for recompute in (False, True):
            for b in (64, 32, 16, 8, 4, 2, 1):
                count = batch // (width * b)
                if batch % (width * b) or count < depth:
                    continue
                config = Config(
                    schedule="chimera", width=width, depth=depth, microbatch=b, count=count, recompute=recompute,
                    sync="eager-opt",
                )  # fmt: skip
                if found is None and fits(profile, config):
                    found = config
        if found is not None:
            yield found


def choice(profile: Profile, nodes: int, batch: int) -> str:
    """The table of configurations, fastest first, with the simulator's and the closed model's time."""
    rows = []
    for config in chimera_choices(profile, nodes, batch):
        seconds = step_seconds(profile, config)
        closed = closed_form(pipeline(config), costs(profile, config), config.width).step_s
        need = max(d.total for d in memory(profile, config)) / GIB
        rows.append(
            (seconds, [str(config), f"{seconds:.2f}", f"{closed:.2f}", f"{batch / seconds:.0f}", f"{need:.1f}"])
        )
    rows.sort()
    best = rows[0][0]
    cells = [[*cells[:3], cells[3], f"{seconds / best - 1:+.1%}", cells[4]] for seconds, cells in rows]
    return table(["configuration", "simulated s", "Eq. 1 s", "samples/s", "behind the best", "GiB of 15.9"], cells)


def scaled(name: str, nodes: int, depth: int, b: int, batch: int, recompute: bool = False, **options: object) -> Config:
    """A configuration on a number of nodes."""
    width = nodes // depth
    return Config(
        schedule=name,
        width=width,
        depth=depth,
        microbatch=b,
        count=batch // (width * b),
        recompute=recompute,
        **options,
    )  # type: ignore[arg-type]


def single_figures() -> str:
    """Two figures that stand alone."""
    bert, gpt = profiles()
    small, large = (scaled("chimera", n, 32, 1, n, sync="eager-opt") for n in (512, 2048))
    efficiency = throughput(gpt, large) / throughput(gpt, small) / 4
    opt = scaled("chimera", 64, 4, 8, 1024, sync="eager-opt")
    eager = throughput(bert, opt) / throughput(bert, replace(opt, sync="eager"))
    rows = [
        ["GPT-2, weak scaling from 512 to 2,048 nodes: parallel efficiency", f"{efficiency:.1%}", "91.4%"],
        ["Bert-48, 64 nodes: eager-sync-opt over eager-sync", f"{eager:.2f}", "1.09"],
    ]
    return table(["figure", "ours", "paper's"], rows)


def sensitivity() -> str:
    """The two choices for other links than the estimated ones."""
    bert, gpt = profiles()
    size = gpt.layers[1].output_bytes
    rows = []
    for milliseconds in (3.0, 5.0, 7.0, 9.0):
        cells = [f"{milliseconds:.0f} ms"]
        for bandwidth in (3.0, 4.0, 5.0, 6.0):
            # Half of a GPT-2 message's time is latency, half bandwidth.
            links = {
                "between": LinkFit(alpha_s=milliseconds / 2e3, beta_s_per_byte=milliseconds / 2e3 / size),
                "collective": CollectivePath(
                    alpha_s=1e-4, beta_s_per_byte=1e-9 / bandwidth, algorithm="ring", at_once=2
                ),
            }
            own, other = (profile.model_copy(update=links) for profile in (bert, gpt))
            depth = min((4, 8, 16), key=lambda d: step_seconds(own, scaled("chimera", 32, d, 8, 256, sync="eager-opt")))
            shallow = step_seconds(other, scaled("chimera", 512, 8, 1, 512, True, sync="eager-opt"))
            deep = step_seconds(other, scaled("chimera", 512, 32, 1, 512, sync="eager-opt"))
            cells.append(f"D={depth}; {shallow / deep:.2f}")
        rows.append(cells)
    head = ["message of 3.2 MB", *(f"gradient sums at {b} GB/s" for b in (3, 4, 5, 6))]
    return table(head, rows)


def who_fits() -> str:
    """Recomputation that the paper's configurations need, and the largest micro-batches that fit."""
    bert, gpt = profiles()
    claims = [
        ("Bert-48", bert, scaled("chimera", 32, 4, 8, 256), True, "Chimera runs it"),
        ("Bert-48", bert, scaled("gpipe", 32, 4, 4, 512), False, "GPipe needs R"),
        ("Bert-48", bert, scaled("dapple", 32, 4, 8, 1024), True, "DAPPLE runs it"),
        ("Bert-48", bert, scaled("pipedream-2bw", 32, 4, 16, 512), False, "2BW needs R"),
        ("Bert-48", bert, scaled("gems", 32, 4, 32, 512), True, "GEMS runs it"),
        ("Bert-48", bert, scaled("pipedream", 32, 8, 12, 48 * 8), True, "PipeDream's largest"),
        ("Bert-48", bert, scaled("pipedream", 32, 8, 16, 64 * 8), False, "beyond PipeDream's largest"),
        ("GPT-2", gpt, scaled("chimera", 512, 32, 1, 512), True, "Chimera runs it"),
        ("GPT-2", gpt, scaled("chimera", 512, 8, 1, 512), False, "Chimera needs R"),
        ("GPT-2", gpt, scaled("dapple", 512, 16, 1, 512), False, "DAPPLE needs R"),
        ("GPT-2", gpt, scaled("gpipe", 512, 16, 1, 512), False, "GPipe needs R"),
        ("GPT-2", gpt, scaled("pipedream-2bw", 512, 16, 1, 512), False, "2BW needs R"),
        ("GPT-2", gpt, scaled("gems", 512, 8, 2, 512), True, "GEMS runs it"),
    ]
    rows = []
    for model, profile, config, theirs, words in claims:
        need = max(d.total - d.base for d in memory(profile, config)) / GIB
        ours = fits(profile, config)
        rows.append([model, f"{config.schedule}, {config}", f"{need:.1f}", "yes" if ours else "no", words,
                     "" if ours == theirs else "differs"])  # fmt: skip
    return table(["model", "configuration without recomputation", "GiB of tensors", "fits", "paper", ""], rows)


def sections() -> Iterator[tuple[str, str]]:
    """Titles and tables."""
    bert, gpt = profiles()
    yield "Bert-48 on 32 nodes, B_hat = 256 (paper: W=8, D=4 is best)", choice(bert, 32, 256)
    yield (
        "GPT-2 of 64 layers on 512 nodes, B_hat = 512 (paper: W=64, D=8, R and W=16, D=32 are 1.7 % apart at the top)",
        choice(gpt, 512, 512),
    )
    yield (
        "How much hangs on the estimated links: Bert-48's best D; time of GPT-2's W=64, D=8, R over W=16, D=32",
        sensitivity(),
    )
    yield "Two more figures", single_figures()
    yield "Who fits into a P100", who_fits()
