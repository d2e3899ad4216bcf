"""The logits processors that a request names."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.logits_processor import ChosenProcessor, LogitsProcessor, choose


def chosen_processors(registered: Mapping[str, LogitsProcessor], choices: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ChosenProcessor]:
    """The processors for `Request.logits_processors`, from names and arguments, in the order in which they run.

    Raises `InvalidRequest`, with the path in `logits_processors`, for a name that is not registered or arguments that are refused.
    """
    chosen = []
    for index, (name, arguments) in enumerate(choices):
        path = f"logits_processors[{index}]"
        if name not in registered:
            known = ", ".join(registered) or "none"
            raise InvalidRequest(f"no logits processor {name[:100]!r}: there are {known}", f"{path}.name")
        try:
            chosen.append(choose(registered[name], arguments))
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"the logits processor `{name}` refused its arguments: {error}", f"{path}.arguments") from error
    return chosen
