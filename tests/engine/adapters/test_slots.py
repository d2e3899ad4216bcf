"""Which adapters have a slot, which one gives it up, and which sequences wait."""

import asyncio
import time
from pathlib import Path

import pytest

from penstock.engine.adapters.registry import Adapter, AdapterRegistry, AdapterSlots
from penstock.engine.errors import InvalidRequest, NoSuchModel
from tests.fakes import make_core, make_request

A, B, C = (Adapter(name, "", digest=name.encode()) for name in "abc")


def test_the_least_recently_used_idle_adapter_gives_up_its_slot() -> None:
    slots = AdapterSlots(2)
    for adapter in (A, B, A):
        slots.take(adapter)
    assert not slots.has_room_for(C)
    slots.release(A)
    assert not slots.has_room_for(C), "A is still in use once"
    slots.release(B)
    slots.release(A)
    slots.check_integrity([])
    before = {adapter: slots.has_room_for(adapter) for adapter in (A, B, C)}
    assert before == {A: True, B: True, C: True}
    slots.take(C)  # in B's place
    slots.take(A)
    assert slots.slot_of(A) != slots.slot_of(C)
    assert not slots.has_room_for(B)
    slots.check_integrity([A, C])


def test_a_sequence_waits_for_a_slot_and_others_pass_it() -> None:
    core = make_core(max_num_seqs=8)
    core.scheduler.adapters = AdapterSlots(1)
    for number, adapter in enumerate((A, B, None, A)):
        core.add(make_request(str(number), "?", adapter=adapter, max_tokens=3 + 3 * (number == 3)))
    core.step()
    assert [sequence.request.request_id for sequence in core.scheduler.waiting] == ["1"]
    stats = core.stats().adapters
    assert stats is not None
    assert (stats.running, stats.waiting, stats.num_slots) == (("a",), ("b",), 1)
    while core.has_work:
        core.step()
        core.check_integrity()
    assert core.stats().adapters == type(stats)((), (), 1)


def test_a_sequence_that_has_waited_long_keeps_others_from_its_slot() -> None:
    core = make_core(max_num_seqs=8)
    core.scheduler.adapters = AdapterSlots(1)
    core.add(make_request("first", "?", adapter=A, max_tokens=5))
    core.step()
    core.add(make_request("late", "?", adapter=B, max_tokens=2))
    core.step()
    (waiting,) = core.scheduler.waiting
    waiting.has_aged = True
    core.add(make_request("next", "?", adapter=A, max_tokens=50))
    core.add(make_request("plain", "?", max_tokens=50))
    core.step()
    assert [sequence.request.request_id for sequence in core.scheduler.waiting] == ["late", "next"]
    while any(sequence.request.request_id == "late" for sequence in core.scheduler.waiting):
        core.step()
    assert "next" in {sequence.request.request_id for sequence in core.scheduler.waiting}
    core.abort("plain")
    while core.has_work:
        core.step()


def test_background_sequences_give_up_slots_that_others_wait_for() -> None:
    core = make_core(max_num_seqs=8)
    core.scheduler.adapters = AdapterSlots(1)
    core.add(make_request("batch", "?", adapter=A, max_tokens=20, priority=2**31 - 1))
    core.step()
    core.add(make_request("client", "?", adapter=B, max_tokens=3))
    core.step()
    assert [sequence.request.request_id for sequence in core.scheduler.running] == ["client"]
    while core.has_work:
        core.step()
        core.check_integrity()


def test_names_are_free_or_refused() -> None:
    registry = AdapterRegistry(2, reserved_names=["model"])
    registry.add(A)
    for name, reason in (("model", "a name of the model itself"), ("a", "unload it first"), ("", "printable"), ("a\n", "printable")):
        with pytest.raises(InvalidRequest, match=reason):
            registry.check_name(name)
    registry.add(B)
    with pytest.raises(InvalidRequest, match="2 adapters are loaded"):
        registry.add(C)
    registry.check_name("b", replaces=True)
    assert registry.remove("a") is A
    for lookup in (registry.remove, registry.named):
        with pytest.raises(NoSuchModel):
            lookup("a")
    registry.touch("b")
    registry.add(C)
    registry.touch("b")
    assert registry.drop_oldest() == "c"


def test_adapters_are_read_one_at_a_time() -> None:
    reading: list[str] = []
    together: list[int] = []

    def read(name: str, directory: Path, root: Path | None) -> Adapter:
        reading.append(name)
        time.sleep(0.01)  # the others would begin
        together.append(len(reading))
        reading.remove(name)
        return Adapter(name, str(directory))

    async def load_all() -> None:
        registry = AdapterRegistry(4, read=read)
        await asyncio.gather(*(registry.load(name, Path(name)) for name in "abcd"))
        assert {adapter.name for adapter in registry} == set("abcd")

    asyncio.run(load_all())
    assert together == [1] * 4
