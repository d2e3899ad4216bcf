"""A constraint that a grammar engine gives up on while it generates is the client's mistake, not the server's."""

from typing import Any

import pytest

from penstock.engine.deltas import ClientFault, FinishReason
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.serving.messages import check_delta
from tests.fakes import generate, make_core, make_request
from tests.matchers import Grammar, Walk


class GivesUp(Walk):
    """At its third token, in whatever method is called then."""

    def __init__(self, method: str) -> None:
        super().__init__(1, forces=False)
        self.method = method
        self.num_taken = 0

    def fill_bitmask(self, row: Any) -> None:
        self.check("fill_bitmask")
        super().fill_bitmask(row)

    def advance(self, token_id: int) -> bool:
        self.num_taken += 1
        self.check("advance")
        return super().advance(token_id)

    def check(self, method: str) -> None:
        if self.num_taken >= 3 and method == self.method:
            raise UnsupportedGrammar("lexer error: too many expressions constructed")


@pytest.mark.parametrize("method", ["fill_bitmask", "advance"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_an_engine_that_gives_up_ends_its_own_request_with_a_400(method: str, is_quick: bool) -> None:
    request = make_request("r", grammar=Grammar(lambda: GivesUp(method), has_quick_masks=is_quick))
    last = generate(make_core(), request)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, ClientFault)
    with pytest.raises(InvalidRequest, match=r"^lexer error: too many expressions constructed$"):
        check_delta(last)
