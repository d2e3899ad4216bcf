"""`LoRARequest`: the adapter of a call of the library, which is read from its directory when it is first used."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.adapters.registry import Adapter
from penstock.engine.errors import InvalidRequest
from penstock.serving.context import LocalContext


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in peft's directory `lora_path`, known as `lora_name`. Requests of one name must have one path and one id."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidRequest("`lora_name` and `lora_path` must be strings, of which the path is not empty", "lora_request")
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(f"`lora_int_id` must be an integer of 1 or more, got {self.lora_int_id!r:.100}", "lora_request")


LoRAChoice = LoRARequest | Sequence[LoRARequest | None] | None


class AdapterLoader:
    """The adapters of a library's calls. Belongs to the engine's loop.

    Where as many are loaded as may be, the one that has not been asked for for longest is dropped; requests that have it keep it.
    """

    def __init__(self, context: LocalContext) -> None:
        self._registry = context.adapters
        self._requests: dict[str, LoRARequest] = {}

    async def load(self, given: LoRAChoice, count: int, what: str) -> list[Adapter | None]:
        """The adapter for each of `count` prompts, which are given one for all or one for each. Raises `InvalidRequest`."""
        if given is None or isinstance(given, LoRARequest):
            return [await self._load(given)] * count
        if not isinstance(given, Sequence) or len(given) != count:
            raise InvalidRequest(f"`lora_request` must be a LoRARequest, or a list of one for each of {count} {what}", "lora_request")
        return [await self._load(own) for own in given]

    async def _load(self, given: Any) -> Adapter | None:
        if given is None:
            return None
        if not isinstance(given, LoRARequest):
            raise InvalidRequest(f"`lora_request` must be a LoRARequest, got {type(given).__name__}", "lora_request")
        known = self._requests.get(given.lora_name)
        if known is not None and known != given:
            raise InvalidRequest(f"`lora_request`: {given.lora_name!r} is already that of {known}", "lora_request")
        adapter = self._registry.get(given.lora_name)
        if adapter is None:
            if 0 < self._registry.max_adapters <= len(self._registry):
                self._requests.pop(self._registry.drop_oldest(), None)
            adapter = await self._registry.load(given.lora_name, Path(given.lora_path), replaces=True)
            self._requests[given.lora_name] = given
        self._registry.touch(given.lora_name)
        return adapter


def refuse_adapter(lora_request: object) -> None:
    """Raises `InvalidRequest` for anything but None, where no adapter can be used."""
    if lora_request is not None:
        raise InvalidRequest("`lora_request`: only models that generate text take adapters", "lora_request")
