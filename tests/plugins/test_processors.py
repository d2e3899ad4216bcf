from typing import Any

import pytest

from penstock import LogitsProcessor, LogitsRow, per_row, per_sequence
from penstock.engine.contracts.logits_processor import chosen_processors
from penstock.engine.errors import InvalidRequest


class Batched(LogitsProcessor):
    def begin(self, by: float) -> float:
        if by < 0:
            raise ValueError("`by` must not be negative")
        return by

    def process(self, rows: Any, logits: Any) -> None: ...


def of_row(row: LogitsRow, logits: Any, *, size: int = 1) -> None: ...


def made(size: int) -> Any:
    return lambda token_ids, logits: logits


REGISTERED: dict[str, Any] = {"batched": Batched(), "of_row": per_row(of_row), "made": per_sequence(made)}


def test_names_are_chosen_in_order() -> None:
    chosen = chosen_processors(REGISTERED, [("made", {"size": 1}), ("batched", {"by": 2.0}), ("of_row", {}), ("batched", {"by": 3.0})])
    assert [choice.processor for choice in chosen] == [REGISTERED[name] for name in ("made", "batched", "of_row", "batched")]
    assert [choice.begin(LogitsRow("r")).row.state for choice in (chosen[1], chosen[3])] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("choices", "path", "message"),
    [
        ([("other", {})], "logits_processors[0].name", "there are batched, of_row, made"),
        ([("of_row", {}), ("batched", {"by": -1})], "logits_processors[1].arguments", "must not be negative"),
        ([("batched", {})], "logits_processors[0].arguments", "by"),
        ([("of_row", {"logits": [1]})], "logits_processors[0].arguments", "logits"),
        ([("of_row", {"width": 1})], "logits_processors[0].arguments", "width"),
        ([("made", {})], "logits_processors[0].arguments", "size"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(choices: Any, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        chosen_processors(REGISTERED, choices)
    assert caught.value.param == path
