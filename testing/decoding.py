"""For plug-ins of decoding: the check of logits processors, and walks through grammars, a token at a time, over a small vocabulary."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.engine.contracts.grammar import GrammarMatcher, Vocabulary
from penstock.engine.contracts.hooks import RegisteredLogitsProcessor
from penstock.engine.contracts.logits_processor import LogitsRow, SequenceProcessor, as_processor, choose
from penstock.engine.contracts.parsing import SpecialText
from penstock.plugins.markers import join_pieces, split_symbols

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 4000
_CLOSERS = b'"}])'


def byte_vocabulary(added_tokens: Iterable[str] = (), texts: Iterable[str] = ()) -> Vocabulary:
    """A token for every byte, one for each of `texts`, the added tokens, and one stop token after them all."""
    texts = list(dict.fromkeys(text for text in texts if text))
    added = list(dict.fromkeys(added_tokens))
    token_bytes = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in texts), *[None] * (len(added) + 1)]
    first_added = 256 + len(texts)
    stop_token_id = first_added + len(added)
    return Vocabulary(
        tuple(token_bytes),
        stop_token_id + 1,
        frozenset({stop_token_id}),
        repr((texts, added)),
        {text: first_added + place for place, text in enumerate(added)},
    )


def allowed_tokens(matcher: GrammarMatcher, vocabulary: Vocabulary) -> list[int]:
    """The ids whose bits a matcher sets."""
    import torch

    row = torch.zeros((vocabulary.size + 31) // 32, dtype=torch.int32)
    matcher.fill_bitmask(row)
    return [word * 32 + bit for word, packed in enumerate(row.tolist()) if packed for bit in range(32) if packed >> bit & 1]


def random_answer(matcher: GrammarMatcher, vocabulary: Vocabulary, rng: random.Random, patience: int = 40) -> list[str]:
    """A random walk to an end, as the pieces in which it would reach a parser.

    After `patience` tokens it prefers tokens that close something: brackets, quotes, and all tokens of more than a byte. Raises
    `AssertionError` at a dead end, if the mask and `advance` disagree, and if the walk does not end.
    """
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        choices = allowed_tokens(matcher, vocabulary)
        assert choices, f"nothing is allowed after {pieces_of(token_ids, vocabulary)}"
        stops = [token_id for token_id in choices if token_id in vocabulary.stop_token_ids]
        if stops and (len(choices) == len(stops) or rng.random() < 0.5):
            assert matcher.advance(stops[0]), f"the stop token is allowed, but not taken, after {pieces_of(token_ids, vocabulary)}"
            return pieces_of(token_ids, vocabulary)
        choices = [token_id for token_id in choices if token_id not in vocabulary.stop_token_ids]
        if len(token_ids) > patience:
            markers = [token_id for token_id in choices if token_id > 255]
            closers = [token_id for token_id in _CLOSERS if token_id in choices]
            choices = markers if markers and rng.random() < 0.5 else closers or choices
        token_ids.append(rng.choice(choices))
        assert matcher.advance(token_ids[-1]), f"the last token is allowed, but not taken, in {pieces_of(token_ids, vocabulary)}"
    raise AssertionError(f"no end in sight: {''.join(pieces_of(token_ids, vocabulary))[:200]}")


def accepts(matcher: GrammarMatcher, vocabulary: Vocabulary, pieces: Sequence[str]) -> bool:
    """Whether a grammar allows these pieces and then an end. The mask and `advance` must agree at every token."""
    for token_id in tokens_of(pieces, vocabulary):
        is_allowed = token_id in allowed_tokens(matcher, vocabulary)
        assert matcher.advance(token_id) == is_allowed, f"the mask and `advance` disagree about token {token_id} in {list(pieces)}"
        if not is_allowed:
            return False
    return not vocabulary.stop_token_ids.isdisjoint(allowed_tokens(matcher, vocabulary))


def split_pieces(text: str, vocabulary: Vocabulary) -> list[str]:
    """A text as a model would write it, with every marker in it intended as one."""
    return join_pieces(split_symbols(text, frozenset(vocabulary.added_token_ids)))


def tokens_of(pieces: Iterable[str], vocabulary: Vocabulary) -> Iterator[int]:
    """Text byte by byte, and each `SpecialText` as its token."""
    for piece in pieces:
        if isinstance(piece, SpecialText):
            yield vocabulary.added_token_ids[piece]
        else:
            yield from piece.encode()


def pieces_of(token_ids: Iterable[int], vocabulary: Vocabulary) -> list[str]:
    """Text between added tokens, and each of those by itself."""
    names = {token_id: text for text, token_id in vocabulary.added_token_ids.items()}
    pieces: list[str] = []
    text = b""
    for token_id in token_ids:
        if token_id in names:
            pieces += [*([text.decode(errors="replace")] if text else []), SpecialText(names[token_id])]
            text = b""
        else:
            text += vocabulary.token_bytes[token_id] or b""
    return [*pieces, text.decode(errors="replace")] if text else pieces


def check_logits_processor(
    registered: RegisteredLogitsProcessor,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocab_size: int = 64,
    num_sequences: int = 4,
    num_steps: int = 12,
    seed: int = 0,
) -> None:
    """Raises `AssertionError` if a logits processor breaks a promise.

    It must raise nothing, leave a token to choose and no NaN, not change the token ids, and treat a row the same regardless of other
    rows. Raises `TypeError` or `ValueError` if it rejects the arguments.
    """
    import torch

    chosen = choose(as_processor(registered), arguments or {})
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    histories = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))] for _ in range(num_sequences)]
    together, alone = (
        [chosen.begin(LogitsRow(f"request {row}", token_ids=list(history))) for row, history in enumerate(histories)] for _ in range(2)
    )
    for _ in range(num_steps):
        logits_RV = torch.randn(num_sequences, vocab_size, generator=generator)
        apart_RV = torch.cat([_run(logits_RV[row : row + 1], [processor]) for row, processor in enumerate(alone)])
        joint_RV = _run(logits_RV, together)
        for row, history in enumerate(histories):
            assert not joint_RV[row].isnan().any(), f"after {history} there is NaN among the logits"
            assert (joint_RV[row] > -torch.inf).any(), f"after {history} no token is left to choose from"
            assert torch.equal(joint_RV[row], apart_RV[row]), f"after {history} other rows beside it make a difference"
            assert together[row].row.token_ids == alone[row].row.token_ids == history, "the token ids were changed"
            token_id = rng.choice((joint_RV[row] > -torch.inf).nonzero()[:, 0].tolist())
            for token_ids in (history, together[row].row.token_ids, alone[row].row.token_ids):
                token_ids.append(token_id)


def _run(logits_RV: "Tensor", processors: "list[SequenceProcessor]") -> "Tensor":
    from penstock.engine.sampling.sampler import ProcessorPass

    run = ProcessorPass(logits_RV.clone(), [[processor] for processor in processors])
    run.run()
    assert not run.failures, next(iter(run.failures.values()))
    return run.logits_RV
