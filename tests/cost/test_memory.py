"""Memory by hand, term by term, on the made-up profile: float32, so 4 bytes a value; blocks keep 100 bytes a sample,
80 from B to W, send 10, and hold 20 values."""

from dataclasses import replace

import pytest

from raypipe.cost.memory import DeviceMemory, device_memory, parameter_bytes
from raypipe.cost.profile import Reserved
from raypipe.errors import SpecError
from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.update.gradients import TiedHolders, groups_of_ties
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.ir import Sharding
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.lowering.programs import edges
from raypipe.schedule.passes import add_recompute, add_updates, replicate, shard
from raypipe.schedule.passes.sync import are_copies
from raypipe.schedule.sharding import LiveShards, run_groups

CUT = [(0, 1), (2,), (3,), (4, 5)]
MB = 2
BLOCK, OUT = 100 * MB, 10 * MB
PARAMETERS = [60 + 20, 20, 20, 20 + 55]


def memory(profile, name, count, cut=CUT, **options):
    shape = {k: options.pop(k) for k in ("chunks", "pipelines", "concat") if k in options}
    devices = len(cut) // shape.get("chunks", 1)
    schedule = generate(name, Shape(devices=devices, microbatches=count, **shape))
    return device_memory(profile, cut, schedule, MB, **options)


def with_each(profile, **values):
    """The profile with these values in every layer."""
    return profile.model_copy(update={"layers": tuple(x.model_copy(update=values) for x in profile.layers)})


def test_one_f_one_b(profile):
    result = memory(profile, "1f1b", 8)
    # A stage keeps its layers' activations and its output (the last one's is a number) of min(D - s, N) micro-batches.
    each = [5 * MB + BLOCK + OUT, BLOCK + OUT, BLOCK + OUT, BLOCK + 100 * MB]
    for s, device in enumerate(result):
        assert device.base == 1000
        assert device.weights == 4 * PARAMETERS[s]
        assert device.gradients == 4 * PARAMETERS[s]
        assert device.optimizer == 8 * PARAMETERS[s]
        assert device.activations == (4 - s) * each[s]
        own = {0: OUT, 3: OUT}.get(s, 2 * OUT)  # the gradient that comes and the one that goes
        # Four micro-batches are in flight, so that many activations and gradients may be between two neighbours.
        assert own < device.messages <= own + 5 * OUT
        assert (device.versions, device.replicas, device.communication) == (0, 0, 0)
        assert device.total == sum(device.terms().values())


def test_gpipe_is_fullest_before_it_has_any_gradients(profile):
    """All eight micro-batches are alive when the first backward begins; then each frees more than a gradient takes."""
    first = memory(profile, "gpipe", 8)[1]
    assert (first.activations, first.gradients) == (8 * (BLOCK + OUT), 0)
    big = with_each(profile, parameters=10_000)
    late = memory(big, "gpipe", 8)[1]  # gradients outweigh a micro-batch: fullest right after the first one
    assert (late.activations, late.gradients) == (7 * (BLOCK + OUT), 40_000)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_even_stages_agree_with_the_count_of_activations(profile, name):
    """Where all stages keep the same, nothing crosses and B frees nothing, bytes are the schedule's own count."""
    family = SCHEDULES[name]
    chunks = family.fixed_chunks or (2 if "chunks" in family.options else 1)
    stages = 4 * chunks
    block = profile.layers[1].model_copy(update={"output_bytes": 0.0, "waiting_bytes": 100.0, "parameters": 0})
    even = profile.model_copy(update={"layers": (block,) * stages, "tied_parameters": 0})
    schedule = generate(name, Shape(devices=4, microbatches=8, chunks=chunks))
    result = device_memory(even, [(s,) for s in range(stages)], schedule, MB)
    size = float(schedule.size)
    if schedule.rules.skip_first_b or schedule.rules.w_dep == "grad":  # W may run the backward and end an activation
        assert all(d.activations <= p * BLOCK for d, p in zip(result, peak_activations(schedule), strict=True))
        return
    assert [d.activations for d in result] == pytest.approx([p * BLOCK for p in peak_activations(schedule)]), size


def test_split_backwards_keep_what_waits_for_w(profile):
    """From B to W a block keeps 80 of its 100 bytes, and no output."""
    result = device_memory(profile, CUT, generate("zb-h2", Shape(devices=4, microbatches=8)), MB)[2]
    whole, rest = BLOCK + OUT, 80 * MB
    assert any(result.activations == a * whole + b * rest for a in range(9) for b in range(1, 9))


def test_recomputed_micro_batches_keep_what_arrived(profile):
    schedule = add_recompute(generate("gpipe", Shape(devices=4, microbatches=8)), "late")
    result = device_memory(profile, CUT, schedule, MB)
    # Fullest in the second backward, when there are gradients: one is rebuilt, six wait as inputs.
    assert (result[1].activations, result[1].gradients) == (6 * OUT + BLOCK + OUT, 80)
    assert result[0].activations == 5 * MB + BLOCK + OUT  # the first stage reads the data again


def test_two_directions_hold_two_replicas(profile):
    down, up = [0, 1, 2, 3], [3, 2, 1, 0]
    for d, device in enumerate(memory(profile, "chimera", 4)):
        low, high = sorted((down[d], up[d]))
        assert device.weights == 4 * PARAMETERS[low]
        # A replica has weights, two of optimizer state, and its gradients unless the fullest moment comes before them.
        assert device.replicas in (12 * PARAMETERS[high], 16 * PARAMETERS[high])


def test_more_pipelines_hold_more_replicas(profile):
    stages = [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]
    even = profile.model_copy(update={"layers": (profile.layers[1],) * 8, "tied_parameters": 0})
    two = memory(even, "chimera", 8, cut=stages)
    four = memory(even, "chimera", 8, cut=stages, pipelines=4)
    assert {d.weights for d in two} == {d.weights for d in four} == {80}
    at_least = [d.replicas / 80 for d in four]
    assert all(3 * 3 <= r <= 3 * 4 for r in at_least)
    assert all(3 <= d.replicas / 80 <= 4 for d in two)


def test_an_input_that_no_backward_reads_counts_where_a_stage_begins(profile):
    """Behind other layers of the stage it is freed when the layer has read it."""
    marked = with_each(profile, unread_input_bytes=7.0)
    for s, (before, now) in enumerate(zip(memory(profile, "1f1b", 8), memory(marked, "1f1b", 8), strict=True)):
        assert now.activations - before.activations == 7 * MB * (4 - s)


def test_weight_versions(profile):
    """The optimizer's own weights come on top of the snapshots that forwards run on."""
    stash = memory(profile, "pipedream", 8)
    assert [d.versions for d in stash] == [4 * (4 - s) * PARAMETERS[s] for s in range(4)]
    two = memory(profile, "pipedream-2bw", 8)
    assert [d.versions for d in two] == [4 * 2 * PARAMETERS[s] for s in range(4)]


def test_an_update_per_micro_batch_leaves_no_gradients(profile):
    """A backward adds to none, and each layer's are there when what the layer kept is gone."""
    plain = memory(profile, "1f1b", 8)
    stash = memory(profile, "pipedream", 8)
    for s, device in enumerate(stash):
        assert device.gradients == 0  # a micro-batch keeps more than the gradients take
        assert device.activations == plain[s].activations
    wide = with_each(profile, parameters=10_000)
    # Fullest as a backward ends: all gradients are there and what its block kept is gone, but not yet its output.
    second = memory(wide, "pipedream", 8)[1]
    assert (second.activations + second.workspace, second.versions) == (2 * BLOCK + 3 * OUT + 40_000, 3 * 40_000)
    head = profile.layers[-1].model_copy(update={"parameters": 2_000})
    ends = profile.model_copy(update={"layers": (*profile.layers[:-1], head)})
    # Fullest when the head's gradients are there and the block has yet to begin.
    last = memory(ends, "pipedream", 8)[3]
    assert (last.workspace, last.activations) == (4 * 2_000 - 100 * MB, BLOCK + 100 * MB)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "values"), [("adamw", False, 2), ("sgd", False, 0), ("sgd", True, 1)]
)
def test_optimizer_state(profile, optimizer, momentum, values):
    result = memory(profile, "1f1b", 8, optimizer=optimizer, momentum=momentum)
    assert [d.optimizer for d in result] == [4 * values * p for p in PARAMETERS]


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_a_matrix_of_muon_has_one_value_of_state_and_all_else_adamws_two(profile, momentum):
    first = profile.layers[0].model_copy(update={"matrices": ((3, 5), (2, 2))})
    held = profile.model_copy(update={"layers": (first, *profile.layers[1:])})
    result = memory(held, "1f1b", 8, optimizer="muon", momentum=momentum)
    assert [d.optimizer for d in result] == [4 * (2 * p - (19 if d == 0 else 0)) for d, p in enumerate(PARAMETERS)]


def test_bytes_of_a_parameter():
    """Four copies of it with Adam, two with plain SGD; 16-bit autocast changes none of them. The last is the master."""
    assert parameter_bytes("float32", "adamw") == parameter_bytes("bfloat16", "adam") == (4, 4, 8, 0, 0)
    assert parameter_bytes("bfloat16-true", "adamw") == (2, 2, 8, 4, 0)
    assert parameter_bytes("float64", "sgd") == (8, 8, 0, 0, 0)
    assert parameter_bytes("float32", "sgd", 0.9).total == 12
    assert parameter_bytes("float32", "adamw", 0.9).total == 16  # momentum is SGD's


def test_wide_weights(profile):
    wide = memory(profile.model_copy(update={"dtype": "float64"}), "1f1b", 8)
    half = memory(profile.model_copy(update={"dtype": "bfloat16"}), "1f1b", 8)
    assert [d.weights for d in wide] == [8 * p for p in PARAMETERS]
    assert [d.weights for d in half] == [4 * p for p in PARAMETERS]


def sharded(profile, level, gather="microbatch", name="1f1b", count=8, group=None, copies=4, cut=CUT, **options):
    schedule = shard(
        generate(name, Shape(devices=len(cut) // options.get("chunks", 1), microbatches=count, **options)), level,
        gather=gather, ahead=0, group=group,
    )  # fmt: skip
    return device_memory(profile, cut, add_updates(schedule), MB, copies=copies)


def test_shards(profile):
    """Four holders of each stage: optimizer state, gradients, weights divided; the one at work is whole for a while."""
    plain, one, two, three = (sharded(profile, level) for level in (0, 1, 2, 3))
    for s, p in enumerate(PARAMETERS):
        assert [d[s].optimizer for d in (plain, one, two, three)] == [8 * p, 2 * p, 2 * p, 2 * p]
        assert [d[s].gradients for d in (plain, one, two, three)] == [4 * p, 4 * p, p, p]
        assert [d[s].weights for d in (plain, one, two, three)] == [4 * p, 4 * p, 4 * p, p]
        # Reduced after every micro-batch: one buffer being filled, one or two on their way.
        assert [d[s].communication for d in (one, two)] == [0, 2 * 4 * p]
        assert [d[s].gathered for d in (two, three)] == [0, 4 * p]
    pairs = sharded(profile, 3, group=2)
    assert [d.weights for d in pairs] == [2 * p for p in PARAMETERS]


def test_reduced_once_per_step_needs_one_full_gradient(profile):
    once = sharded(profile, 2, gather="step")
    assert [d.communication for d in once] == [4 * p for p in PARAMETERS]


def test_gathered_stages_add_up_while_they_overlap():
    """Two stages on a device, breadth-first: one at a time, or both where the step gathers once."""
    bare = generate("bfs", Shape(devices=2, microbatches=4, chunks=2))
    sizes = [3.0, 5.0, 7.0, 11.0]

    def most(gather, ahead):
        schedule = shard(bare, 3, gather=gather, ahead=ahead)
        result = []
        for order in schedule.orders:
            live, peak = LiveShards(schedule, sizes, [0.0] * 4), 0.0
            for task in order:
                live.task(task)
                peak = max(peak, live.gathered)
            assert live.gathered == 0
            result.append(peak)
        return result

    assert most("unit", 0) == [7.0, 11.0]
    assert most("step", 0) == most("unit", 1) == [10.0, 16.0]


def test_gradients_are_copied_for_their_sum_only_with_weight_versions(profile):
    """They accumulate in the buckets that are reduced, except where each weight version has gradients of its own."""
    big = with_each(profile, kept_bytes=0.0, output_bytes=0.0)
    end = memory(big, "1f1b", 8, copies=2)
    assert [d.gradients for d in end] == [4 * p for p in PARAMETERS]
    assert [d.communication for d in end] == [0] * 4
    # The tied matrix is summed apart, in place.
    flat = [4 * (p - 50 * (s in (0, 3))) for s, p in enumerate(PARAMETERS)]
    assert [d.communication for d in memory(big, "pipedream-2bw", 8, copies=2)] == flat


def test_running_ahead_of_the_gradient_norm_takes_copies(profile):
    """Weights, two of optimizer state and the gradients, while a device warms up; 2BW's update itself can wait."""
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))
    big = with_each(profile, parameters=10_000)
    waits, ahead = device_memory(big, CUT, schedule, MB), device_memory(big, CUT, schedule, MB, ahead=True)
    assert [d.undo for d in waits] == [0] * 4
    assert [d.undo for d in ahead] == [16 * 20_000, 16 * 10_000, 16 * 10_000, 16 * 20_000]
    assert ahead[0].activations == 4 * (5 * MB + BLOCK + OUT)  # at the end of the warm-up
    assert ahead[0].gradients == 0  # the new ones: the old ones are part of what can be undone
    delayed = device_memory(big, CUT, generate("pipedream-2bw", Shape(devices=4, microbatches=8)), MB, ahead=True)
    assert [d.undo for d in delayed] == [4 * 20_000, 4 * 10_000, 4 * 10_000, 4 * 20_000]


def test_narrow_copies_are_one_set_a_step_and_version(profile):
    """Autocast's copies: however many micro-batches are in flight; of each stage replica, of each weight version."""
    casts = with_each(profile, cast_bytes=7.0)
    for name in ("1f1b", "zb-h1", "gpipe"):
        plain, result = memory(profile, name, 8), memory(casts, name, 8)
        assert [d.casts for d in plain] == [0, 0, 0, 0]
        assert [d.casts for d in result] == [14, 7, 7, 14]
        assert [b.total - a.total for a, b in zip(plain, result, strict=True)] == [14, 7, 7, 14]
    assert [d.casts for d in memory(casts, "chimera", 8)] == [28, 14, 14, 28]  # less only if both never meet
    assert [d.casts for d in memory(casts, "pipedream-2bw", 8)] == [28, 14, 14, 28]


def test_what_every_micro_batch_keeps_whatever_its_size_goes_with_a_joint_backward(profile):
    fixed = with_each(profile, kept_fixed_bytes=7.0)
    plain, joint = memory(profile, "1f1b", 8), memory(fixed, "1f1b", 8)
    assert [b.activations - a.activations for a, b in zip(plain, joint, strict=True)] == [4 * 14, 3 * 7, 2 * 7, 14]
    plain, split = memory(profile, "zb-h1", 8), memory(fixed, "zb-h1", 8)
    assert [b.activations - a.activations for a, b in zip(plain, split, strict=True)] == [0, 0, 0, 0]


def test_layers_that_are_not_recomputed_keep_the_same_in_either_backward(profile):
    """What a micro-batch keeps whatever its size, until a joint backward, is not there where the backward is split."""
    fixed = with_each(profile, kept_fixed_bytes=7.0)
    cut = [(0, 1, 2), (3, 4, 5)]
    for name, more in (("gpipe", 7), ("zb-h2", 0)):
        schedule = add_recompute(generate(name, Shape(devices=2, microbatches=4)), "early", [0])
        plain, result = (device_memory(p, cut, schedule, MB, recomputed=[1, 2])[0] for p in (profile, fixed))
        assert result.activations - plain.activations >= 3 * more, name
        assert (result.activations > plain.activations) == bool(more)


def test_the_workspace_is_that_of_the_worst_layer_less_what_later_ones_freed(profile):
    layers = [x.model_copy(update={"workspace_bytes": 30.0}) for x in profile.layers]
    layers[0] = layers[0].model_copy(update={"workspace_bytes": 400.0, "workspace_fixed_bytes": 11.0})
    layers[5] = layers[5].model_copy(update={"workspace_fixed_bytes": 5.0})
    result = memory(profile.model_copy(update={"layers": tuple(layers)}), "1f1b", 8)
    assert result[1].workspace == 30 * MB
    assert result[3].workspace == 30 * MB + 5  # the head's; the block's comes when the head's 100 a sample are gone
    assert result[0].workspace == 400 * MB + 11 - BLOCK  # the embedding's, after the block's backward


def test_a_compiled_backward_holds_what_it_reads_and_what_all_its_weight_gradients_need(profile):
    compiled = with_each(profile, workspace_bytes=30.0, operand_bytes=12.0)
    result = memory(compiled, "1f1b", 8)
    assert [device.workspace for device in result] == [42 * MB, 30 * MB, 30 * MB, 42 * MB]
    large = with_each(profile, workspace_bytes=500.0, operand_bytes=12.0)
    assert memory(large, "zb-h1", 8)[0].workspace == 512 * MB


@pytest.mark.parametrize(("name", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8]), ("zb-h1", [4, 4, 4, 4])])
def test_graphs_of_tasks_hold_a_slot_for_each_micro_batch_in_flight(profile, name, most):
    """All that it keeps, temporary memory and the gradient of its output, whatever runs; W ends a micro-batch, too."""
    compiled = with_each(profile, workspace_bytes=30.0, operand_bytes=12.0)
    plain, result = memory(compiled, name, 8), memory(compiled, name, 8, captured=True)
    each = [5 * MB + BLOCK + OUT, BLOCK + OUT, BLOCK + OUT, BLOCK + 100 * MB]
    slots = [each[0] + 42 * MB + OUT, each[1] + 30 * MB + OUT, each[2] + 30 * MB + OUT, each[3] + 42 * MB]
    assert [device.graphs for device in result] == [n * slot for n, slot in zip(most, slots, strict=True)]
    for without, device in zip(plain, result, strict=True):
        assert (device.activations, device.workspace, without.graphs) == (0, 0, 0)
        assert device.total == sum(device.terms().values()) >= without.total
    assert all(device.graphs == 0 for device in memory(compiled, "pipedream", 8, captured=True))


def test_a_process_that_compiles_beside_steps_has_a_context_of_its_own(profile):
    gpu = profile.model_copy(update={"reserved": Reserved(context_bytes=7.0)})
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))
    plain = device_memory(gpu, CUT, schedule, MB)
    beside = device_memory(gpu, CUT, schedule, MB, compiling=True)
    assert [device.compiling for device in (*plain, *beside)] == [0.0] * 4 + [7.0] * 4
    assert [b.total - a.total for a, b in zip(plain, beside, strict=True)] == [7.0] * 4
    trains = {"first": TrainSpec(steps=1, batch=1, compile="inductor", compile_first=True),
              "deterministic": TrainSpec(steps=1, batch=1, compile="auto", deterministic=True),
              "eager": TrainSpec(steps=1, batch=1), "beside": TrainSpec(steps=1, batch=1, compile="auto")}  # fmt: skip
    assert [name for name, train in trains.items() if train.compiles_beside] == ["beside"]


def test_stages_of_one_device_share_what_they_hand_over(profile):
    """A V: stages 1 and 2 on the last device; the output of one is the input of the other, the same tensor."""
    four = memory(profile, "zb-v", 8, chunks=2)
    assert len(four) == 2
    chain = memory(profile, "gpipe", 1)
    v = generate("zb-v", Shape(devices=2, microbatches=1, chunks=2))
    last = device_memory(profile, CUT, v, MB)[1]
    apart = chain[1].activations + chain[2].activations
    assert last.activations == apart - OUT


def test_devices_that_read_arrays_hold_a_step_of_them(profile):
    """The whole mini-batch, other copies' samples too; once for all layers of a device; two steps' where they mix."""
    layers = [x.model_copy(update={"read_bytes": 7.0 if i < 2 else 3.0 if i == 5 else 0.0})
              for i, x in enumerate(profile.layers)]  # fmt: skip
    images = profile.model_copy(update={"layers": tuple(layers)})
    plain, result = memory(profile, "1f1b", 8), memory(images, "1f1b", 8)
    assert [d.inputs for d in result] == [7 * 8 * MB, 0, 0, 3 * 8 * MB]
    assert [b.total - a.total for a, b in zip(plain, result, strict=True)] == [d.inputs for d in result]
    assert [d.inputs for d in memory(images, "1f1b", 8, copies=3)] == [7 * 24 * MB, 0, 0, 3 * 24 * MB]
    assert [d.inputs for d in memory(images, "pipedream", 8)] == [7 * 16 * MB, 0, 0, 3 * 16 * MB]
    assert [d.inputs for d in memory(images, "chimera", 4)] == [7 * 4 * MB, 0, 0, 7 * 4 * MB]


def test_what_takes_most(profile):
    device = DeviceMemory(base=1, weights=5 * 2**30, activations=7 * 2**30)
    assert device.largest == "activations"
    assert "activations of micro-batches in flight take 7.00 GiB" in device.sentence()
    tight = device.sentence(10 * 2**30)
    assert "2.00 GiB more than there are" in tight
    assert "recompute" in tight
    assert "more than" not in device.sentence(13 * 2**30)
    for name in device.terms():
        assert DeviceMemory(**{name: 1.0}).sentence(0.5)


def test_bad_requests(profile):
    with pytest.raises(SpecError, match="does not divide 6 layers"):
        memory(profile, "1f1b", 8, cut=[(0,), (1,)])
    with pytest.raises(SpecError, match='did you mean "adamw"'):
        memory(profile, "1f1b", 8, optimizer="adamww")


def test_gradients_summed_in_another_dtype_are_copied(profile):
    """Half the bytes of a stage's gradients more, of what is summed there; ties are summed apart."""
    schedule = add_updates(generate("1f1b", Shape(devices=4, microbatches=8)))
    layers = tuple(one.model_copy(update={"parameters": 10**4 * one.parameters}) for one in profile.layers)
    profile = profile.model_copy(update={"layers": layers})  # so that the end of the step is the fullest moment
    narrow = profile.model_copy(update={"reduce_dtype": "bfloat16"})
    own, cast, alone = (
        device_memory(one, CUT, schedule, MB, copies=copies) for one, copies in ((profile, 2), (narrow, 2), (narrow, 1))
    )
    for one, other, single in zip(own, cast, alone, strict=True):
        assert one.communication == single.communication == 0.0
        assert 0.0 < other.communication <= 0.5 * one.gradients
    for d in (1, 2):  # without ties
        assert cast[d].communication == 0.5 * own[d].gradients


@pytest.mark.parametrize(
    ("name", "devices", "copies"),
    [
        ("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("zb-h1", 4, 1), ("zb-v", 2, 1), ("zb-v", 4, 1),
        ("interleaved-1f1b", 2, 1), ("interleaved-1f1b", 4, 1), ("chimera", 4, 1), ("1f1b", 1, 4), ("1f1b", 2, 2),
        ("zb-v", 2, 2), ("chimera", 4, 2), ("interleaved-1f1b", 2, 4),
    ],
)  # fmt: skip
def test_planned_communicators_are_those_that_a_run_on_gpus_opens(profile, name, devices, copies):
    """One of all devices for the norm, those of the set-up's groups, and one of each directed edge, from which one end
    receives; the planner counts an edge where it receives. Also where all copies divide a stage, or two at a time."""
    plain = generate(name, Shape(devices=devices, microbatches=8))
    levels = (1,) * plain.stages
    sharded = [Sharding(levels=levels), Sharding(levels=levels, group=2)] if copies > 1 else []
    for one in (plain, *(replace(plain, sharding=each) for each in sharded)):
        check_communicators(profile, one, copies)


@pytest.mark.parametrize(
    ("name", "devices"), [("1f1b", 1), ("1f1b", 2), ("interleaved-1f1b", 2), ("zb-v", 2), ("chimera", 2)]
)
@pytest.mark.parametrize(("copies", "experts"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (16, 4), (12, 6), (18, 6)])
def test_and_those_of_copies_that_divide_experts_or_sequences(profile, name, devices, copies, experts):
    plain = generate(name, Shape(devices=devices, microbatches=4))
    levels = (1,) * plain.stages
    groups = [None, *(n for n in range(2, copies) if copies % n == 0)]
    sharded = [Sharding(levels=levels, group=group) for group in groups]
    for one in (plain, *(replace(plain, sharding=each) for each in sharded)):
        check_communicators(profile, one, copies, experts=experts)
    check_communicators(profile, plain, copies, context=experts)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(("devices", "copies"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_and_that_of_a_tied_matrix(profile, devices, copies, level):
    plain = generate("1f1b", Shape(devices=devices, microbatches=4))
    if level and copies > 1:
        plain = replace(plain, sharding=Sharding(levels=(level,) * devices))
    check_communicators(profile, plain, copies, tied=True)


def check_communicators(profile, one, copies, experts=1, context=1, tied=False):
    devices, whole = one.devices, replicate(one, copies)
    counted = profile.model_copy(update={"reserved": Reserved(group_bytes=1.0, edge_bytes=1000.0)})
    cut = [(s,) for s in range(one.stages)]
    layers = (*profile.layers, *profile.layers[1:-1])[: one.stages]
    shared = profile.tied_parameters if tied else 0
    counted = counted.model_copy(
        update={"layers": layers, "tied_parameters": shared, "trained_tied_parameters": shared}
        | {"experts": experts, "context": context}
    )
    planned = [x.communicators for x in device_memory(counted, cut, one, MB, copies=copies)]
    holders = tuple(sorted({row[s] for row in whole.placement for s in (0, one.stages - 1)}))
    tie = TiedHolders("0.token.weight", ("0.token.weight",), holders, 0, 0 if one.stages == 1 else None)
    groups = run_groups(
        whole.placement,
        whole.sharding,
        copies,
        tied=groups_of_ties([tie] if tied else [], whole.sharding),
        experts=experts,
        context=context,
        in_order=are_copies(whole),
    )
    for rank in range(whole.devices):
        opened = 1 * (whole.devices > 1) + sum(rank in members for members in groups.opened.values())
        receives = sum(receiver == rank for _, receiver in edges(whole))
        assert planned[rank % devices] == opened + 1000 * receives, (rank, one.sharding)
