"""KV events: replayed, they are the block pool's dictionary, whatever was computed, evicted or reset in between."""

import socket
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.blocks import BlockPool
from penstock.engine.kv_cache.events import END_OF_REPLAY, BlockStored, KVEvents, Publisher, check_kv_events, publish_events, wire_hash
from tests.fakes import LETTERS, generate, make_core, make_request

BLOCK_SIZE = 4
PROMPTS = st.lists(st.sampled_from(LETTERS[:2]), min_size=1, max_size=30)


def recorded(**options: Any) -> tuple[EngineCore, KVEvents]:
    core = make_core(block_size=BLOCK_SIZE, max_model_len=60, **options)
    events = core.scheduler.pool.events = KVEvents("CPU")
    return core, events


def replay(events: list[Any], into: dict[int, tuple[int | None, list[int]]]) -> None:
    """What a router does: hash to parent and tokens. Reads the events as they are on the wire."""
    for event in msgspec.msgpack.decode(msgspec.msgpack.encode(events)):
        match event["type"]:
            case "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                for number, block_hash in enumerate(event["block_hashes"]):
                    assert block_hash not in into, "stored twice"
                    into[block_hash] = (parent, event["token_ids"][number * size : (number + 1) * size])
                    parent = block_hash
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del into[block_hash]
            case "AllBlocksCleared":
                into.clear()


def cached(pool: BlockPool) -> set[int]:
    return {wire_hash(key) for block in range(pool.num_blocks) if (key := pool.hash_of(block)) is not None}


@given(
    st.lists(st.tuples(PROMPTS, st.integers(0, 12), st.integers(1, 3), st.sampled_from(["", "salt"])), min_size=1, max_size=12),
    st.sampled_from([(None,), (None, 8)]),
    st.booleans(),
)
@settings(max_examples=20)
def test_the_replayed_events_are_the_pools_dictionary(
    asked: list[tuple[list[int], int, int, str]], windows: tuple[int | None, ...], has_drafts: bool
) -> None:
    core, events = recorded(num_blocks=20 * len(windows), windows=windows, rows_for_weights=4.0 if has_drafts else None)
    known: dict[int, tuple[int | None, list[int]]] = {}
    for number, (prompt, max_tokens, n, salt) in enumerate(asked):
        request = make_request(str(number), prompt, max_tokens=max_tokens, n=n)
        request.cache_salt = salt
        core.add(request)
        if number % 3 == 0:
            core.step()
            core.abort(str(number))
        while core.has_work and number % 2:
            core.step()
            replay(events.take(), known)
            assert known.keys() == cached(core.scheduler.pool)
    while core.has_work:
        core.step()
    replay(events.take(), known)
    assert known.keys() == cached(core.scheduler.pool)
    core.check_integrity()


def test_a_chain_of_blocks_has_the_tokens_of_its_sequence() -> None:
    core, events = recorded()
    prompt = LETTERS[:10]
    request = make_request("r", prompt, max_tokens=6)
    said = generate(core, request)
    known: dict[int, tuple[int | None, list[int]]] = {}
    taken = events.take()
    replay(taken, known)
    tokens = prompt + [token for delta in said for token in delta.token_ids]
    parent: int | None = None
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        found = [block_hash for block_hash, entry in known.items() if entry == (parent, tokens[start : start + BLOCK_SIZE])]
        assert len(found) == 1 or start + BLOCK_SIZE == len(tokens)  # the keys and values of the last token are never computed
        parent = found[0] if found else None
    first = taken[0]
    assert isinstance(first, BlockStored)
    assert first.block_size == BLOCK_SIZE
    assert (first.medium, first.lora_name, first.lora_id, first.parent_block_hash, first.group_idx) == ("CPU", None, None, None, 0)
    assert len(first.block_hashes) == 2, "blocks of one step are one event"


def test_a_reset_is_one_event() -> None:
    core, events = recorded()
    generate(core, make_request("r", LETTERS[:20], max_tokens=1))
    events.take()
    core.scheduler.pool.clear()
    assert [type(event).__name__ for event in events.take()] == ["AllBlocksCleared"]
    assert cached(core.scheduler.pool) == set()
    core.check_integrity()


@pytest.fixture
def subscribed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KVEvents, Publisher, Any, Any]]:
    """Events, what publishes them, and a router's sockets: for events, and for replay."""
    zmq: Any = import_module("zmq")
    directory = tmp_path_factory.mktemp("kv")  # short enough for a socket
    events = KVEvents("CPU")
    publisher = Publisher(events, f"ipc://{directory}/e", topic="kv@pod@model", replay_address=f"ipc://{directory}/r")
    with zmq.Context() as context:
        router, replayed = context.socket(zmq.SUB), context.socket(zmq.REQ)
        with router, replayed:
            router.connect(f"ipc://{directory}/e")
            router.setsockopt(zmq.SUBSCRIBE, b"kv@")
            replayed.connect(f"ipc://{directory}/r")
            for each in (router, replayed):
                each.setsockopt(zmq.RCVTIMEO, 10_000)
                each.setsockopt(zmq.LINGER, 0)
            while True:  # until the subscription has arrived
                events.clear()
                if router.poll(50):
                    break
            while router.poll(100):
                router.recv_multipart()
            yield events, publisher, router, replayed
            publisher.close()


def test_a_router_gets_numbered_batches_and_can_ask_for_earlier_ones(subscribed: tuple[KVEvents, Publisher, Any, Any]) -> None:
    events, _, router, replayed = subscribed
    numbers = []
    for token in range(3):
        events.store([bytes(15) + b"\x07"], None, [token], "adapter", 0)
        topic, number, payload = router.recv_multipart()
        assert topic == b"kv@pod@model"
        numbers.append(int.from_bytes(number, "big"))
        ts, (event,), rank = msgspec.msgpack.decode(payload)
        assert abs(ts - time.time()) < 60
        assert rank == 0
        expected = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [token], "block_size": 1}
        assert event.items() >= (expected | {"lora_id": None, "medium": "CPU", "lora_name": "adapter", "group_idx": 0}).items()
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    replayed.send((numbers[1]).to_bytes(8, "big"))
    number, payload = replayed.recv_multipart()
    assert int.from_bytes(number, "big") == numbers[1]
    assert msgspec.msgpack.decode(payload)[1][0]["token_ids"] == [1]
    assert END_OF_REPLAY == b"\xff" * 8


def test_what_a_router_has_been_sent_is_what_the_engine_has_cached(subscribed: tuple[KVEvents, Publisher, Any, Any]) -> None:
    events, _, router, _ = subscribed
    core, _ = recorded(num_blocks=20)
    core.scheduler.pool.events = events
    for number in range(12):  # more than there is room for
        generate(core, make_request(str(number), LETTERS[number % 3 : number % 3 + 9] * 2, max_tokens=8))
    core.scheduler.pool.clear()
    generate(core, make_request("last", LETTERS[:17], max_tokens=4))
    known: dict[int, tuple[int | None, list[int]]] = {}
    kinds: set[str] = set()
    while known.keys() != cached(core.scheduler.pool) or len(kinds) < 3:
        batch = msgspec.msgpack.decode(router.recv_multipart()[2])
        kinds |= {event["type"] for event in batch[1]}
        replay(batch[1], known)
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events": "localhost:5557"}, "--kv-events: an address such as"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "5558"}, "--kv-events: an address such as"),
        ({"kv_events": "tcp://*:5557", "enable_prefix_caching": False}, "--no-prefix-caching switches that off"),
        ({"kv_events": "tcp://*:5557", "kv_cache_dir": "d"}, "not with --kv-cache-dir"),
        ({"kv_events_topic": "t"}, "--kv-events, which is not given"),
    ],
)
def test_what_cannot_be_published_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_kv_events(EngineConfig(**options))


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("", 0)) as listener:
        address = f"tcp://*:{listener.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=r"^--kv-events tcp://\*:\d+: Address already in use"):
            publish_events(EngineConfig(kv_events=address), BlockPool(1), "cpu")


def test_a_start_clears_what_routers_know_from_before(tmp_path_factory: pytest.TempPathFactory) -> None:
    zmq: Any = import_module("zmq")
    directory = tmp_path_factory.mktemp("kv")
    config = EngineConfig(kv_events=f"ipc://{directory}/e", kv_events_replay=f"ipc://{directory}/r")
    publisher = publish_events(config, BlockPool(1), "cpu")
    assert publisher is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as replayed:
        replayed.setsockopt(zmq.RCVTIMEO, 10_000)
        replayed.connect(f"ipc://{directory}/r")
        kinds: list[str] = []
        while not kinds:
            replayed.send_multipart((b"", bytes(8)))
            while (message := replayed.recv_multipart())[1] != END_OF_REPLAY:
                kinds += [event["type"] for event in msgspec.msgpack.decode(message[2])[1]]
        assert kinds == ["AllBlocksCleared"]
    publisher.close()


def test_without_zeromq_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.kv_cache.events.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock\[kv-events\]'"):
        check_kv_events(EngineConfig(kv_events="tcp://*:5557"))
