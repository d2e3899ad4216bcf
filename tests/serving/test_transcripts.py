"""Prompts with answers as the tokens that the model said: the same text always, and only where the seam is sure."""

import random

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.engine.text.tokenizer import ContentTokenizer, Tokenizer
from penstock.serving.templates.transcripts import Transcripts

END, OTHER = "<|end|>", "<|other|>"


def merging_tokenizer(*special: str) -> Tokenizer:
    """Bytes, merges of letters, and added tokens: a text has many spellings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("a", "a"), ("aa", "aa"), ("<", "|")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(END, special=True), AddedToken(OTHER, special=True), AddedToken("<tool>", normalized=True)])
    backend.add_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, {}, {}, [])


TOKENIZER = merging_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def decode(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def spelled(text: str, rng: random.Random) -> list[int]:
    """Any tokens that make this text."""
    token_ids: list[int] = []
    while text:
        length = rng.randint(1, len(text))
        token_ids += encode(text[:length])
        text = text[length:]
    return token_ids


def never(text: str) -> list[int]:
    raise AssertionError(text)


def test_an_answer_is_the_tokens_that_the_model_said() -> None:
    transcripts, rng = Transcripts(TOKENIZER), random.Random(1)
    prompt = f"user hello{END}bot"
    said = spelled(" hello aaaa", rng)
    assert said != encode(" hello aaaa")
    transcripts.add(prompt, "", encode(prompt), [*said, *encode(END)])
    following = f"{prompt} hello aaaa{END}user hello{END}bot"
    seen: list[str] = []

    def watched(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    token_ids = transcripts.encode(following, "", watched)
    assert token_ids[: len(encode(prompt)) + len(said)] == encode(prompt) + said
    assert decode(token_ids) == following
    assert seen == [f"{END}user hello{END}bot"], "no more is tokenized"
    assert transcripts.encode(following, "another key", encode) == encode(following)


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        (" hello", " aaaa"),  # merges could lie across the seam
        (" hello", "<tool>"),  # found after the text around it has been normalized
        (" hello<|", f"end|>{END}"),
        (" hello<", f"{END} hello"),  # could be the beginning of an added token
        ("", f"{END} hello"),
    ],
)
def test_where_the_seam_is_not_sure_the_tokenizer_spells_all_of_it(answer: str, rest: str) -> None:
    transcripts = Transcripts(TOKENIZER)
    transcripts.add("a", "", encode("a"), spelled(answer, random.Random(2)))
    text = "a" + answer + rest
    assert transcripts.encode(text, "", encode) == encode(text)


def test_what_is_no_text_by_itself_is_not_kept() -> None:
    transcripts = Transcripts(TOKENIZER)
    transcripts.add("a", "", encode("a"), encode("é")[:1])
    transcripts.add("a", "", encode("a"), [10**6])
    assert transcripts.encode(f"aé{END}", "", encode) == encode(f"aé{END}")


def test_the_tokens_are_always_those_of_the_text() -> None:
    rng = random.Random(3)
    words = [" hello", "aaaa", "a", "<|", "<", "é", END, OTHER, "<tool>", "hell", "o", "|>"]
    transcripts = Transcripts(TOKENIZER, max_bytes=4000)
    num_known = 0
    for _ in range(300):
        text = "".join(rng.choices(words, k=3))
        for _ in range(4):
            token_ids = transcripts.encode(text, "", encode)
            assert decode(token_ids) == text
            num_known += token_ids != encode(text)
            answer = "".join(rng.choices(words, k=rng.randint(0, 4)))
            transcripts.add(text, "", token_ids, spelled(answer, rng) + rng.choice([[], encode(END)]))
            text += answer + rng.choice([END, END, OTHER, " hello", ""])
    assert num_known > 100


def test_special_tokens_that_a_client_spells_are_text_where_that_is_wanted() -> None:
    content = ContentTokenizer(TOKENIZER)

    def marked(text: str) -> list[int]:
        return content.encode(text, add_special_tokens=False)

    transcripts = Transcripts(TOKENIZER)
    prompt = content.mark("hello") + OTHER
    transcripts.add(prompt, "", marked(prompt), spelled(" hello", random.Random(4)))
    for rest in (END + content.mark(f"a{END}a") + OTHER, content.mark(END) + OTHER):
        token_ids = transcripts.encode(prompt + " hello" + rest, "", marked)
        assert token_ids[-len(marked(rest)) :] == marked(rest)
        assert decode(token_ids) == content.unmark(prompt + " hello" + rest)


@pytest.mark.parametrize(("max_bytes", "num_kept"), [(300, 4), (2**20, 256)])
def test_transcripts_are_bounded_and_the_oldest_go_first(max_bytes: int, num_kept: int) -> None:
    transcripts = Transcripts(TOKENIZER, max_bytes)
    for number in range(300):
        transcripts.add(f"{number}.", "", encode(f"{number}."), encode(" hello"))
    known = []
    for number in range(300):
        rest: list[str] = []

        def watched(text: str, seen: list[str] = rest) -> list[int]:
            seen.append(text)
            return encode(text)

        transcripts.encode(f"{number}. hello{END}", "", watched)
        known += [number] * (rest == [END])
    assert known == list(range(300 - len(known), 300))
    assert 0 < len(known) <= num_kept
