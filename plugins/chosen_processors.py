"""The logits processors that a request names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.engine.sampling.processors import bind


def chosen_processors(
    registered: Mapping[str, RegisteredLogitsProcessor], choices: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[Callable[[], Any]]:
    """What `Request.logits_processors` takes, of names with their arguments, in the order in which they are to run.

    Raises `InvalidRequest`, with the place among `logits_processors`, for a name that is not registered or arguments that are refused.
    """
    makers = []
    for index, (name, arguments) in enumerate(choices):
        path = f"logits_processors[{index}]"
        if name not in registered:
            known = ", ".join(registered) or "none"
            raise InvalidRequest(f"no logits processor {name[:100]!r}: there are {known}", f"{path}.name")
        try:
            makers.append(bind(registered[name], arguments))
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"the logits processor `{name}` refused its arguments: {error}", f"{path}.arguments") from error
    return makers
