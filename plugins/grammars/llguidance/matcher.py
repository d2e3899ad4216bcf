"""A grammar compiled by llguidance, one sequence's place in it, the limits of both, and what the library's error messages mean."""

import copy
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from string import ascii_letters, digits
from typing import TYPE_CHECKING

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher, Vocabulary
from penstock.engine.errors import UnsupportedGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from torch import Tensor

# Each takes four items in a row of the parser; the time to compile grows with their square.
MAX_OPTIONAL_PROPERTIES = 1500
MAX_ITEMS_IN_ROW = 2000  # of other grammars, which may begin a row with every character: 4 ms each

# Of the CPU, for what is done on the event loop. In an ambiguous grammar it grows with the third power of the text.
MAX_STEP_SECONDS = 0.01
TOO_SLOW = "a step of this grammar takes too long"
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_JSON_SCHEMA = "failed to compile JSON schema: "
_UNIMPLEMENTED = "Unimplemented keys: "
_LIMITS = ("fuel", "too large", "too complex", "too many", "limit", "stack level")
MAX_LENGTH = 200
MAX_FORCED_TOKENS = 64
UNSEEN = "the grammar forbids a token that was taken while its lexer was renewed"


def parser_limits(*, is_schema: bool = False) -> "LLParserLimits":
    """Errors do not quote the grammar, which is the client's. Rows of a schema are long, but there are few of them."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4 * MAX_OPTIONAL_PROPERTIES + 1000 if is_schema else MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000 if is_schema else 50_000,
        max_lexer_states=25_000,  # of 1 to 2 kB, shared by all answers with one grammar; the collection's schemas need a tenth
        max_grammar_size=500_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class Complaint:
    """`line` and `column` count from 1; None where the message names no place."""

    message: str
    line: int | None = None
    column: int | None = None

    @property
    def is_about_size(self) -> bool:
        return any(word in self.message.lower() for word in _LIMITS)


def read_complaint(text: str) -> Complaint:
    """Takes the place off the front, and the quoted grammar and the state off the end."""
    place = _PLACE.match(text)
    message = (text[place.end() :] if place else text).removeprefix(_JSON_SCHEMA)
    # A regex is quoted first, then what is wrong with it.
    _, _, reason = message.partition("\nerror: ")
    message = (f"regex: {reason}" if reason else message).partition("\n")[0].partition("; following special tokens")[0]
    if "panic" in message.lower():
        message = "llguidance failed on it"
    elif message.startswith(_UNIMPLEMENTED):
        keyword = message.split('"')[1]
        message = f"`{keyword}` is not supported"
    elif message.startswith("NoExtension"):
        message = "no text satisfies it, or none that this model's tokens can spell"
    elif "Regex is empty" in message:  # and what is quoted of it is the client's
        message = "no string has its pattern, format and lengths together"
    elif message.startswith("oneOf constraints"):
        message = "its alternatives may share values, which is not supported"
    message = message.partition(": json-schema:")[0].strip()
    return Complaint(message[:MAX_LENGTH], *(map(int, place.groups()) if place else ()))


class MatcherFailed(UnsupportedGrammar):
    """The grammar cannot go on: no token is left, or a step would cost too much. The message says which."""


@dataclass(slots=True)
class _Lexer:
    """What is known of the lexer that a start and its copies share. Once spent it fails them all, and not always with an error."""

    is_spent: bool = False


class LlguidanceGrammar(CompiledGrammar):
    """A matcher at the start, which is copied for each sequence and never advanced. `make_start` makes another.

    Copies share the lexer and what it has worked out. Once it has failed one sequence it fails them all, so the next ones get a new one.
    `num_bytes` is an estimate; `tokens` spells forced text, and is None where the tokenizer's own spelling of it is not known.
    """

    def __init__(
        self,
        start: "LLMatcher",
        make_start: Callable[[], "LLMatcher"],
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        tokens: "Tokens | None",
        num_bytes: int,
        warnings: tuple[str, ...] = (),
        schema: str | None = None,
        has_quick_masks: bool = False,
    ) -> None:
        self._start = start
        self._make_start = make_start
        self._lexer = _Lexer()
        self._renewing = threading.Lock()
        self.has_quick_masks = has_quick_masks
        self.vocab_size = vocab_size
        self.tokens = tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.stop_bits = sum(1 << token_id for token_id in self.stop_token_ids)
        self.num_bytes = num_bytes
        self.warnings = warnings
        self.schema = schema

    def matcher(self) -> "LlguidanceMatcher":
        """Compiles nothing: where the lexer is spent, the matcher gets one of the next when its first mask is asked for."""
        return LlguidanceMatcher(self, self._start, self._lexer)

    def renewed(self) -> "tuple[LLMatcher, _Lexer]":
        """The start, with a lexer that is not spent. May compile."""
        with self._renewing:
            if self._lexer.is_spent:
                self._start, self._lexer = self.new_start(), _Lexer()
            return self._start, self._lexer

    def new_start(self) -> "LLMatcher":
        """With a lexer that no other shares."""
        return self._make_start()


class LlguidanceMatcher(GrammarMatcher):
    """One sequence's place. Every method may raise `MatcherFailed`; the matcher is of no use after that, unless tokens are rolled back.

    Stop tokens never reach the engine: its parser takes one for the end only where the answer may end, and some copies of it uncounted.
    The lexer's limits count what all sequences have had it work out, so the first failure is answered with a lexer of the sequence's own.
    That takes a compilation, which only what runs beside the event loop does: until then tokens are taken unseen, and looked at after it.
    Where tokens are rolled back that may have spoiled that one, there is another, once.
    No limit of the engine counts the work of taking a token, so its time is taken, unless the grammar is known to be quick: reading the
    processor's time takes as long as the token. The first token that takes too long is tried a second time. After a slow mask, `finished`
    says no more than what is known without the next one, which would not be computed on the event loop.
    """

    def __init__(self, grammar: LlguidanceGrammar, start: "LLMatcher", lexer: _Lexer) -> None:
        self._grammar = grammar
        self._lexer = lexer
        self._start = start
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []
        # llguidance keeps its last mask, and gives it again where the lexer's state and the number of rows are the same: a mistake where
        # tokens have been rolled back and others taken.
        self._num_masked = 0  # tokens before the last mask
        self._undone: list[int] = []  # of these, those that have been rolled back, while what is taken is the same again
        self._diverged: int | None = None  # where another token was taken
        self._is_late = lexer.is_spent  # by others, before this one began
        self._is_alone = False
        self._is_forgiven = False
        self._is_ended = False
        self._is_slow = False
        self._was_slow = False  # at a token
        self._may_end = False  # as the last mask said, where nothing has been taken since

    @property
    def is_quick(self) -> bool:
        """Whether the next mask can be had without compiling."""
        return not self._is_spoiled

    def fill_bitmask(self, row: "Tensor") -> None:
        if self._is_ended:
            row.zero_()
            return
        self._catch_up()
        if self._grammar.has_quick_masks:
            self._fill(row)
        else:
            began_at = time.thread_time()
            self._fill(row)
            self._is_slow = time.thread_time() - began_at > MAX_STEP_SECONDS
        self._may_end = self._matcher.is_accepting()

    def _fill(self, row: "Tensor") -> None:
        forced = self._forced_token()
        if forced is not None:
            row.zero_()
            word, bit = divmod(forced, 32)
            row[word] = 1 << bit if bit < 31 else -(1 << bit)
            return
        self._forget_mask()
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._is_spoiled:
            self._catch_up()
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
            self._mark_mask(len(self._token_ids))
            self._check()

    def _forget_mask(self) -> None:
        """Has llguidance replace the mask that it keeps, if that is of another path: by one of a place that both have in common."""
        if self._diverged is not None:
            place = self._diverged
            self._matcher.rollback(len(self._token_ids) - place)
            # A mask of a place where bytes are forced is not kept.
            while (is_forced := bool(self._matcher.compute_ff_bytes())) and place:
                place -= 1
                self._matcher.rollback(1)
            if is_forced:
                self._matcher = self._start.deep_copy()
            else:
                self._matcher.compute_bitmask()
            if self._matcher.try_consume_tokens(self._token_ids[place:]) < len(self._token_ids) - place:
                self._lexer.is_spent = True
                self._catch_up()
        self._mark_mask(len(self._token_ids))

    def _mark_mask(self, num_tokens: int) -> None:
        self._num_masked, self._undone, self._diverged = num_tokens, [], None

    def advance(self, token_id: int) -> bool:
        """A token that spells what the grammar allows in another way than the tokenizer would is taken, though no mask may show it."""
        if self._is_ended or token_id >= self._grammar.vocab_size:
            return False
        if token_id in self._grammar.stop_token_ids:
            self._is_ended = self._may_end if self._is_spoiled else self._matcher.is_accepting()
            return self._is_ended
        if self._grammar.has_quick_masks:
            is_taken = self._lexer.is_spent or self._matcher.try_consume_tokens([token_id]) == 1 or self._is_spoiled
        else:
            is_taken = self._is_spoiled or self._consume(token_id)
        if is_taken:
            self._may_end = False
            if self._undone and self._undone.pop(0) != token_id:
                self._diverged, self._undone = len(self._token_ids), []
            self._token_ids.append(token_id)
        return is_taken

    def _consume(self, token_id: int) -> bool:
        is_taken, is_too_slow = self._timed(token_id)
        if is_too_slow and not self._was_slow:
            # Once by chance: what a hypervisor or an interrupt takes counts as this thread's time. What takes long of itself does so again.
            self._was_slow = True
            is_taken, is_too_slow = self._timed(token_id)
        if is_too_slow:
            raise MatcherFailed(TOO_SLOW)
        return is_taken or self._is_spoiled

    def _timed(self, token_id: int) -> tuple[bool, bool]:
        """Whether the token is taken, and whether that took too long: then it is not taken after all."""
        began_at = time.thread_time()
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        is_too_slow = time.thread_time() - began_at > MAX_STEP_SECONDS
        if is_too_slow and is_taken and not self._is_spoiled:
            self._matcher.rollback(1)
        return is_taken, is_too_slow

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._may_end = False
            if not self._is_spoiled:
                self._matcher.rollback(num_tokens)
            elif self._is_alone and not self._is_forgiven:
                self._is_alone, self._is_forgiven = False, True
            first = len(self._token_ids) - num_tokens
            if self._diverged is not None:
                self._diverged = min(self._diverged, first)
            elif first < self._num_masked:
                self._undone = self._token_ids[first : self._num_masked] + self._undone
            del self._token_ids[first:]

    def fork(self) -> "LlguidanceMatcher":
        """The lexer is still the same one."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._token_ids = list(self._token_ids)
        other._undone = list(self._undone)
        return other

    def forced_tokens(self) -> list[int]:
        """At most `MAX_FORCED_TOKENS`."""
        if self._grammar.tokens is None or self._is_ended:
            return []
        self._catch_up()
        forced = self._forced_tokens()
        if self._is_spoiled:
            self._catch_up()
            forced = self._forced_tokens()
            self._check()
        return forced

    def _forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while len(forced) < MAX_FORCED_TOKENS:
            # One at a time: how the rest is spelled may depend on what is there already.
            token_id = self._forced_token()
            if token_id is None:
                break
            if not self._matcher.consume_token(token_id):
                return []
            forced.append(token_id)
        if forced:
            self._matcher.rollback(len(forced))
        return forced

    def _forced_token(self) -> int | None:
        # llguidance's own forcing is off: it also forces a text's last tokens, which depend on the text after them.
        if self._grammar.tokens is None:
            return None
        data = self._matcher.compute_ff_bytes()
        return self._grammar.tokens.beginning(data) if data else None

    @property
    def has_choice(self) -> bool:
        matcher = self._matcher
        # Where the answer may end, only a mask tells whether it must.
        if self._is_ended or matcher.is_stopped() or matcher.is_accepting():
            return False
        forces = self._grammar.tokens is not None and matcher.compute_ff_bytes()
        return not forces and not self._is_spoiled

    @property
    def finished(self) -> bool:
        if self._is_ended or self._is_spoiled:
            return self._is_ended
        if self._matcher.is_stopped():
            return True
        if self._is_slow or not self._matcher.is_accepting():
            return False
        self._forget_mask()
        mask = self._matcher.compute_bitmask()
        return not self._is_spoiled and not int.from_bytes(mask, "little") & ~self._grammar.stop_bits

    @property
    def _is_spoiled(self) -> bool:
        return self._lexer.is_spent or self._matcher.is_error()

    def _catch_up(self) -> None:
        """Compiles where the lexer is spent, once on this sequence's own account, and takes the same tokens again."""
        if not self._is_spoiled:
            return
        self._lexer.is_spent = True
        message = self._matcher.get_error().partition("\n")[0]
        if self._is_late:
            self._is_late = False
            start, lexer = self._grammar.renewed()
        elif self._is_alone:
            raise MatcherFailed(message)
        else:
            self._is_alone = True
            start, lexer = self._grammar.new_start(), _Lexer()
        matcher = start.deep_copy()
        if matcher.is_error() or matcher.try_consume_tokens(self._token_ids) < len(self._token_ids):
            raise MatcherFailed(message or UNSEEN)
        self._start, self._matcher, self._lexer = start, matcher, lexer
        self._mark_mask(0)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._lexer.is_spent = True
            raise MatcherFailed(self._matcher.get_error().partition("\n")[0])


# Never part of UTF-8: llguidance marks special tokens with it, and takes a token that begins with it for one.
_SPECIAL_MARKER = b"\xff"

# What a text may follow, for tokenizers that put a space before whatever they encode.
_ANCHORS = ("", "\n", ",")

MAX_CACHED_TEXTS = 4096
# Of a longer text the beginning is spelled: a grammar may force 200,000 characters, and asks anew after each token.
MAX_SPELLED = 256
# Of forced text, only the first token counts, which does not depend on what comes after so many characters.
MAX_LOOKED_AT = 64
# What may follow a shorter one: the tokens of its end depend on that, and not only the last ('"}}' is '"' and '}}' to SmolLM2's tokenizer,
# '"}},' is '"}' and '},').
_CONTINUATIONS = (*ascii_letters, *digits, *"}],\"': \n\\é.-_/<>()[{=", "}}", "},", "]}", "],", '"}', '",', '":', '"]', "}\n", ' "', "\n ")
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


def make_tokenizer(vocabulary: Vocabulary) -> "LLTokenizer":
    """As wide as the logits. In a Lark grammar a special token is `<[id]>`; every stop token is special. Takes about 2 us a token."""
    from llguidance import LLTokenizer

    stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
    assert stop_token_ids, "a backend without stop tokens has nothing to compile"
    return LLTokenizer(Tokens(vocabulary, stop_token_ids[0]), eos_token=stop_token_ids)  # type: ignore[arg-type]


def forcing_tokens(vocabulary: Vocabulary) -> "Tokens | None":
    """None where the vocabulary does not tell which of a text's tokenizations is the canonical one."""
    tokens = Tokens(vocabulary, 0)
    return tokens if all(tokens.canonical(probe) is not None for probe in ('{"name": "', "a", " 12")) else None


class Tokens:
    """What `LLTokenizer` asks of a tokenizer: attributes named as it reads them, and a call that spells a text. It must never raise."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self._vocabulary = vocabulary
        self._names = {token_id: text for text, token_id in vocabulary.added_token_ids.items()}
        self.eos_token_id = eos_token_id
        self.tokens = [b"" if token is None or _SPECIAL_MARKER in token else token for token in vocabulary.token_bytes[: vocabulary.size]]
        self.tokens += [b""] * (vocabulary.size - len(self.tokens))
        for token_id in {*self._names, *vocabulary.stop_token_ids}:
            if token_id < vocabulary.size:
                self.tokens[token_id] = _SPECIAL_MARKER + self._names.get(token_id, f"<{token_id}>").encode("utf-8", "replace")
        self.special_token_ids = [token_id for token_id, token in enumerate(self.tokens) if token.startswith(_SPECIAL_MARKER)]
        self._spelled = lru_cache(MAX_CACHED_TEXTS)(self._spell)
        self.beginning = lru_cache(MAX_CACHED_TEXTS)(self._begin)
        self._stays = lru_cache(MAX_CACHED_TEXTS)(self._begins_all)

    def __call__(self, text: str) -> list[int]:
        return list(self._spelled(text[:MAX_SPELLED]))

    def canonical(self, text: str) -> tuple[int, ...] | None:
        """The tokenizer's own spelling of a text; None where that has added tokens, or other bytes."""
        encode = self._vocabulary.encode
        if encode is None:
            return None
        for anchor in _ANCHORS:
            spelled = self._tail(encode(anchor + text), text.encode())
            if spelled is not None:
                return spelled
        return None

    def _begin(self, data: bytes) -> int | None:
        """The token with which forced text is begun, whatever follows it, also what the grammar does not allow, or None."""
        if special := _SPECIAL.match(data):
            return int(special[1])
        text = data.partition(_SPECIAL_MARKER)[0].decode(errors="surrogateescape")
        text = text[: next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), MAX_LOOKED_AT + 1)]
        token_ids = self._spell(text[:MAX_LOOKED_AT])
        if not token_ids:
            return None
        if len(text) > MAX_LOOKED_AT:
            return token_ids[0]
        # A token that stays whatever follows keeps those before it: in byte pair encoding, whether a text is spelled so is a matter of each
        # pair of neighbors alone. Ends are few, such as '":' of all keys.
        ends = (self._spelled_by(token_ids[place:]) for place in range(len(token_ids) - 1, 0, -1))
        return token_ids[0] if any(end and self._stays(end) for end in ends) or self._stays(text) else None

    def _begins_all(self, text: str) -> bool:
        """Whether the first token of this text is the same whatever follows it."""
        first = self._spell(text)[:1]
        return bool(first) and all(self._spell(text + more)[:1] == first for more in _CONTINUATIONS)

    def _spelled_by(self, token_ids: tuple[int, ...]) -> str:
        """The text of these tokens; empty where they are no text, or spelled otherwise alone."""
        text = b"".join(map(self._text, token_ids)).decode(errors="replace")
        return text if self._spell(text) == token_ids else ""

    def _spell(self, text: str) -> tuple[int, ...]:
        return self.canonical(text) or self._greedy(text.encode())

    def _tail(self, token_ids: list[int], data: bytes) -> tuple[int, ...] | None:
        """The last tokens, as many as spell `data`."""
        end = len(data)
        for place in range(len(token_ids) - 1, -1, -1):
            if end == 0:
                return tuple(token_ids[place + 1 :])
            token = self._text(token_ids[place])
            if not token or not data.endswith(token, 0, end):
                return None
            end -= len(token)
        return tuple(token_ids) if end == 0 else None

    def _greedy(self, data: bytes) -> tuple[int, ...]:
        """The longest token each time; what no token spells is left out."""
        ids, longest = self._ids
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            lengths = range(min(longest, len(data) - start), 0, -1)
            found = next((length for length in lengths if data[start : start + length] in ids), None)
            if found is not None:
                token_ids.append(ids[data[start : start + found]])
            start += found or 1
        return tuple(token_ids)

    @cached_property
    def _ids(self) -> tuple[dict[bytes, int], int]:
        ids = {self._text(token_id): token_id for token_id in reversed(range(len(self.tokens)))}
        ids.pop(b"", None)
        return ids, max(map(len, ids), default=0)

    def _text(self, token_id: int) -> bytes:
        """Empty for a token that is not text."""
        token = self.tokens[token_id] if token_id < len(self.tokens) else b""
        return b"" if token.startswith(_SPECIAL_MARKER) else token
