"""Data parallelism against hybrids: the published figures, the inequality, and tables that do not say enough."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.plan.hybrid import EpochsTable, compare, epochs_from, load_epochs

INCEPTION = Path(__file__).parents[2] / "jobs" / "epochs-inception-v3.yaml"


def test_inception_as_published() -> None:
    """Pal et al. 2019, section 5: +15.5 % at 64 GPUs, +26.5 % at 256."""
    result = compare(load_epochs(INCEPTION))
    gains = {row.devices: row.gain for row in result.rows}
    assert gains[64] == pytest.approx(0.155, abs=5e-4)
    assert gains[256] == pytest.approx(0.265, abs=5e-4)
    assert result.tipping_point == 64
    assert [row.best for row in result.rows if row.devices < 64] == ["dp"] * 6


def test_gnmt_as_published() -> None:
    """8 % at 256 GPUs and no gain before: what 256 workers' epochs must be for that, by Equation 5."""
    epochs = {64: 4, 128: 4.2}
    at_256 = 1.08 * 256 * 4.2 / (1.15 * 128)
    result = compare(epochs_from({"mp_speedup": {2: 1.15}, "epochs": {**epochs, 256: at_256}}))
    assert result.tipping_point == 256
    assert result.rows[-1].gain == pytest.approx(0.08)


def test_biglstm_as_published() -> None:
    """At 32 GPUs the hybrid is 1.22 times the best data parallelism, which is that of 16."""
    result = compare(epochs_from({"mp_speedup": {2: 1.22}, "epochs": {16: 5, 32: 16}}))
    rows = {row.devices: row for row in result.rows}
    assert result.tipping_point == 32
    assert rows[32].hybrid[2] == pytest.approx(1.22 * max(row.dp for row in result.rows))


def hybrid_wins(table: EpochsTable, split: int, workers: int) -> bool:
    """Return whether N workers of M devices beat M * N workers of one device: ``SU^M > M * SE_MN / SE_N * E_N / E_MN``.

    Source: Pal et al. 2019, Equation 6.
    """
    wide, where = split * workers, f"{split * workers} workers"
    efficiencies = table.efficiency_at(wide, where) / table.efficiency_at(workers, where)
    epochs = table.epochs_at(workers, where) / table.epochs_at(wide, where)
    return table.mp_speedup[split] > split * efficiencies * epochs


@given(
    su=st.floats(0.5, 4), first=st.floats(1, 50), growth=st.lists(st.floats(0.5, 4), min_size=5, max_size=5),
    lost=st.lists(st.floats(0.5, 1), min_size=5, max_size=5), split=st.sampled_from([2, 4]),
)  # fmt: skip
def test_a_hybrid_is_best_where_the_inequality_says_so(su, first, growth, lost, split) -> None:
    epochs, efficiency, share = {}, {}, 1.0
    for n, (more, less) in enumerate(zip(growth, lost, strict=True)):
        first, share = first * more, share * less
        epochs[4 * 2**n], efficiency[4 * 2**n] = first, share
    table = epochs_from({"mp_speedup": {split: su}, "epochs": epochs, "scaling_efficiency": efficiency})
    for row in compare(table).rows:
        if row.devices % split == 0 and abs(row.gain) > 1e-9:
            assert (row.gain > 0) == hybrid_wins(table, split, row.devices // split)
            assert (row.best != "dp") == (row.gain > 0)


def test_time_to_converge_is_the_product() -> None:
    table = {"mp_speedup": {2: 1.5}, "epochs": {2: 3, 4: 10}, "step_s": 0.5, "steps_per_epoch": 100}
    result = compare(epochs_from(table), [4])
    assert result.single_device_s == 0.5 * 100 * 3
    assert result.rows[0].hybrid[2] == 1.5 * 2  # two workers, each half as fast again, no more epochs


@pytest.mark.parametrize(
    ("table", "devices", "where", "why"),
    [
        ({"mp_speedup": {2: 1.3}, "epochs": {32: 4, 256: 9}}, None, "epochs", "says nothing about 128 workers"),
        ({"mp_speedup": {2: 1.3}, "epochs": {32: 4}}, [64], "epochs", "data parallelism on 64 devices"),
        (
            {"mp_speedup": {2: 1.3}, "epochs": {2: 4, 4: 5}, "scaling_efficiency": {2: 0.9}},
            None, "scaling_efficiency", "4 workers",
        ),
        ({"mp_speedup": {1: 1.3}, "epochs": {32: 4}}, None, "mp_speedup", ""),
        ({"epochs": {32: 4}}, None, "mp_speedup", "missing"),
        ({"mp_speedup": {2: 0}, "epochs": {32: 4}}, None, "mp_speedup.2", "is 0"),
        ({"mp_speedup": {2: 1.3}, "epochs": {32: -4}}, None, "epochs.32", "is -4"),
        ({"mp_speedup": {2: 1.3}, "epochs": {}}, None, "epochs", ""),
        ({"mp_speedup": {2: 1.3}, "epoch": {32: 4}}, None, "epoch", "unknown key"),
        ({"mp_speedup": {2: 1.3}, "epochs": {32: 4}, "scaling_efficiency": 1.2}, None, "scaling_efficiency", "1.2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_error(table, devices, where: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        compare(epochs_from(table), devices)
    assert where in caught.value.where
    assert why in caught.value.why
    assert caught.value.fix


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "speedup.svg"
    assert run(["hybrid", str(INCEPTION), "--json", "--plot", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["tipping_point"] == 64
    row = next(row for row in said["rows"] if row["devices"] == 256)
    assert row["best"] == "hybrid-2"
    assert row["hybrid"]["2"] / row["dp"] == pytest.approx(1.265, abs=5e-4)
    assert "tipping point: 64 devices" in picture.read_text()
    assert run(["hybrid", str(INCEPTION), "--devices", "64,x"]) == 2
    assert run(["hybrid", str(INCEPTION), "--devices", "0"]) == 2
    assert run(["hybrid", str(INCEPTION)]) == 0
    assert "from 64 devices on" in capsys.readouterr().out


def test_json_tables_have_text_for_keys(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"mp_speedup": {"2": 1.32}, "epochs": {"32": 4, "64": 7}}))
    assert compare(load_epochs(path)).tipping_point == 64


@pytest.mark.slow
def test_a_modelled_efficiency_is_the_planners(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """T_1 / T_N of two plans of the same job, made with its keys set by hand."""
    root = INCEPTION.parents[1]
    job, cluster = str(root / "jobs" / "bert-48.yaml"), str(root / "cluster" / "devices" / "v100.yaml")

    def step_s(workers: int) -> float:
        keys = ("parallel={}", "parallel.auto=true", "parallel.schedule=1f1b", "parallel.stages=1",
                f"parallel.replicas={workers}", f"train.batch={256 * workers}")  # fmt: skip
        sets = [word for key in keys for word in ("--set", key)]
        assert run(["autoconfigure", job, "--cluster", cluster, "--devices", str(workers), "--json", *sets]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["best"]["predicted_step_s"]

    table = tmp_path / "table.yaml"
    table.write_text("mp_speedup: {2: 1.3}\nepochs: {8: 4, 16: 7}\n")
    assert run(["hybrid", str(table), "--job", job, "--cluster", cluster, "--devices", "16", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    one = step_s(1)
    assert row["dp"] == pytest.approx(one / step_s(16) * 16 * 4 / 7, rel=1e-6)
    assert row["hybrid"]["2"] == pytest.approx(1.3 * one / step_s(8) * 8, rel=1e-6)
    assert run(["hybrid", str(table), "--job", job]) == 2
    assert run(["hybrid", str(INCEPTION), "--job", job, "--cluster", cluster]) == 2
