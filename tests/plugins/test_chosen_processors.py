from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.plugins.chosen_processors import chosen_processors


class Batched:
    def begin(self, by: float) -> float:
        if by < 0:
            raise ValueError("`by` must not be negative")
        return by

    def process_batch(self, rows: Any, logits: Any) -> None: ...


def of_row(request_id: str, logits: Any, token_ids: list[int], client_id: Any, *, size: int = 1) -> None: ...


def made(size: int) -> Any:
    return lambda token_ids, logits: logits


REGISTERED: dict[str, Any] = {"batched": Batched(), "of_row": of_row, "made": made}


def test_names_of_all_forms_are_chosen_in_order() -> None:
    makers = chosen_processors(REGISTERED, [("made", {"size": 1}), ("batched", {"by": 2.0}), ("of_row", {}), ("batched", {"by": 3.0})])
    chosen = [make() for make in makers]
    assert [chosen[1].state, chosen[3].state] == [2.0, 3.0]
    assert chosen[1].processor is chosen[3].processor is REGISTERED["batched"]
    assert chosen[2] is of_row


@pytest.mark.parametrize(
    ("choices", "path", "message"),
    [
        ([("other", {})], "logits_processors[0].name", "there are batched, of_row, made"),
        ([("of_row", {}), ("batched", {"by": -1})], "logits_processors[1].arguments", "must not be negative"),
        ([("batched", {})], "logits_processors[0].arguments", "by"),
        ([("of_row", {"token_ids": [1]})], "logits_processors[0].arguments", "token_ids"),
        ([("of_row", {"width": 1})], "logits_processors[0].arguments", "width"),
        ([("made", {})], "logits_processors[0].arguments", "size"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(choices: Any, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        chosen_processors(REGISTERED, choices)
    assert caught.value.param == path
