"""``raypipe partition``: the JSON that checks rely on, the drawing, and what is refused."""

from __future__ import annotations

import json

import pytest

from raypipe.cli import run

JOB = """
name: small
model: {hf: gpt2, config: {n_layer: 12, n_embd: 512, n_head: 8, vocab_size: 60000}, sequence: 512}
data: {type: bytes, path: stdlib}
train: {steps: 1, batch: 16}
parallel: {schedule: 1f1b, stages: 2, microbatch: 1}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return str(file)


@pytest.mark.slow
def test_gpt2_is_an_embedding_attentions_mlps_and_a_head(path, capsys):
    assert run(["partition", path, "--stages", "4", "--cluster", "cluster/devices/a100.yaml", "--json"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert out.count("\n") == 1
    labels = [s["label"] for s in result["subgraphs"]]
    assert labels == ["embedding", *["attention", "mlp"] * 12, "head"]  # 2 * layers + 2: 98 for 48 layers
    assert result["most_tensors_across_any_cut"] == 1
    (tensor,) = result["cuts"][0]["tensors"]
    assert (tensor["shape"], tensor["dtype"], tensor["bytes"]) == ([1, 512, 512], "float32", 2**20)
    assert len(result["stages"]) == 4
    assert len(result["cuts"]) == 3
    for stage in result["stages"]:
        first, end = stage["subgraphs"]
        assert stage["seconds"] == pytest.approx(sum(s["seconds"] for s in result["subgraphs"][first:end]))
    deals = result["balance"]
    assert deals["balanced"]["step_s"] < deals["even"]["step_s"]  # the head is heavy
    assert max(deals["balanced"]["stage_seconds"]) < max(deals["even"]["stage_seconds"])

    assert (
        run(["partition", path, "--cluster", "cluster/devices/a100.yaml"]) == 0
    )  # from the cache: torch is not needed
    drawn = capsys.readouterr().out
    parameters = 60000 * 512 + 1024 * 512 + 12 * (12 * 512**2 + 13 * 512) + 2 * 512  # the head is tied
    assert f"small: {parameters:,} parameters in 26 sub-graphs; at most 1 tensor across any cut" in drawn
    (strip,) = (line for line in drawn.splitlines() if line.startswith("Eam"))
    assert strip.replace("|", "").strip() == "E" + "am" * 12 + "H"
    assert "balanced is " in drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "30"], "parallel.stages: 30 stages for a model of 26 layers\n  fix: use 1 to 26"),
        (["--profile", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--profile", "x.json", "--cluster", "y.yaml"], "--cluster: a profile already describes its devices"),
        (["--memory-gib", "0"], "--memory-gib: 0 GiB is not a memory size"),
        (["--memory-gib", "0.001"], "no cut into 2 stages fits the 1 MiB of a device; the leanest needs"),
        (["--set", "model.hf=gpt3"], 'model.hf: "gpt3" is neither a model type nor a local directory'),
        (["--set", "model.config.n_layers=3"], 'did you mean "n_layer"'),
    ],
)
def test_what_is_refused(options, said, path, capsys):
    assert run(["partition", path, *options]) == 2
    assert said in capsys.readouterr().err
