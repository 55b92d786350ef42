"""Frozen weights on the made-up profile: they are held, and neither summed, updated, divided nor given a gradient."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from raypipe.cost.memory import device_memory
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import stage_costs
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Sharding

CUT = [(0, 1), (2,), (3,), (4, 5)]
HELD = [60 + 20, 20, 20, 20 + 55]
ADAPTERS = [0, 2, 2, 2 + 1]
"""Trained values per stage: none of the embedding and block 0, two of each other block, and one of the head."""


@pytest.fixture
def frozen(profile):
    trained = (0, 0, 2, 2, 2, 1)
    layers = tuple(x.model_copy(update={"trained_parameters": n}) for x, n in zip(profile.layers, trained, strict=True))
    return profile.model_copy(update={"layers": layers, "trained_tied_parameters": 0})


def test_memory_has_weights_alone(frozen):
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))
    for device, held, trained in zip(device_memory(frozen, CUT, schedule, 2), HELD, ADAPTERS, strict=True):
        assert device.weights == 4 * held
        assert device.gradients == 4 * trained
        assert device.optimizer == 8 * trained


def test_sums_and_updates_are_those_of_a_model_that_has_the_adapters_only(frozen):
    def adapters(x):
        return x.model_copy(update={"parameters": x.trained, "trained_parameters": None})

    small = frozen.model_copy(
        update={"layers": tuple(map(adapters, frozen.layers)), "tied_parameters": 0, "trained_tied_parameters": None}
    )
    rows = ((0, 1, 2, 3),)
    result, expected = (stage_costs(one, CUT, 2, rows, copies=2) for one in (frozen, small))
    assert (result.input_grad[0], result.weight_grad[0]) == (0.0, 0.0), "no backward goes to the first stage"
    backward = {"input_grad": (0.0, *expected.input_grad[1:]), "weight_grad": (0.0, *expected.weight_grad[1:])}
    expected = replace(expected, **backward)
    assert result == expected
    assert result.update == pytest.approx([0.1 * n for n in ADAPTERS])
    sharding = Sharding(levels=(3, 3, 3, 3))
    assert with_sharding(result, frozen, CUT, rows, sharding, 2) == with_sharding(
        expected, small, CUT, rows, sharding, 2
    )


def test_shards_do_not_divide_frozen_weights(frozen):
    """The runtime divides what the optimizer updates; the frozen part of a sharded stage is whole on every device."""
    from raypipe.schedule.passes import shard

    schedule = shard(generate("gpipe", Shape(devices=4, microbatches=4)), 3)
    result = device_memory(frozen, CUT, schedule, 2, copies=4)
    for device, held, trained in zip(result, HELD, ADAPTERS, strict=True):
        assert device.weights == 4 * (held - trained) + trained
        assert device.optimizer == 2 * trained


def test_older_files_say_nothing_of_frozen_weights_and_have_none(profile):
    text = profile.model_dump_json(exclude_none=True)
    assert "trained" not in text
    again = Profile.model_validate_json(text)
    assert [layer.trained for layer in again.layers] == [layer.parameters for layer in profile.layers]
    assert again.trained_tied == 50


def test_no_more_can_be_trained_than_there_are(profile):
    wrong = {**profile.layers[1].model_dump(), "trained_parameters": 21}
    with pytest.raises(ValidationError, match=r"block\.0 trains more parameters than it has"):
        LayerProfile.model_validate(wrong)
    with pytest.raises(ValidationError, match="more tied parameters are trained than there are"):
        Profile.model_validate({**profile.model_dump(), "trained_tied_parameters": 51})
