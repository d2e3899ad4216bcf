"""Adapters by name, and the slots that the adapters of running sequences take."""

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.engine.multimodal.inputs import PromptEmbeds

if TYPE_CHECKING:
    from penstock.engine.adapters.checkpoint import LowRank

MAX_NAME = 256
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A low-rank adapter, which changes what linear layers of the model compute (Hu et al., arXiv:2106.09685), or a tuned prompt.

    `updates` are by the paths of the layers. `digest` is of all that they compute with: cached blocks belong to it. A tuned `prompt` is
    vectors that come before every prompt, as virtual tokens (Lester et al., arXiv:2104.08691): such an adapter changes nothing else. Two
    loads of the same directory are two adapters: requests keep the one that they began with.
    """

    name: str
    path: str
    updates: "dict[str, LowRank]" = field(default_factory=dict)
    digest: bytes = b""
    prompt: PromptEmbeds | None = None
    number: int = field(default_factory=lambda: next(_numbers))


NO_SLOT = -1  # of a row without an adapter


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The slot of each flat row of a batch, `NO_SLOT` without an adapter, and the adapter in each of these slots."""

    slots: list[int]
    adapters: dict[int, Adapter]


class AdapterRegistry:
    """The adapters that requests may ask for, at most `max_adapters`. Belongs to the event loop.

    `read` reads one from its directory, in any thread; None where none can be loaded.
    """

    def __init__(
        self, max_adapters: int = 0, *, reserved_names: Iterable[str] = (), read: Callable[[str, Path, Path | None], Adapter] | None = None
    ) -> None:
        self.max_adapters = max_adapters
        self._reserved_names = frozenset(reserved_names)
        self._read = read
        self._reading = asyncio.Lock()  # one at a time: requests need the event loop's other threads
        self._adapters: dict[str, Adapter] = {}

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def get(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def named(self, name: str) -> Adapter:
        """Raises `NoSuchModel`."""
        if name not in self._adapters:
            raise NoSuchModel(f"no adapter is loaded as {name!r}", "model")
        return self._adapters[name]

    def check_name(self, name: str, *, replaces: bool = False) -> None:
        """Raises `InvalidRequest` where no adapter can be added under this name."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidRequest(f"`lora_name` must have 1 to {MAX_NAME} printable characters", "lora_name")
        if name in self._reserved_names:
            raise InvalidRequest(f"{name!r} is a name of the model itself", "lora_name")
        if name in self._adapters:
            if replaces:
                return
            remedy = "unload it first, or set `load_inplace` (`replace` in the admin interface)"
            raise InvalidRequest(f"an adapter is loaded as {name!r} already: {remedy}", "lora_name")
        if len(self._adapters) >= self.max_adapters:
            raise InvalidRequest(f"{self.max_adapters} adapters are loaded (--max-cpu-loras): unload one first", "lora_name")

    async def load(self, name: str, directory: Path, root: Path | None = None, *, replaces: bool = False) -> Adapter:
        """Reads and adds an adapter, which must be below `root`, in place of one of this name where it `replaces` that.

        Raises `InvalidRequest`.
        """
        self.check_name(name, replaces=replaces)
        if self._read is None:
            raise InvalidRequest("this engine was built without adapters: set `enable_lora` or --enable-lora", "lora_name")
        async with self._reading:
            adapter = await asyncio.to_thread(self._read, name, directory, root)
        self.add(adapter, replaces=replaces)
        return adapter

    def add(self, adapter: Adapter, *, replaces: bool = False) -> None:
        """Raises `InvalidRequest`."""
        self.check_name(adapter.name, replaces=replaces)
        self._adapters[adapter.name] = adapter

    def touch(self, name: str) -> None:
        """Notes that the adapter is asked for."""
        if name in self._adapters:
            self._adapters[name] = self._adapters.pop(name)

    def drop_oldest(self) -> str:
        """Removes the adapter that has not been touched for longest, and returns its name."""
        name = next(iter(self._adapters))
        del self._adapters[name]
        return name

    def remove(self, name: str) -> Adapter:
        """Requests that have the adapter keep it. Raises `NoSuchModel`."""
        if name not in self._adapters:
            raise NoSuchModel(f"no adapter is loaded as {name!r}", "lora_name")
        return self._adapters.pop(name)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The names of the adapters that running sequences have, and of those that others wait for, and how many may run."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    num_slots: int


def names_of(adapters: Iterable[Adapter | None]) -> tuple[str, ...]:
    """Each once, sorted."""
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))


class AdapterSlots:
    """Which adapters have a place in the model: those of running sequences, and as many of the others as there is room for.

    The least recently used of the others gives its slot to the next adapter.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[Adapter, int] = {}
        self._num_users: Counter[Adapter] = Counter()
        self._idle: OrderedDict[Adapter, None] = OrderedDict()  # least recently used first
        self._blank = list(range(num_slots - 1, -1, -1))

    def has_room_for(self, adapter: Adapter) -> bool:
        return adapter in self._slots or bool(self._blank or self._idle)

    def slot_of(self, adapter: Adapter) -> int:
        """Of an adapter that is in use."""
        return self._slots[adapter]

    @property
    def is_idle(self) -> bool:
        """Whether no running sequence has an adapter."""
        return not self._num_users

    def take(self, adapter: Adapter) -> None:
        """One more running sequence uses it. The caller has checked `has_room_for`."""
        if adapter not in self._slots:
            if self._blank:
                self._slots[adapter] = self._blank.pop()
            else:
                evicted, _ = self._idle.popitem(last=False)
                self._slots[adapter] = self._slots.pop(evicted)
        self._idle.pop(adapter, None)
        self._num_users[adapter] += 1

    def release(self, adapter: Adapter) -> None:
        """One running sequence less uses it."""
        self._num_users[adapter] -= 1
        if not self._num_users[adapter]:
            del self._num_users[adapter]
            self._idle[adapter] = None

    def check_integrity(self, users: Iterable[Adapter]) -> None:
        """Asserts that the counts are those of these users, all there are, and that no slot is lost or taken twice."""
        assert self._num_users == Counter(users), "an adapter is pinned by a sequence that does not run, or not by one that does"
        assert sorted([*self._slots.values(), *self._blank]) == list(range(self.num_slots)), "a slot is lost or taken twice"
        assert self._slots.keys() == {*self._num_users, *self._idle}
