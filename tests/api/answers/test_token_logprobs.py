import pytest
from msgspec.json import decode

from penstock.engine.deltas import TokenLogprobs
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.endpoints.answers import TokenWriter
from penstock.serving.endpoints.chat import chat_logprob
from penstock.serving.endpoints.completions import CompletionLogprobsWriter
from tests.api.scripted import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_an_impossible_token_is_minus_9999_in_every_form(tokenizer: Tokenizer) -> None:
    writer = TokenWriter(tokenizer, as_token_ids=False)
    [a] = ids(tokenizer, "a")
    token = TokenLogprobs(a, float("-inf"), 300, ((a + 1, float("-inf")),))
    chat = chat_logprob(token, 1, writer)
    assert (chat.logprob, chat.top_logprobs[0].logprob) == (-9999.0, -9999.0)
    assert {entry["logprob"] for entry in decode(writer.prompt([token], 1)[0]).values()} == {-9999.0}
    written = CompletionLogprobsWriter(writer, frozenset()).write([(a, token)], 1)
    assert written.token_logprobs == [-9999.0]


def test_no_more_alternatives_are_shown_than_asked_for(tokenizer: Tokenizer) -> None:
    writer = TokenWriter(tokenizer, as_token_ids=False)
    token = TokenLogprobs(5, -2.0, 4, ((1, -0.1), (2, -0.2), (3, -0.3)))
    assert len(chat_logprob(token, 2, writer).top_logprobs) == 2
    assert list(decode(writer.prompt([None, token], 2)[1])) == ["1", "2", "5"]
    written = CompletionLogprobsWriter(writer, frozenset()).write([(5, token)], 0)
    assert written.top_logprobs == [{tokenizer.token_text(5): -2.0}]


def test_a_character_of_several_tokens_has_its_bytes_spread_over_them(tokenizer: Tokenizer) -> None:
    writer = TokenWriter(tokenizer, as_token_ids=False)
    tokens = [chat_logprob(TokenLogprobs(token_id, -1.0, 1), 0, writer) for token_id in ids(tokenizer, "🙂")]
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == "🙂"


@pytest.mark.parametrize("cut", range(9))
def test_offsets_point_at_the_characters_however_the_tokens_come(tokenizer: Tokenizer, cut: int) -> None:
    text = "aé🙂b"
    entries = [(token_id, None) for token_id in ids(tokenizer, text)]
    writer = CompletionLogprobsWriter(TokenWriter(tokenizer, as_token_ids=False), frozenset())
    first, second = writer.write(entries[:cut], 0), writer.write(entries[cut:], 0)
    assert first.text_offset + second.text_offset == [0, 1, 1, 2, 2, 2, 2, 3]


def test_tokens_can_be_named_by_their_ids(tokenizer: Tokenizer) -> None:
    writer = TokenWriter(tokenizer, as_token_ids=True)
    written = CompletionLogprobsWriter(writer, frozenset()).write([(7, TokenLogprobs(7, -1.0, 2, ((8, -0.5),)))], 1)
    assert written.tokens == ["token_id:7"]
    assert written.top_logprobs == [{"token_id:8": -0.5, "token_id:7": -1.0}]
    assert chat_logprob(TokenLogprobs(7, -1.0, 1), 0, writer).token == "token_id:7"
