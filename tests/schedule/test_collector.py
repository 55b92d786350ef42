"""The cycle collector comes back on, also after an error, and stays off where it was off."""

import gc

import pytest

from raypipe.schedule.garbage_collection import no_collection


def test_it_is_off_inside_and_on_after() -> None:
    @no_collection()
    def inside() -> bool:
        return gc.isenabled()

    assert not inside()
    assert gc.isenabled()
    with pytest.raises(KeyError), no_collection():
        raise KeyError
    assert gc.isenabled()


def test_a_process_that_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
