"""Text to token ids and back, over one model directory's tokenizer; the bytes that each token adds; and content without special tokens.

Nearly every decoder in use is local: what a token adds depends on that token alone, and on whether it is the first. Such a decoder is asked
once per token and never again. One that looks further (a suffix at a word's end, neighbours that are merged) is called opaque."""

import enum
import functools
import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.engine.contracts.grammar import Vocabulary
from penstock.engine.contracts.parsing import Text
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.text.streaming import REPLACEMENT

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"  # stands for "there was text before": no decoder joins anything to it or takes anything from it
CHARS_PER_TOKEN = 16  # more than prose has, so that the first beginning usually suffices
_CUT_MARGIN = 64


class DecoderKind(enum.Enum):
    """How much of a text one token decides."""

    BYTE_LEVEL = "byte_level"  # every token spells bytes
    LOCAL = "local"  # every token spells text, byte tokens aside
    OPAQUE = "opaque"  # only windows of tokens can be decoded


class TokenTable:
    """The bytes of one tokenizer's tokens, kept once asked for. Tokens are given as their entry in the vocabulary."""

    def __init__(self, backend: Backend) -> None:
        self._decoder = backend.decoder
        steps = list(_decoder_steps(self._decoder))
        self.kind = _kind_of(steps)
        self._has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self._to_bytes = _byte_translation() if self.kind is DecoderKind.BYTE_LEVEL else {}
        self._later: dict[str, bytes] = {}

    @property
    def is_opaque(self) -> bool:
        """Whether only windows of tokens can be decoded."""
        return self.kind is DecoderKind.OPAQUE

    def bytes_of(self, token: str, is_first: bool = False) -> bytes:
        """What `token` adds to the text. `is_first`: no text precedes it; some decoders then drop a leading space."""
        if is_first and self.kind is not DecoderKind.BYTE_LEVEL:
            return self._first_bytes_of(token)
        found = self._later.get(token)
        if found is None:
            found = self._later[token] = self._later_bytes_of(token)
        return found

    def decode(self, tokens: list[str]) -> str:
        """The text of a run of tokens, as the tokenizer itself has it."""
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def _later_bytes_of(self, token: str) -> bytes:
        if self.kind is DecoderKind.BYTE_LEVEL:
            try:
                return token.translate(self._to_bytes).encode("latin-1")
            except UnicodeEncodeError:  # a token with a character outside the map is one that was added as plain text
                return token.encode()
        byte = self._byte_token(token)
        if byte is not None:
            return byte
        return self.decode([_ANCHOR, token]).removeprefix(_ANCHOR).encode()

    def _first_bytes_of(self, token: str) -> bytes:
        byte = self._byte_token(token)
        if byte is not None and not byte.isascii():
            return byte
        return self.decode([token]).encode()

    def _byte_token(self, token: str) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else None


def _decoder_steps(decoder: Any) -> Iterable[dict[str, Any]]:
    """The decoder's components in order, sequences opened. Without a decoder tokens are joined by spaces, which is local."""
    if decoder is None:
        return
    pending = [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step["decoders"]
        else:
            yield step


def _kind_of(steps: list[dict[str, Any]]) -> DecoderKind:
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL
    return DecoderKind.LOCAL if all(_is_local(step) for step in steps) else DecoderKind.OPAQUE


def _is_local(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteFallback" | "Fuse" | "Metaspace" | "WordPiece":
            return True
        case "Replace":
            return len(step["pattern"].get("String", "")) == 1  # longer ones may match across tokens
        case "Strip":
            return bool(step["stop"] == 0)
        case _:
            return False


def byte_of_character() -> dict[str, int]:
    """The printable characters that byte-level BPE (GPT-2's encoder) writes bytes with: its own where it prints, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_translation() -> dict[int, int]:
    """For `str.translate`: to the character whose Latin-1 encoding is the byte, and from all others of Latin-1 to one that it lacks."""
    return {code: ord(REPLACEMENT) for code in range(256)} | {ord(character): byte for character, byte in byte_of_character().items()}


@dataclass(frozen=True, slots=True)
class AddedTokenInfo:
    """A marker that the vocabulary holds as one token. `is_special`: `skip_special_tokens` leaves it out."""

    text: str
    is_special: bool


class WholeTexts(dict[int, Text | None]):
    """By token id: the content that a token makes wherever it comes but at the very beginning, made once for all answers.

    None where that takes a closer look: for added and unknown tokens, parts of characters, tokens without text, and opaque decoders.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Text | None:
        data = None if self._tokenizer.table.is_opaque else self._tokenizer.token_bytes(token_id)
        try:
            text = Text(data.decode()) if data else None
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self._tokenizer.vocab_size:  # a model's logits may be wider; other ids must not pile up
            self[token_id] = text
        return text


class Tokenizer:
    """A model's tokenizer. Immutable once made; every method may be called from any thread.

    `config` is the content of tokenizer_config.json, `chat_templates` the templates by name, `eos_token_ids` every id that ends an answer.
    """

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], chat_templates: Mapping[str, str], eos_token_ids: Iterable[int] = ()
    ) -> None:
        _add_tokens(backend, config)
        # What a tokenizer file says of truncation and padding belongs to training; it would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.table = TokenTable(backend)
        self.whole_texts = WholeTexts(self)
        self.chat_templates = chat_templates
        self.response_template: Mapping[str, Any] | None = config.get("response_template")
        self.special_tokens_map: Mapping[str, str] = dict(_named_tokens(config))
        self.added_tokens: Mapping[int, AddedTokenInfo] = {
            token_id: AddedTokenInfo(token.content, token.special)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special or not _is_plain(self.table.bytes_of(token.content).decode(errors="replace").strip())
        }
        eos_token = self.special_tokens_map.get("eos_token")
        eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.eos_token_ids = frozenset(eos_token_ids) | ({eos_token_id} if eos_token_id is not None else frozenset())

    @classmethod
    def load(cls, directory: str | Path, trust_remote_code: bool = False) -> "Tokenizer":
        """Reads the tokenizer of a model directory.

        tokenizer.json is taken as it is; without one, transformers converts the other files (which takes seconds).
        Raises `ConfigurationError` where there is no tokenizer that can be used.
        """
        directory = Path(directory)
        if (directory / "tokenizer.json").is_file():
            try:
                backend = Backend.from_file(str(directory / "tokenizer.json"))
            except Exception as error:  # the library raises nothing narrower
                raise ConfigurationError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error
        else:
            backend = _convert(directory, trust_remote_code)
        config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
        return cls(backend, config, _read_chat_templates(directory, config), _read_eos_token_ids(directory))

    @property
    def chat_template(self) -> str | None:
        """The default template; None where the model has none."""
        return self.chat_templates.get("default")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def added_texts(self) -> frozenset[str]:
        """The texts of all added tokens."""
        return frozenset(token.text for token in self.added_tokens.values())

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The added tokens that are special."""
        return frozenset(token_id for token_id, token in self.added_tokens.items() if token.is_special)

    def serialized(self) -> str:
        """As the content of a tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; added tokens written out in it become those tokens. Raises `InvalidRequest` for lone surrogates."""
        try:
            # Unlike `encode`, the batched form gives the interpreter lock up, and it skips the offsets, which takes most of the time.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise InvalidRequest("The text holds a lone surrogate and cannot be encoded as UTF-8") from None

    def beginning(self, text: str, num_tokens: int) -> str:
        """A beginning of `text` that holds its first `num_tokens` tokens, found without tokenizing much more; all of it where it is short.

        Beginnings of growing length are tokenized until one has twice as many tokens: the cut changes only tokens close to it.
        """
        size = CHARS_PER_TOKEN * num_tokens
        while size < len(text):
            if len(self.encode(text[:size], add_special_tokens=False)) > 2 * num_tokens + _CUT_MARGIN:
                return text[:size]
            size *= 4
        return text

    def encode_pair(
        self, text: str, pair: str | None = None, *, max_tokens: int | None = None, max_pair_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids and token type ids of a text, or of two as one input, with special tokens as the model was trained with.

        Beyond `max_pair_tokens` the second text is cut at its end. Beyond `max_tokens` the longer of the two is, then both alike; special
        tokens stay. Raises `InvalidRequest` for lone surrogates, and for a `max_tokens` that holds nothing but special tokens.
        """
        texts = [text] if pair is None else [text, pair]
        if max_tokens is not None:
            texts = [self.beginning(part, max_tokens) for part in texts]
        if max_pair_tokens is not None:
            texts[-1] = self.beginning(texts[-1], max_pair_tokens)
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            raise InvalidRequest("The text holds a lone surrogate and cannot be encoded as UTF-8") from None
        if max_pair_tokens is not None:
            encodings[-1].truncate(max_pair_tokens)
        if max_tokens is not None:
            room = max_tokens - self._backend.num_special_tokens_to_add(pair is not None)
            if room < len(texts):
                raise InvalidRequest(f"{max_tokens} tokens hold nothing of the text")
            for encoding, size in zip(encodings, _longest_first([len(encoding) for encoding in encodings], room), strict=True):
                encoding.truncate(size)
        whole = self._backend.post_process(encodings[0], encodings[1] if pair is not None else None, True)
        return whole.ids, whole.type_ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def added_token_texts(self, *, splits_everywhere: bool = False) -> list[str]:
        """The added tokens, the longest first; those only at which every text is split, whatever is around them, if `splits_everywhere`."""
        tokens = self._backend.get_added_tokens_decoder().values()
        texts = [token.content for token in tokens if not splits_everywhere or not (token.normalized or token.single_word or token.lstrip)]
        return sorted(texts, key=len, reverse=True)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling; None where the id is unknown, as in logits wider than the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's own spelling, or of an added token by its text."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token adds to a text that has begun; None for an added or unknown token, which is not text."""
        token = None if token_id in self.added_tokens else self.token(token_id)
        return None if token is None else self.table.bytes_of(token)

    def token_text(self, token_id: int) -> str:
        """A token's own text, for showing; U+FFFD stands for each part of a character. Empty for an unknown id."""
        added = self.added_tokens.get(token_id)
        if added is not None:
            return added.text
        return (self.token_bytes(token_id) or b"").decode(errors="replace")

    def difference(self, other: "Tokenizer") -> str | None:
        """The first token in which the vocabularies differ, in words; None where all token ids mean the same."""
        if self.vocab_size != other.vocab_size:
            return f"it has {other.vocab_size} tokens, and the model {self.vocab_size}"
        for token_id in range(self.vocab_size):
            if self.token(token_id) != other.token(token_id):
                return f"token {token_id} is {other.token(token_id)!r}, and the model's {self.token(token_id)!r}"
        return None

    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary:
        """The tokens as bytes, for grammar backends. Takes time in proportion to the vocabulary: call it off the event loop."""
        token_bytes = tuple(map(self._matchable_bytes, self._tokens()[:logits_width]))
        stop_token_ids = frozenset(stop_token_ids)
        digest = hashlib.sha256(f"{logits_width} {sorted(stop_token_ids)}\n".encode())
        digest.update(array("i", [-1 if data is None else len(data) for data in token_bytes]))
        digest.update(b"".join(data for data in token_bytes if data is not None))
        added_token_ids = {token.text: token_id for token_id, token in self.added_tokens.items() if token_id < logits_width}
        digest.update(repr(sorted(added_token_ids.items())).encode())
        return Vocabulary(token_bytes, logits_width, stop_token_ids, digest.hexdigest(), added_token_ids, self._encode_text)

    def _encode_text(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _tokens(self) -> list[str | None]:
        """The vocabulary's spellings by id, None for added and unknown tokens: asking for them one by one takes several times as long."""
        tokens: list[str | None] = [None] * self.vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            tokens[token_id] = token
        for token_id, added in self._backend.get_added_tokens_decoder().items():
            tokens[token_id] = None if token_id in self.added_tokens else added.content
        return tokens

    def _matchable_bytes(self, token: str | None) -> bytes | None:
        # A token without text could be repeated for ever, and the bytes of some in an opaque decoder cannot be known.
        data = None if token is None else self.table.bytes_of(token)
        if data and self.table.is_opaque and REPLACEMENT.encode() in data:
            return None
        return data or None


def _longest_first(lengths: list[int], room: int) -> list[int]:
    """Lengths that together are no more than `room`, the longest having been cut first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first <= second:
        first = min(first, max(room - second, room // 2))
        return [first, min(second, room - first)]
    second = min(second, max(room - first, room // 2))
    return [min(first, room - second), second]


def _is_plain(text: str) -> bool:
    """White space, a word, a number or a character: some vocabularies add these too (ERNIE its digits), and they are no markers."""
    return not text or text.isalnum() or len(text) == 1


def _convert(directory: Path, trust_remote_code: bool) -> Backend:
    from transformers import AutoTokenizer  # costs seconds, and most models never need it

    try:
        converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigurationError(f"{directory} holds no tokenizer that can be loaded: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ConfigurationError(f"{directory} has a {type(converted).__name__}, which cannot be converted to a tokenizer.json")
    return backend


def _add_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Adds what tokenizer_config.json lists beyond tokenizer.json, where its ids fit, and marks the named tokens as special."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        text = token["content"]
        next_id = backend.get_vocab_size(with_added_tokens=True)
        if text not in known and int(token_id) in (backend.token_to_id(text), next_id):
            flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in token}
            backend.add_tokens([AddedToken(text, **flags)])
            known.add(text)
    backend.add_special_tokens([text for _, text in _named_tokens(config) if text not in known and backend.token_to_id(text) is not None])


def _named_tokens(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """`bos_token`, `eos_token` and the like, with their texts, as templates use them."""
    extra = config.get("extra_special_tokens")
    for name, token in [*config.items(), *(extra.items() if isinstance(extra, dict) else ())]:
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str) and text:
            yield name, text


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The files win over what tokenizer_config.json holds, as in transformers."""
    listed = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template") or []
    templates = {"default": listed} if isinstance(listed, str) else {entry["name"]: entry["template"] for entry in listed}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _read_eos_token_ids(directory: Path) -> list[int]:
    """From generation_config.json, or without one from config.json, which transformers then reads for it."""
    config = _read_json(directory / "generation_config.json") or _read_json(directory / "config.json")
    found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return found if isinstance(found, list) else [found] if found is not None else []


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return content


# Noncharacters: Unicode keeps them free for use inside of programs, and no text that is exchanged holds them.
MARK = "\ufdd0"
OWN = "\ufdd1"


class ContentTokenizer:
    """Immutable once made, which takes a second for a large vocabulary; every method may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {token.text: token_id for token_id, token in tokenizer.added_tokens.items()}
        longest_first = sorted(texts, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._ends = frozenset(text[length:] for text in texts for length in range(1, len(text)))
        self._max_length = max(map(len, texts), default=0)
        self._all_texts = "\n".join(texts)
        self._backend = _renamed(json.loads(tokenizer.serialized()), texts)
        ids = {self._backend.token_to_id(OWN + text): token_id for text, token_id in texts.items()}
        self._original_ids = {renamed: token_id for renamed, token_id in ids.items() if renamed is not None and renamed != token_id}

    def mark(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """The same JSON value with marks in the text of added tokens, but for those `kept`, and at ends that could be a part of one.

        Raises `InvalidRequest` for text that holds what the marks are made of.
        """
        if isinstance(value, str):
            return self._at_ends(self._inside(value, kept))
        if isinstance(value, list):
            return [self.mark(item, kept) for item in value]
        if isinstance(value, Mapping):
            # Templates compare types with words, of which a marker may hold one.
            return {self._inside(name, kept): item if name == "type" else self.mark(item, kept) for name, item in value.items()}
        return value

    def markers_in(self, text: str) -> frozenset[str]:
        """The added tokens whose text it contains."""
        return frozenset(self._markers.findall(text))

    def unmark(self, text: str) -> str:
        return text.replace(MARK, "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered prompt with marks. Raises `InvalidRequest` for lone surrogates."""
        spelled = self.unmark(self._markers.sub(lambda found: OWN + found[0], text))
        try:
            ids: list[int] = self._backend.encode_batch_fast([spelled], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise InvalidRequest("The text holds a lone surrogate and cannot be encoded as UTF-8") from None
        return [self._original_ids.get(token_id, token_id) for token_id in ids] if self._original_ids else ids

    def _inside(self, text: str, kept: frozenset[str]) -> str:
        if MARK in text or OWN in text:
            raise InvalidRequest(f"The text holds a noncharacter, U+{ord(MARK if MARK in text else OWN):04X}, which is reserved")
        return self._markers.sub(partial(_broken, kept), text)

    def _at_ends(self, text: str) -> str:
        lengths = range(1, min(self._max_length, len(text) + 1))
        # A word alone may be what a template compares with its own, such as the name of a tool.
        is_within = bool(text) and not text.isidentifier() and text in self._all_texts
        begins = is_within or any(text[:length] in self._ends for length in lengths)
        ends = any(text[-length:] in self._beginnings for length in lengths)
        return MARK * begins + text + MARK * ends


def _broken(kept: frozenset[str], found: re.Match[str]) -> str:
    text = found[0]
    return text if text in kept else text[0] + MARK + text[1:]


def _renamed(data: dict[str, Any], markers: Mapping[str, int]) -> Backend:
    """The tokenizer in which these added tokens are known by their `OWN` spelling only."""
    model = data["model"]
    vocab = model.get("vocab")
    merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1) for pair in model.get("merges") or ()}
    for token in data["added_tokens"]:
        text = token["content"]
        if text not in markers:
            continue
        token |= {"content": OWN + text, "normalized": False, "single_word": False}
        if isinstance(vocab, dict) and text in vocab and text not in merged:
            vocab[OWN + text] = vocab.pop(text)
            if model.get("unk_token") == text:
                model["unk_token"] = OWN + text
    if isinstance(vocab, list):  # with their scores, or the tokens alone
        model["vocab"] = [[OWN + entry[0], *entry[1:]] if entry[0] in markers else entry for entry in vocab]
    return Backend.from_str(json.dumps(data))
