"""What the sampler knows of one sequence, from its first token to its last."""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.device import sent
from penstock.engine.logits_processor import ChosenProcessor, LogitsRow
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.penalties import BadWords, Penalties, TokenCounts
from penstock.engine.sampling.state import SeededNumbers

MAX_LOGIT_BIAS = 100.0


class SamplingState:
    """Parameters, penalties' counts and random numbers of one sequence. Nothing in it belongs to the cache: it survives preemption.

    `is_constrained` is set when the grammar's gate opens; from then on `min_tokens` is the grammar's to decide. `block_stop` keeps stop
    ids from being sampled, constrained or not, until the next token is appended. `seed_offset` tells the n sequences of a request apart.
    `processors` are those that the request has chosen. Where `num_candidates` is not 0, the row is not sampled from: beam search
    chooses among that many tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        bad_words_ids: list[list[int]],
        processors: Sequence[ChosenProcessor],
        seed_offset: int,
        device: torch.device | str,
        request_id: str = "",
        client_id: int | str | None = None,
    ) -> None:
        device = torch.device(device)
        self.params = params
        self.is_constrained = False
        self.block_stop = False
        self.num_output_tokens = 0
        self.num_candidates = 0
        self.generator = None if params.seed is None else SeededNumbers(params.seed + seed_offset)
        self.token_ids = list(prompt_token_ids) if processors else []
        row = LogitsRow(request_id, seed_offset, client_id, self.token_ids)
        self.processors = [chosen.begin(row) for chosen in processors]
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._bad_words = BadWords(ids for ids in bad_words_ids if all(token_id < vocab_size for token_id in ids))
        self.penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.counts: TokenCounts | None = None
        if self.penalties != Penalties(1.0, 0.0, 0.0):
            # Placeholders of images and the like stand in the prompt with ids beyond the vocabulary.
            in_vocabulary = (token_id for token_id in prompt_token_ids if 0 <= token_id < vocab_size)
            self.counts = TokenCounts(in_vocabulary if params.repetition_penalty != 1 else (), device)
        self.allowed_ids = _ids_tensor(params.allowed_token_ids, device)
        self.bias_ids = _ids_tensor(params.logit_bias, device)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        self.biases = sent(biases.clamp(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).float(), device)

    @property
    def top_k(self) -> int | None:
        """The `top_k` that takes something away, else None."""
        return self.params.top_k if 0 < self.params.top_k < self._vocab_size else None

    @property
    def takes_first(self) -> bool:
        """Whether nothing is drawn for it."""
        return self.params.is_greedy or self.num_candidates > 0

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives go with the sampled token; None where no log probability is wanted, or nothing is sampled."""
        return None if self.num_candidates else self.params.logprobs

    @property
    def takes_most_probable(self) -> bool:
        """Whether the next token is the one that the model finds most probable, and nothing else is asked."""
        rules = (self.counts, self.allowed_ids, self.bias_ids, self.params.logprobs)
        is_plain = self.params.is_greedy and not self.num_candidates and not self.processors and all(rule is None for rule in rules)
        return is_plain and not self.masked_ids()

    @property
    def is_predictable(self) -> bool:
        """Whether the tokens said so far make no difference to how the next one is chosen, but for their number."""
        return not self.processors and not self.num_candidates and self.counts is None and not self._bad_words

    @property
    def numbers(self) -> SeededNumbers | None:
        """For one draw of the next token. A step that comes to nothing has used up none of them."""
        return None if self.generator is None else self.generator.again()

    def append(self, token_id: int) -> None:
        """A token was added to the output, sampled or forced."""
        self.num_output_tokens += 1
        self.block_stop = False
        self.generator = None if self.generator is None else self.generator.at_next_place()
        self._bad_words.append(token_id)
        if self.counts is not None and token_id < self._vocab_size:
            self.counts.append(token_id)
        if self.processors:
            self.token_ids.append(token_id)

    def fork(self) -> "SamplingState":
        """One that goes on by itself from here. What logits processors remember is copied, as far as `copy.deepcopy` finds it."""
        state = copy.copy(self)
        state._bad_words = self._bad_words.copy()
        state.counts = None if self.counts is None else self.counts.copy()
        state.token_ids = list(self.token_ids)
        state.processors = [processor.fork(state.token_ids) for processor in self.processors]
        return state

    def ahead(self, token_id: int) -> "SamplingState":
        """What it will be once the token has been appended; it stays as it is. Not where there are logits processors: copies cost."""
        assert not self.processors
        state = self.fork()
        state.append(token_id)
        return state

    def ahead_of_any(self) -> "SamplingState":
        """What it will be once another token has been appended, whichever that is."""
        assert self.is_predictable
        state = copy.copy(self)
        state.num_output_tokens += 1
        state.block_stop = False
        state.generator = None if self.generator is None else self.generator.at_next_place()
        return state

    def masked_ids(self) -> list[int]:
        """Tokens that may not come next: the last ones of bad words, and stop ids while they are held off."""
        masked = self._bad_words.completing_ids()
        is_too_short = self.num_output_tokens < self.params.min_tokens and not self.is_constrained
        if self.block_stop or is_too_short:
            masked += self._stop_token_ids
        return masked


def _ids_tensor(token_ids: Iterable[int], device: torch.device) -> Tensor | None:
    ids = list(token_ids)
    return sent(torch.tensor(ids, dtype=torch.int64), device) if ids else None
