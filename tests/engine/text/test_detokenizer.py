import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from penstock.engine.contracts.parsing import SpecialText
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import DecoderKind, Tokenizer, TokenTable

TEXTS = [
    "The quick brown fox doesn't jump over the lazy dog, does it? Yes - it does!",
    "Größe, naïve café, déjà vu; señor, smörgåsbord. Быстрая лисица прыгает через собаку.",
    "你好，世界。今日は良い天気ですね。안녕하세요 세계 नमस्ते दुनिया مرحبا بالعالم",
    "emoji 🎉🚀 family 👩‍👩‍👧‍👦 flag 🇫🇷 thumbs 👍🏽 done 🎉",
    "def f(x):\n    return x  # two  spaces\n\n\ttab",
]


def finished(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(["<s>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("    ", normalized=False)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "<|end|>"}, {})


def byte_level_bpe() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    return finished(backend)


def sentencepiece_bpe() -> Tokenizer:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.train_from_iterator(
        TEXTS[:2], trainers.BpeTrainer(vocab_size=200, limit_alphabet=40, special_tokens=["<unk>"], show_progress=False)
    )
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    content["model"]["byte_fallback"] = True
    backend = Backend.from_str(json.dumps(content))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return finished(backend)


def unigram() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    )
    return finished(backend)


def wordpiece() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False))
    return finished(backend)


def suffix_bpe() -> Tokenizer:
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return finished(backend)


def words_without_decoder() -> Tokenizer:
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return finished(backend)


MAKERS = (byte_level_bpe, sentencepiece_bpe, unigram, wordpiece, suffix_bpe, words_without_decoder)
FAMILIES: dict[str, Callable[[], Tokenizer]] = {maker.__name__: functools.cache(maker) for maker in MAKERS}
load = functools.cache(Tokenizer.load)
each_family = pytest.mark.parametrize("family", FAMILIES)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    pieces = [piece for token_id in token_ids for piece in detokenizer.feed(token_id)]
    return pieces + detokenizer.finish()


def added_text(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int]) -> str:
    """What decoding everything at once adds to the decoded prompt."""
    return tokenizer.decode(prompt + token_ids, skip_special_tokens=False)[len(tokenizer.decode(prompt, skip_special_tokens=False)) :]


def units(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any token; for byte tokens a whole character's, since the library's reading of broken runs is not ours (see Detokenizer)."""
    byte_ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)]
    single = st.integers(0, tokenizer.vocab_size + 2).filter(lambda token_id: token_id not in byte_ids).map(lambda token_id: [token_id])
    if byte_ids[0] is None:
        return single
    spelt = st.characters(exclude_categories=["Cs"]).map(lambda character: [byte_ids[byte] or 0 for byte in character.encode()])
    return st.one_of(single, spelt)


@each_family
@given(data=st.data())
@settings(max_examples=60)
def test_pieces_add_up_to_what_decoding_everything_at_once_adds(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    runs = data.draw(st.lists(units(tokenizer), max_size=30))
    cut = data.draw(st.integers(0, len(runs)))
    prompt, output = ([token_id for run in part for token_id in run] for part in (runs[:cut], runs[cut:]))
    assert "".join(pieces_of(tokenizer, output, prompt)) == added_text(tokenizer, output, prompt)


@each_family
@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TEXTS)).map(" ".join)))
@settings(max_examples=30)
def test_pieces_of_encoded_text_add_up_wherever_it_is_cut(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("family", ["byte_level_bpe", "sentencepiece_bpe"])
@given(text=st.text(alphabet=st.sampled_from("a 🎉👩‍👧é你नम"), max_size=30))
@settings(max_examples=60)
def test_a_character_over_several_tokens_comes_out_whole(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    pieces = pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces).removeprefix(" ") == text.removeprefix(" ")
    assert all("\ufffd" not in piece for piece in pieces)


@given(data=st.binary(max_size=12), token_id=st.integers(1, 190))
def test_byte_tokens_that_spell_no_utf8_keep_the_whole_characters_among_them(data: bytes, token_id: int) -> None:
    tokenizer = FAMILIES["sentencepiece_bpe"]()
    token_ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in data]
    expected = data.decode(errors="replace") + tokenizer.token_text(token_id)
    assert "".join(pieces_of(tokenizer, [*token_ids, token_id], prompt=[100])) == expected


@each_family
def test_added_tokens_are_pieces_of_their_own_and_spaces_are_text(family: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = [tokenizer.token_id(text) for text in ("<think>", "    ", "<|end|>")]
    word = tokenizer.encode("dog", add_special_tokens=False)
    pieces = pieces_of(tokenizer, [*word, *(token_id for token_id in ids if token_id is not None), *word], prompt=word)
    special = [piece for piece in pieces if isinstance(piece, SpecialText)]
    assert [(str(piece), piece.is_hidden) for piece in special] == [("<think>", False), ("<|end|>", True)]


def test_an_incomplete_character_is_replaced_before_an_added_token_and_at_the_end() -> None:
    tokenizer = FAMILIES["byte_level_bpe"]()
    party = tokenizer.encode("🎉", add_special_tokens=False)
    half, end = [tokenizer.token_id("ð") or 0], tokenizer.token_id("<|end|>") or 0
    assert pieces_of(tokenizer, half) == ["\ufffd"]
    assert pieces_of(tokenizer, [*half, end]) == ["\ufffd", "<|end|>"]
    assert "".join(pieces_of(tokenizer, [*half, *party])) == "\ufffd🎉"


class CountingTable(TokenTable):
    """Counts what the tokenizer's own decoder is given."""

    num_calls = 0
    longest = 0

    def decode(self, tokens: list[str]) -> str:
        self.num_calls += 1
        self.longest = max(self.longest, len(tokens))
        return super().decode(tokens)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_token_costs_the_same_however_long_the_answer_is(maker: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.text.tokenizer.TokenTable", CountingTable)
    tokenizer = maker()
    table = tokenizer.table
    assert isinstance(table, CountingTable)
    token_ids = tokenizer.encode(" ".join(TEXTS * 40), add_special_tokens=False)
    table.num_calls = 0
    pieces_of(tokenizer, token_ids)
    if table.kind is DecoderKind.OPAQUE:
        assert table.longest <= 10
        assert table.num_calls <= 2 * len(token_ids)
    else:
        assert table.longest <= 2
        assert table.num_calls <= len(set(token_ids)) + 1


@given(text=st.text(max_size=60), data=st.data())
@settings(max_examples=100)
def test_the_default_model_reads_back_as_its_own_decoder_has_it(default_model_dir: Path, text: str, data: st.DataObject) -> None:
    tokenizer = load(default_model_dir)
    token_ids = tokenizer.encode(text, add_special_tokens=False) + data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=20))
    cut = data.draw(st.integers(0, len(token_ids)))
    assert "".join(pieces_of(tokenizer, token_ids[cut:], token_ids[:cut])) == added_text(tokenizer, token_ids[cut:], token_ids[:cut])
