"""Every way a job file can be wrong is one SpecError that says where, why and what to write."""

import subprocess
import sys

import pytest
import yaml

from raypipe.errors import SpecError
from raypipe.job import JobSpec, job_from, load_job
from raypipe.schedule import SCHEDULES

JOB = {
    "name": "small",
    "model": {"type": "gpt", "layers": 4, "hidden": 32, "heads": 4, "sequence": 16},
    "data": {"type": "bytes", "path": "stdlib"},
    "train": {"steps": 10, "batch": 8},
    "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
}


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def test_a_good_file_with_defaults_filled_in(job_file):
    job = load_job(job_file)
    assert (job.name, job.model.vocabulary, job.train.optimizer, job.parallel.chunks) == ("small", 256, "adamw", 1)
    assert (job.microbatches, job.parallel.devices) == (4, 2)


def test_without_a_barrier_nothing_is_clipped(job_file):
    with pytest.raises(SpecError, match="needs the norm of all gradients first") as refused:
        load_job(job_file, ["train.clip=1", "parallel.replicas=2", "parallel.sync=prioritised"])
    assert "use sync: wait-free, or set train.clip to null" in str(refused.value)
    assert load_job(job_file, ["train.clip=null", "parallel.replicas=2", "parallel.sync=prioritised"])


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["parallel.stages=2"], "is for one device, and the job has 2"),
        (["parallel.replicas=2"], "is for one device, and the job has 2"),
        (["train.clip=1"], "clipping needs the norm of all gradients first"),
        (["train.on_nonfinite=skip"], "before another may find such a number"),
        (["parallel.sync=eager"], "one device sums nothing"),
        (["parallel.replan=true"], "no order is chosen by measured times"),
        (["parallel.side_stream={1: 2}"], "stage 1 beside the forward of stage 2, of 4"),
        (["parallel.side_stream={4: 0}"], "stage 4 beside the forward of stage 0, of 4"),
        (["parallel.side_stream={0: 0}"], "stage 0 beside the forward of stage 0, of 4"),
        (["parallel={auto: true, side_stream: {3: 1}}"], "cannot be given if the planner chooses the plan"),
    ],
)  # fmt: skip
def test_what_a_second_stream_cannot_be_combined_with(job_file, sets, why):
    usual = ["train.clip=null", "parallel.stages=1", "parallel.schedule=zeropp", "parallel.chunks=4", "model.layers=4"]
    usual.append("parallel.side_stream={3: 1}")
    assert load_job(job_file, usual).parallel.side_stream == {3: 1}
    with pytest.raises(SpecError) as refused:
        load_job(job_file, [*usual, *sets])
    assert why in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["train.cuda_graphs=tasks"], "captures compiled stages, and compile is none"),
        (["train.cuda_graphs=tasks", "train.compile=inductor", "parallel.replicas=2", "parallel.shard=zero1"],
         "graphs read fixed addresses"),
        (["train.cuda_graphs=tasks", "train.compile=inductor", "parallel.schedule=pipedream-2bw"],
         "keeps several versions of the weights"),
        (["train.cuda_graphs=step"], "step is for one device without a pipeline, and the job has 2 devices"),
        (["train.cuda_graphs=step", "parallel={auto: true}"], "the planner chooses the devices"),
        (["train.cuda_graphs=step", "train.clip=null", "parallel.stages=1", "parallel.schedule=zeropp",
          "parallel.chunks=4", "model.layers=4", "parallel.side_stream={3: 1}"], "holds weight gradients back"),
    ],
)  # fmt: skip
def test_what_cuda_graphs_cannot_be_combined_with(job_file, sets, why):
    usual = ["parallel.schedule=1f1b", "parallel.stages=2", "parallel.microbatch=2"]
    assert load_job(job_file, [*usual, "train.cuda_graphs=auto"]).train.cuda_graphs == "auto"
    with pytest.raises(SpecError) as refused:
        load_job(job_file, [*usual, *sets])
    assert refused.value.where.endswith("train.cuda_graphs")
    assert why in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_what_reads_whole_matrices_is_planned_without_dividing_parameters(job_file, optimizer):
    usual = [f"train.optimizer={optimizer}", "parallel.schedule=1f1b", "parallel.microbatch=2"]
    shards = "parallel={replicas: 2, shard: zero1}"
    for wish in ("parallel={auto: true, tensor: 2}", *([shards] if optimizer == "adafactor" else [])):
        with pytest.raises(SpecError, match=f"divides parameters, of which {optimizer} reads whole rows"):
            load_job(job_file, [*usual, wish])
    given = load_job(job_file, [*usual[:1], "parallel=auto"]).parallel.given
    assert given == ({"tensor": 1} if optimizer == "muon" else {"shard": "none", "tensor": 1})
    if optimizer == "muon":  # copies may divide its matrices, whole
        load_job(job_file, [*usual, shards])


def test_what_is_recorded_reads_back_the_same(job_file, tmp_path):
    job = load_job(job_file, ["train.betas=[0.8, 0.9]", "train.clip=1"])
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    assert load_job(again) == job


def test_overrides_are_yaml_and_leave_the_rest(job_file):
    job = load_job(job_file, ["train.lr=1e-2", "train.clip=null", "model.tie_embeddings=false", "name=other"])
    assert (job.train.lr, job.train.clip, job.model.tie_embeddings, job.name) == (0.01, None, False, "other")
    assert job.train.steps == 10


def test_an_override_can_open_a_missing_section(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in JOB.items() if key != "parallel"}))
    assert load_job(path).parallel.stages == 1
    assert load_job(path, ["parallel.stages=4"]).parallel.stages == 4


WRONG = [  # override, key in `where`, words in the message
    ("train.lrr=1", "train.lrr", 'did you mean "lr"?'),
    ("modell.layers=1", "modell", 'did you mean "model"?'),
    ("train.steps=ten", "train.steps", "give a whole number"),
    ("train.steps=1.5", "train.steps", "give a whole number"),
    ("train.steps=0", "train.steps", "greater than or equal to 1"),
    ("model.layers=true", "model.layers", "is true"),
    ("model.dropout=1.0", "model.dropout", "less than 1"),
    ("model.hidden=34", "model.hidden", "use 32 or 36"),
    ("model.vocabulary=128", "model.vocabulary", "bytes take 256"),
    ("model.type=gtp", "model.type", 'did you mean "gpt"?'),
    ("model.hf=gpt2", "model.", "unknown key for a model of kind hf; it belongs to the kind gpt"),
    ("train.optimizer=adamww", "train.optimizer", 'did you mean "adamw"?'),
    ("train.dtype=float16", "train.dtype", 'did you mean "bfloat16"?'),
    ("train.clip=0", "train.clip", "greater than 0"),
    ("train.lr=.inf", "train.lr", "finite"),
    ("train.betas=[0.9]", "train.betas", "two numbers"),
    ("train.min_lr=1.0", "train.min_lr", "above lr"),
    ("train.batch=9", "train.batch", "use 8 or 10"),
    ("parallel.replicas=3", "train.batch", "use 6 or 12"),
    ("parallel.microbatch=16", "train.batch", "use 16"),
    ("parallel.stages=5", "parallel.stages", "use at most 4"),
    ("parallel.stages=0", "parallel.stages", "greater than or equal to 1"),
    ("parallel.schedule=chimer", "parallel.schedule", 'did you mean "chimera"?'),
    ("parallel.placement=ring", "parallel.placement", "1f1b has a fixed placement"),
    ("parallel.chunks=2", "parallel.chunks", "leave chunks out"),
    ("parallel={schedule: auto, placement: encoder}", "parallel.placement", "has no encoder"),
    ("parallel={schedule: 1f1b, placement: encoder}", "parallel.placement", "1f1b has a fixed placement"),
    ("parallel.shard=zero4", "parallel.shard", 'did you mean "zero'),
    ("parallel={replicas: 4, shard: zero3, shard_replicas: 3}", "parallel.shard_replicas", "use a divisor of 4"),
    ("parallel={replicas: 2, shard: zero3, shard_replicas: 1}", "parallel.shard_replicas", "use 2 or more"),
    ("parallel={schedule: auto, replicas: 2, shard: zero3, replan: true}", "parallel.replan", "use replan: false"),
    ("parallel.shard_replicas=2", "parallel.shard_replicas", "leave it out"),
    ("parallel={replicas: 2, shard: zero2, update: optimistic}", "parallel.update", "use auto, which then waits"),
    (
        "parallel.recompute=sometimes",
        "parallel.recompute",
        "known: auto, full, layers, microbatches, none, stage-aware",
    ),
    ("parallel.recompute=stage-aware", "parallel.memory_cap_mb", "missing"),
    ("parallel.memory_cap_mb=100", "parallel.memory_cap_mb", "use recompute: stage-aware"),
    ("parallel.alphas=0.5", "parallel.alphas", "use recompute: stage-aware"),
    (
        "parallel={schedule: 1f1b, stages: 2, microbatch: 2, recompute: full, keep: [0.5, 0.5, 1.0]}",
        "parallel.keep",
        "3 shares for 2 stages",
    ),
    ("parallel.keep=[0.5, 1.5]", "parallel.keep", "less than or equal to 1"),
    ("parallel.tensor_table=mine.yaml", "parallel.tensor_table", "no layer is divided"),
    ("parallel.sync=sometimes", "parallel.sync", "known: "),
    ("parallel.first_k=3", "parallel.first_k", "use sync: reverse-first-k"),
    ("parallel={sync: reverse-first-k, replicas: 2, tensor: 2}", "parallel.sync", "or tensor: 1"),
    ("parallel={sync: prioritised, replicas: 2, shard: zero1}", "parallel.sync", "or shard: none"),
    ("parallel={sync: prioritised, schedule: pipedream-2bw, stages: 2}", "parallel.sync", "use sync: lazy"),
    ("parallel={auto: true, sync: wait-free}", "parallel.sync", "give schedule, stages and microbatch"),
    ("parallel.pipelines=4", "parallel.pipelines", "1f1b has no use for pipelines"),
    ("parallel.unit=4", "parallel.unit", "leave unit out"),
    ("parallel=automatic", "parallel", "automatic"),
    ("parallel={auto: true, schedule: zbh1}", "parallel.schedule", 'did you mean "zb-h1"?'),
    ("parallel={auto: true, schedule: mine.txt}", "parallel.schedule", "give stages and microbatch too"),
    ("parallel={auto: true, memory_limit: 3}", "parallel.memory_limit", "if the planner chooses"),
    ("model.positions=8", "model.positions", "or more"),
    ("parallel=", "parallel", "is empty"),
    ("name=a b", "name", "letters"),
    ("data.path=''", "data.path", "is empty"),
    ("train.steps.more=1", "train.steps.more", "holds no keys"),
    ("train.steps", "train.steps", "key.path=value"),
    ("=3", "=3", "key.path=value"),
    ("train.betas=[1", "train.betas", "not valid YAML"),
]


@pytest.mark.parametrize(("override", "key", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_value_is_one_clear_error(job_file, override, key, words):
    with pytest.raises(SpecError) as caught:
        load_job(job_file, [override])
    error = caught.value
    assert key in error.where
    assert words in str(error)
    assert error.fix
    assert "pydantic" not in str(error)


def test_the_culprit_is_the_override_or_the_file(job_file):
    with pytest.raises(SpecError) as caught:
        load_job(job_file, ["train.batch=9"])
    assert caught.value.where == "--set train.batch"
    with pytest.raises(SpecError) as caught:  # the batch in the file no longer fits
        load_job(job_file, ["parallel.replicas=3"])
    assert caught.value.where == f"{job_file}: train.batch"


def test_stages_times_chunks_count(job_file):
    overrides = ["parallel.schedule=interleaved-1f1b", "parallel.chunks=3"]
    with pytest.raises(SpecError, match=r"6 stages \(2 devices with 3 each\) for a model of 4 layers"):
        load_job(job_file, overrides)
    assert load_job(job_file, [*overrides, "model.layers=6"]).parallel.chunks == 3


def test_chimera_wants_an_even_number_of_stages(job_file):
    with pytest.raises(SpecError, match=r"3 devices; the two directions need an even number[\s\S]*use 2 or 4"):
        load_job(job_file, ["parallel.schedule=chimera", "parallel.stages=3"])


@pytest.mark.parametrize("pipelines", [1, 3, 4, 8])
def test_chimeras_pipelines_spread_evenly(job_file, pipelines):
    wide = ["parallel.schedule=chimera", "parallel.stages=6", "model.layers=6"]
    with pytest.raises(SpecError, match=r"fix: use (one of 2, 6|an even number)") as caught:
        load_job(job_file, [*wide, f"parallel.pipelines={pipelines}"])
    assert caught.value.where == "--set parallel.pipelines"
    assert load_job(job_file, [*wide, "parallel.pipelines=6"]).parallel.pipelines == 6


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_can_be_asked_for(job_file, name):
    plain = ["train.clip=null", "model.tie_embeddings=false", f"parallel.schedule={name}"]
    assert load_job(job_file, plain).parallel.schedule == name


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallel.replicas=2", "parallel.replicas"),
        ("train.clip=1", "train.clip"),
        ("model.tie_embeddings=true", "model.tie_embeddings"),
    ],
)
def test_pipedream_refuses_what_it_would_get_wrong(job_file, override, key):
    plain = ["train.clip=null", "model.tie_embeddings=false", "parallel.schedule=pipedream"]
    with pytest.raises(SpecError, match="pipedream-2bw") as caught:
        load_job(job_file, [*plain, override])
    assert caught.value.where.endswith(key)


def test_halved_micro_batches_need_an_even_number_of_sequences(job_file):
    halves = ["parallel.schedule=chimera", "parallel.concat=halving", "parallel.microbatch=1", "train.batch=8"]
    with pytest.raises(SpecError, match="multiple of 2"):
        load_job(job_file, halves)


def test_unknown_keys_come_before_what_they_leave_missing():
    model = {("layrs" if key == "layers" else key): value for key, value in JOB["model"].items()}
    with pytest.raises(SpecError, match='did you mean "layers"'):
        job_from({**JOB, "model": model})
    with pytest.raises(SpecError, match="train: missing"):
        job_from({key: value for key, value in JOB.items() if key != "train"})


def test_a_missing_file_names_its_neighbour(job_file):
    with pytest.raises(SpecError, match=r'no such file[\s\S]*did you mean "job.yaml"'):
        load_job(job_file.with_name("jib.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\nmodel: {layers: 1\ntrain: 3\n", "line 3"),
        ("name: x\nname: y\n", 'line 2, column 1: not valid YAML: the key "name" is given twice'),
        ("just words", 'holds the text "just words"'),
        ("", "is empty|holds empty"),
        ("- a\n- b\n", "holds a list"),
        ("? [a, b]\n: 1\n", "line 1"),
        ("name: 2024-99-99\n", "not valid YAML: month"),
        ("1: 2\nname: x\n", "1: unknown key"),
        ("a: &a [*a]\n", "an alias refers to a value that contains it"),
        ("name: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_what_is_no_job_file_at_all(tmp_path, text, words):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        load_job(path)


def test_binary_and_folder_instead_of_a_file(tmp_path):
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="can't be read as text"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(SpecError, match="is a folder"):
        load_job(tmp_path)


def test_rules_also_hold_for_specs_made_in_python():
    job = job_from(JOB)
    with pytest.raises(SpecError, match="use at most 4"):
        JobSpec(**{**dict(job), "parallel": job.parallel.model_copy(update={"stages": 8})})


def test_reading_a_job_loads_neither_torch_nor_ray():
    code = "import sys, raypipe.job; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_not_given_is_left_to_the_planner(job_file):
    def parallel(*overrides):
        return load_job(job_file, ["parallel=auto", *overrides]).parallel

    assert parallel().auto
    assert parallel().given == {}
    some = parallel("parallel.schedule=zb-v", "parallel.microbatch=2")
    assert some.auto
    assert some.given == {"schedule": "zb-v", "microbatch": 2}
    nothing_left = parallel("parallel.schedule=zb-v", "parallel.microbatch=2", "parallel.stages=2")
    assert not nothing_left.auto
    assert (nothing_left.schedule, nothing_left.stages, nothing_left.replicas) == ("zb-v", 2, 1)
