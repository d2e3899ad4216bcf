import functools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.text.tokenizer import AddedTokenInfo, Tokenizer

TEXT = "To be, or not to be: that is the question. Größe 你好 🎉\n\nWhether 'tis nobler in the mind to suffer"


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\n\n\n", normalized=False)])
    return backend


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {}, {})


def word_pieces() -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(["[UNK]", "play", "##ing", "▁x", ".", ""])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


def byte_fallback() -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(["<unk>", "▁", "▁be", "be", *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ 1 }}"})
    return tmp_path


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_default_model_loads_whole(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.added_tokens[2] == AddedTokenInfo("<|im_end|>", is_special=True)
    assert 2 in tokenizer.eos_token_ids
    assert "<|im_start|>" in (tokenizer.chat_template or "")
    token_ids = tokenizer.encode("<|im_start|>user\nHi 🎉<|im_end|>", add_special_tokens=False)
    assert (token_ids[0], token_ids[-1]) == (1, 2)
    assert tokenizer.decode(token_ids) == "user\nHi 🎉"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>user\nHi 🎉<|im_end|>"


@given(text=st.text(max_size=50))
@settings(max_examples=60)
def test_bytes_of_the_tokens_of_a_text_are_its_bytes(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) or b"?" for token_id in token_ids) == text.encode()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (word_pieces(), {"play": b" play", "##ing": b"ing", ".": b"."}),
        (byte_fallback(), {"▁be": b" be", "be": b"be", "<0xE4>": b"\xe4", "<0x0A>": b"\n", "▁": b" "}),
        (byte_level(), {"Ġ": b" ", "Ċ": b"\n", "ð": b"\xf0", "be": b"be", "\n\n\n": b"\n\n\n", "<think>": None, "</s>": None}),
    ],
    ids=["word pieces", "byte fallback", "byte level"],
)
def test_a_token_is_bytes_as_in_the_middle_of_a_text(backend: Backend, expected: dict[str, bytes | None]) -> None:
    tokenizer = Tokenizer(backend, {}, {})
    assert {token: tokenizer.token_bytes(tokenizer.token_id(token) or 0) for token in expected} == expected


def test_a_token_shows_its_own_text() -> None:
    tokenizer = Tokenizer(byte_level(), {}, {})
    texts = {token: tokenizer.token_text(tokenizer.token_id(token) or 0) for token in ("ð", "Ġ", "<think>", "</s>")}
    assert texts == {"ð": "\ufffd", "Ġ": " ", "<think>": "<think>", "</s>": "</s>"}
    assert tokenizer.token_text(10**6) == ""


def test_the_vocabulary_tells_text_from_added_tokens() -> None:
    tokenizer = Tokenizer(byte_level(), {}, {})
    vocabulary = tokenizer.vocabulary(512, [3])
    assert (vocabulary.size, vocabulary.stop_token_ids) == (512, frozenset([3]))
    assert len(vocabulary.token_bytes) == tokenizer.vocab_size
    without_text = {token_id for token_id, data in enumerate(vocabulary.token_bytes) if data is None}
    assert without_text == set(tokenizer.added_tokens) == {tokenizer.token_id(text) for text in ("<s>", "</s>", "<think>")}


@pytest.mark.parametrize("text", ["0", "42", "word", "÷", "\n\n", "  "])
def test_an_added_token_that_marks_nothing_is_text(text: str) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(text, normalized=False)])
    tokenizer = Tokenizer(backend, {}, {})
    token_id = tokenizer.token_id(text) or 0
    assert token_id not in tokenizer.added_tokens
    assert tokenizer.vocabulary(512, []).token_bytes[token_id] is not None


def test_no_token_of_the_vocabulary_is_empty() -> None:
    assert b"" not in Tokenizer(word_pieces(), {}, {}).vocabulary(6, []).token_bytes


def test_a_fingerprint_stands_for_the_tokens_and_the_size() -> None:
    backend = byte_level()
    first, same = (Tokenizer(backend, {}, {}).vocabulary(512, [3, 4]) for _ in range(2))
    backend.add_tokens(["another"])
    others = [
        Tokenizer(backend, {}, {}).vocabulary(512, [3, 4]),
        Tokenizer(byte_level(), {}, {}).vocabulary(513, [3, 4]),
        Tokenizer(byte_level(), {}, {}).vocabulary(512, [3]),
        Tokenizer(word_pieces(), {}, {}).vocabulary(512, [3, 4]),
    ]
    assert first.fingerprint == same.fingerprint
    assert len({vocabulary.fingerprint for vocabulary in [first, *others]}) == 5


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    for text in (TEXT, "a"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_special_tokens_come_from_the_config(model_dir: Path) -> None:
    write(model_dir / "special_tokens_map.json", {"bos_token": "</s>", "unk_token": {"content": "!"}})
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "!"}
    assert tokenizer.eos_token_ids == {tokenizer.token_id("</s>")}
    assert tokenizer.added_tokens[tokenizer.token_id("!") or 0].is_special


def test_tokens_that_only_the_config_lists_are_added_where_their_ids_fit(model_dir: Path) -> None:
    size = Tokenizer.load(model_dir).vocab_size
    listed = {
        str(size): {"content": "<tool_call>", "special": False},
        str(size + 1): {"content": "<|x|>", "special": True},
        str(size + 9): {"content": "<|far|>", "special": True},
    }
    write(model_dir / "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.added_tokens[size] == AddedTokenInfo("<tool_call>", is_special=False)
    assert tokenizer.added_tokens[size + 1] == AddedTokenInfo("<|x|>", is_special=True)
    assert tokenizer.encode("<tool_call>", add_special_tokens=False) == [size]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {9}),
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 4}}, {5, 6, 9}),
        ({"config.json": {"eos_token_id": 4}}, {4, 9}),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, {4, 9}),
    ],
)
def test_every_end_of_sequence_id_is_known(model_dir: Path, files: dict[str, dict[str, Any]], expected: set[int]) -> None:
    eos_token = Backend.from_file(str(model_dir / "tokenizer.json")).id_to_token(9)
    write(model_dir / "tokenizer_config.json", {"eos_token": eos_token})
    for name, content in files.items():
        write(model_dir / name, content)
    assert Tokenizer.load(model_dir).eos_token_ids == expected


def test_a_template_file_wins_over_the_config(model_dir: Path) -> None:
    assert Tokenizer.load(model_dir).chat_template == "{{ 1 }}"
    (model_dir / "chat_template.jinja").write_text("{{ 2 }}", encoding="utf-8")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 3 }}", encoding="utf-8")
    assert Tokenizer.load(model_dir).chat_templates == {"default": "{{ 2 }}", "tool_use": "{{ 3 }}"}


def test_named_templates_are_kept_and_the_default_may_be_missing(model_dir: Path) -> None:
    write(model_dir / "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "{{ 4 }}"}]})
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.chat_template is None
    assert tokenizer.chat_templates == {"rag": "{{ 4 }}"}


def test_a_lone_surrogate_is_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tokenizer(byte_level(), {}, {}).encode("a\ud800b", add_special_tokens=False)


def test_many_threads_may_encode_at_once() -> None:
    tokenizer = Tokenizer(byte_level(), {}, {})
    texts = [TEXT * (1 + n % 7) for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts))
    assert found == [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_a_directory_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    backend = byte_level()
    backend.model.save(str(tmp_path))
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"})
    write(tmp_path / "config.json", {"model_type": "gpt2"})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == Tokenizer(backend, {}, {}).encode(TEXT, add_special_tokens=False)


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": {"version": "1.0"}}], ids=["nothing", "no model in it"])
def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_file_is_named(model_dir: Path, content: str) -> None:
    (model_dir / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json"):
        Tokenizer.load(model_dir)


def test_what_the_config_says_of_reading_answers_is_kept() -> None:
    template = {"start_anchor": "a", "fields": {"content": {}}}
    assert Tokenizer(byte_level(), {"response_template": template}, {}).response_template == template
    assert Tokenizer(byte_level(), {}, {}).response_template is None


@given(st.text("ab é\n", max_size=300), st.integers(3, 12), st.booleans())
def test_cutting_a_text_before_it_is_tokenized_changes_nothing(text: str, max_tokens: int, is_pair: bool) -> None:
    tokenizer = byte_level_tokenizer()
    pair = text[::-1] if is_pair else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.text.tokenizer.CHARS_PER_TOKEN", 10**9)
        expected = tokenizer.encode_pair(text, pair, max_tokens=max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.text.tokenizer.CHARS_PER_TOKEN", 1)
        patch.setattr("penstock.engine.text.tokenizer._CUT_MARGIN", 4)
        assert tokenizer.encode_pair(text, pair, max_tokens=max_tokens) == expected
