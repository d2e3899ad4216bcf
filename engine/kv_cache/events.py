"""KV events: what a router is to know of the prefix cache, published over ZeroMQ in the shape of vLLM's.

A router that applies them to a dictionary has what the block pool has: which blocks are cached here. They have the tokens of prompts and
of answers.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.engine.kv_cache.blocks import BlockPool

logger = logging.getLogger(__name__)

BUFFER_STEPS = 10_000  # batches that are kept for subscribers that have missed some
HIGH_WATER_MARK = 100_000  # batches for a subscriber that does not read; then some are dropped for it
PAUSE_SECONDS = 0.005  # for events to be collected into a batch
POLL_SECONDS = 0.1  # how often requests for earlier batches are looked at while there is no event
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Event(Struct, tag=True, omit_defaults=True):
    """A map on the wire; `type` is the name of its class."""


class BlockStored(Event):
    """Blocks that follow each other can be found from now on. `parent_block_hash` is that of the block before them, if there is one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    """No block can be found any more."""


class EventBatch(Struct, array_like=True):
    """Events in their order. `ts` is a time since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def wire_hash(key: bytes) -> int:
    """What a block is called outside: routers take hashes for numbers of 64 bits."""
    return int.from_bytes(key[-8:], "big")


class KVEvents:
    """Collects the events of one block pool, in the thread of the scheduler, for the publisher's."""

    def __init__(self, medium: str) -> None:
        """`medium` is where the blocks are: `GPU` or `CPU`."""
        self._medium = medium
        self._events: deque[BlockStored | AllBlocksCleared | int] = deque()  # a number is the hash of a block that was removed
        self.has_some = threading.Event()

    def store(self, keys: Sequence[bytes], parent: bytes | None, token_ids: list[int], adapter: str | None, group: int) -> None:
        """Blocks of one sequence that follow each other, with the tokens in them."""
        self._add(
            BlockStored(
                block_hashes=[wire_hash(key) for key in keys],
                parent_block_hash=None if parent is None else wire_hash(parent),
                token_ids=token_ids,
                block_size=len(token_ids) // len(keys),
                lora_id=None,
                medium=self._medium,
                lora_name=adapter,
                group_idx=group,
            )
        )

    def remove(self, key: bytes) -> None:
        self._add(wire_hash(key))

    def clear(self) -> None:
        self._add(AllBlocksCleared())

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """All events since the last time; blocks that were removed one after the other are one event."""
        self.has_some.clear()
        taken: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, int):
                taken.append(event)
            elif taken and isinstance(last := taken[-1], BlockRemoved):
                last.block_hashes.append(event)
            else:
                taken.append(BlockRemoved([event], self._medium))
        return taken

    def _add(self, event: BlockStored | AllBlocksCleared | int) -> None:
        self._events.append(event)
        self.has_some.set()


def check_kv_events(config: EngineConfig) -> None:
    """Raises `ConfigurationError` where events cannot be published as asked."""
    if config.kv_events is None:
        if config.kv_events_topic or config.kv_events_replay is not None:
            raise ConfigurationError("--kv-events-topic and --kv-events-replay are about --kv-events, which is not given")
        return
    for address in filter(None, (config.kv_events, config.kv_events_replay)):
        if not address.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigurationError(f"--kv-events: an address such as tcp://*:5557, got {address!r}")
    if not config.enable_prefix_caching:
        raise ConfigurationError("--kv-events is about the prefix cache, and --no-prefix-caching switches that off")
    if config.kv_cache_dir is not None:
        raise ConfigurationError("--kv-events: not with --kv-cache-dir, because nothing is known of the tokens in blocks that are loaded")
    if find_spec("zmq") is None:
        raise ConfigurationError("--kv-events: there is no zmq: pip install 'penstock[kv-events]'")


def publish_events(config: EngineConfig, pool: "BlockPool", device_type: str) -> "Publisher | None":
    """Has the pool's events published, if that is wanted. Raises `ConfigurationError`."""
    check_kv_events(config)
    if config.kv_events is None:
        return None
    pool.events = KVEvents("GPU" if device_type == "cuda" else "CPU")
    pool.events.clear()  # routers may know of blocks from before a restart
    return Publisher(pool.events, config.kv_events, topic=config.kv_events_topic, replay_address=config.kv_events_replay)


class Publisher:
    """Sends events from a thread of its own: to subscribers by a PUB socket, and earlier ones to those that ask by a ROUTER socket.

    A message has the topic, its number in 8 bytes, and an `EventBatch` in MessagePack. A request for earlier ones has the number of the
    first, and is answered with a number and a batch in each message, at last with the number -1.
    """

    def __init__(self, events: KVEvents, address: str, *, topic: str = "", replay_address: str | None = None) -> None:
        zmq: Any = import_module("zmq")
        self._events, self._topic = events, topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(HIGH_WATER_MARK)
            is_own = any(part in address for part in ("*", "::", "ipc://", "inproc://"))  # as vLLM has it: others are connected to
            (self._pub.bind if is_own else self._pub.connect)(address)
            self._replay: Any = None
            if replay_address is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(replay_address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(f"--kv-events {address}: {error}") from error
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what there is, and ends the thread."""
        self._is_closed = True
        self._events.has_some.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._is_closed:
            if self._events.has_some.wait(POLL_SECONDS):
                time.sleep(PAUSE_SECONDS)
            while events := self._events.take():
                batch = msgspec.msgpack.encode(EventBatch(time.time(), events))
                self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
                self._sent.append((number, batch))
                number += 1
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
        self._context.destroy(linger=1000)

    def _answer(self, request: list[bytes]) -> None:
        """Sends what was sent from the number on that the request has."""
        if len(request) != 3:
            logger.warning("a request for earlier KV events has %d parts and not 3", len(request))
            return
        client, empty, first = request
        for number, batch in self._sent:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((client, empty, number.to_bytes(8, "big"), batch))
        self._replay.send_multipart((client, empty, END_OF_REPLAY, b""))
