import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.constraints.limits import MAX_TEXT
from penstock.engine.errors import InvalidRequest
from penstock.serving.constraints.schemas import check_text, exceeds
from penstock.serving.endpoints.bodies import decode
from penstock.serving.requests import MAX_BRACKETS, ChatCompletionRequest

documents = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(documents, st.integers(0, 400))
def test_what_exceeds_a_limit_is_no_shorter_as_json(document: Any, limit: int) -> None:
    # What is counted for a part stands for the comma and the space behind it, which the last one lacks, and so does an empty text.
    text = json.dumps(document, ensure_ascii=False)
    if exceeds(document, limit):
        assert len(text) + 3 > limit
    else:
        assert len(text) <= 12 * limit


def test_what_is_too_long_for_a_constraint_is_refused_unwritten() -> None:
    values: list[Any] = ["a" * MAX_TEXT, [0] * MAX_TEXT, [{"a": [[]]}] * (MAX_TEXT // 8)]
    for value in values:
        with pytest.raises(InvalidRequest, match="more than 1048576 characters") as caught:
            check_text(value, "guided_json")
        assert caught.value.param == "guided_json"
    check_text(["a" * 80] * 10_000, "guided_json")


def test_a_body_of_brackets_is_refused_undecoded() -> None:
    with pytest.raises(InvalidRequest, match="brackets"):
        decode(b'{"guided_json": [' + b"[]," * MAX_BRACKETS + b"[]]}", ChatCompletionRequest)
