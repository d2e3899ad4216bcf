from pathlib import Path

import pytest
from transformers import AutoTokenizer

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import encode_text
from penstock.engine.pooling.files import SentenceFiles
from penstock.engine.text.tokenizer import Tokenizer

LONG = "the cat sat on the mat and it was very, very pleased with itself"
SHORT = "Paris is a city"
PROMPTS = SentenceFiles(prompts={"query": "query: ", "document": ""}, default_prompt_name="query", include_prompt=False)


@pytest.fixture(scope="module")
def tokenizer(minilm_dir: Path) -> Tokenizer:
    return Tokenizer.load(minilm_dir)


@pytest.mark.parametrize("pair", [(LONG, SHORT), (SHORT, LONG), (LONG, LONG), (SHORT, "x"), (LONG, None)])
def test_texts_and_pairs_are_encoded_and_cut_as_in_transformers(
    pair: tuple[str, str | None], tokenizer: Tokenizer, minilm_dir: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(minilm_dir)
    for max_tokens in (None, 5, 6, 7, 8, 9, 11, 15, 16, 19, 30):
        expected = reference(*pair, truncation=max_tokens is not None and "longest_first", max_length=max_tokens)
        found = encode_text(tokenizer, SentenceFiles(), *pair, max_tokens=max_tokens).tokens
        assert found.token_ids == expected["input_ids"]
        assert found.token_type_ids == (None if pair[1] is None else expected["token_type_ids"])


def test_a_limit_that_holds_special_tokens_only_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="2 tokens hold nothing of the text"):
        encode_text(tokenizer, SentenceFiles(), LONG, max_tokens=2)


def test_a_text_is_put_behind_the_instruction_that_is_named_or_the_default_one(tokenizer: Tokenizer) -> None:
    plain = encode_text(tokenizer, SentenceFiles(), f"query: {SHORT}")
    for name in (None, "query"):
        encoded = encode_text(tokenizer, PROMPTS, SHORT, prompt_name=name)
        assert encoded.tokens == plain.tokens
        assert encoded.num_instruction_tokens == 3  # [CLS] query :
    assert encode_text(tokenizer, PROMPTS, SHORT, prompt_name="document") == encode_text(tokenizer, SentenceFiles(), SHORT)


def test_an_unknown_instruction_is_refused_with_those_that_there_are(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no prompt named 'title'; it has document, query"):
        encode_text(tokenizer, PROMPTS, SHORT, prompt_name="title")


def test_pairs_have_no_instruction(tokenizer: Tokenizer) -> None:
    assert encode_text(tokenizer, PROMPTS, SHORT, LONG) == encode_text(tokenizer, SentenceFiles(), SHORT, LONG)


def test_text_is_put_in_lower_case_where_the_files_say_so(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)  # which tells the cases apart
    lower = encode_text(tokenizer, SentenceFiles(do_lower_case=True), SHORT.upper())
    assert lower == encode_text(tokenizer, SentenceFiles(), SHORT.lower())


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        encode_text(tokenizer, SentenceFiles(), "\ud800")
