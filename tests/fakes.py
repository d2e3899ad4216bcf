"""An engine whose model is a function of the tokens before: everything else in it is real."""

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event, Thread
from types import FrameType, SimpleNamespace
from typing import Any, cast

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from penstock.engine.adapters.registry import Adapter
from penstock.engine.batch import Batch, OutputRows, PendingTokens
from penstock.engine.constraints.masks import MaskPool
from penstock.engine.contracts.hooks import ReasoningParserFactory
from penstock.engine.contracts.logits_processor import ChosenProcessor, per_sequence
from penstock.engine.contracts.parsing import Preamble, Reasoning, Text, Turn
from penstock.engine.contracts.proposer import Proposer
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta, TokenLogprobs
from penstock.engine.kv_cache.block_files import BlockFiles, BlockFormat
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager, Retention
from penstock.engine.kv_cache.persistence import Persistence
from penstock.engine.kv_cache.tensors import KVCache, LayerGroup, LayerKV
from penstock.engine.multimodal.inputs import PromptEmbeds, PromptImage
from penstock.engine.parallel.group import ALONE
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.runner import ModelRunner, StepHandle, StepOutput, sample_rows
from penstock.engine.sampling.logprobs import LaunchedPromptLogprobs
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduling.admission import WaitingQueue
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.states import StateScheduler
from penstock.engine.scheduling.step import Speculation
from penstock.engine.sequence import LOGITS
from penstock.engine.speculation.proposers import NgramProposer, Prediction
from penstock.engine.text.answer import Answer, PreambleParams
from penstock.engine.text.tokenizer import Tokenizer

NextToken = Callable[[Sequence[int]], int | Tensor]


@cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, `<|end|>`, and the markers of reasoning."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {})


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
EOS, THINK, END_THINK = range(256, 259)
ADDED = frozenset(info.text for info in TOKENIZER.added_tokens.values())


RowFunction = Callable[[list[int], Tensor], Tensor]  # a logits processor of one sequence


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


LETTERS = ids("abcdefghijklmnop")


def letter_after(token_ids: Sequence[int]) -> int:
    """Some letter; another one if any token before were another."""
    return LETTERS[zlib.crc32(str(token_ids).encode()) % len(LETTERS)]


def letter_like_before(token_ids: Sequence[int]) -> int:
    """Mostly what stood three tokens before, else some letter."""
    repeats = len(token_ids) >= 3 and zlib.crc32(str(token_ids).encode()) % 5
    return token_ids[-3] if repeats else letter_after(token_ids)


def undecided(history: Sequence[int]) -> Tensor:
    """Logits that like several letters, and ends not much less; others if any token before were another."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(list(history)).encode()))
    logits_V = torch.randn(VOCAB_SIZE, generator=generator)
    logits_V[LETTERS] += 5
    logits_V[EOS] += 5
    return logits_V


def saying(text: str, prompt: str = "?") -> NextToken:
    """What follows `prompt` is `text`, then stop ids. Tokens that the engine puts in count as said."""
    said, start = [*ids(text), EOS], len(ids(prompt))
    return lambda token_ids: said[min(len(token_ids) - start, len(said) - 1)]


def block_tables(tables: Sequence[Sequence[int]]) -> Tensor:
    """The block tables of some sequences as the model reads them, one row each."""
    width = max(map(len, tables), default=0)
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32).view(len(tables), width)


def prompt_logprobs(logits_TV: Tensor, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log probability of `next_token_ids[t]`, the token after position t. Logits [T, V]."""
    launched = LaunchedPromptLogprobs.launch(logits_TV, next_token_ids, num_top)
    return launched.read(launched.packed().cpu())


class FakeRunner:
    """Keeps tokens and their positions where a model keeps keys and values, and reads every history from there, through the block tables.

    There is a layer for each of `windows`, the first without a sliding window. Of the others it is asserted that what they see is there.
    A recurrent layer has `num_slots` states, which are histories as well, and is asserted to have come by the same tokens.

    The next token in order of preference is `next_token(history)`, then the ids after it; or it gives logits, [V]. `failure` is raised by
    the steps to come, `gate` holds them up. Of every token its `logits` can be had, and as `inputs` its position and its id.
    """

    min_tokens = 2
    group = ALONE

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        next_token: NextToken,
        vocab_size: int = VOCAB_SIZE,
        windows: tuple[int | None, ...] = (None,),
        num_slots: int = 0,
    ) -> None:
        self.state_slots: list[list[int]] = [[-1]] * num_slots
        self.states = None
        self.loaded = SimpleNamespace(device=torch.device("cpu"), model=torch.nn.Linear(512, 512), vision=None)
        self.greedy_head = None
        self.readers: list[Thread] = []
        self.windows = windows
        groups = [LayerGroup((layer,), window) for layer, window in enumerate(windows)]
        self.layout = [LayerKV(1, 1, 1, window) for window in windows]
        self.cache = KVCache(self.layout, num_blocks, block_size, torch.int64, self.loaded.device, groups=groups)
        self.cache.keys[0].fill_(-1)
        self.next_token = next_token
        self.vocab_size = vocab_size
        self.sampler = Sampler(vocab_size, "cpu")
        self.pending = PendingTokens(vocab_size, self.loaded.device)
        self.failure: Exception | None = None
        self.gate: Event | None = None
        self.num_tokens_per_step: list[int] = []
        self.drafter = None
        self.outputs = SimpleNamespace(check=lambda names: None)
        self.thread = ThreadPoolExecutor(1)

    def launch(self, batch: Batch) -> StepHandle:
        return StepHandle(self.thread.submit(self.run, batch))

    def optimize(self) -> None:
        """There is nothing to compile."""

    def shutdown(self) -> None:
        if self.gate is not None:
            self.gate.set()
        self.thread.shutdown()

    def run(self, batch: Batch) -> StepOutput:
        if self.gate is not None:
            assert self.gate.wait(timeout=60)
        if self.failure is not None:
            raise self.failure
        pending_ids_P = self.pending.fill_in(batch.inputs.input_ids_1T) if batch.num_pending else None
        self.pending.clear()
        self.cache.write_tables(batch.inputs.table_updates_3U)
        self.cache.copy_blocks(batch.copies)
        logits_KV = self._forward(batch)
        output = sample_rows(batch, logits_KV, self.sampler, pending_ids_P)
        self.pending.keep(output.samples.token_ids, output.rows, len(batch.sampler_rows))
        for rows in batch.prompts:
            targets = rows.sequence.token_ids[rows.first_token : rows.first_token + rows.stop - rows.start]
            num_top = rows.sequence.request.params.prompt_logprobs or 0
            scored = (rows.sequence, rows.first_token, prompt_logprobs(logits_KV[rows.start : rows.stop], targets, num_top))
            output.prompt_logprobs.append(scored)
        output.outputs = [self._outputs(batch, rows, logits_KV) for rows in batch.outputs]
        return output

    def _outputs(self, batch: Batch, rows: OutputRows, logits_KV: Tensor) -> dict[str, Tensor]:
        inputs_TI = torch.stack([batch.inputs.positions_1T[0], batch.inputs.input_ids_1T[0]], 1)[rows.start : rows.stop]
        logits_TV = logits_KV[rows.first_kept : rows.first_kept + rows.stop - rows.start]
        return {name: logits_TV.clone() if name == LOGITS else inputs_TI for name in rows.names}

    def _forward(self, batch: Batch) -> Tensor:
        """The logits of the kept rows. Asserts that each history is whole and, where one is sampled from, that it is the sequence's own."""
        attention = batch.inputs.attention
        slots = attention.slot_mapping_T.tolist()
        is_token = attention.slot_mapping_T >= 0
        num_tokens = int(is_token.sum())
        assert len(set(slots[:num_tokens])) == num_tokens, "two tokens are written to one slot"
        assert is_token[:num_tokens].all(), "padding stands between tokens"
        assert len(slots) >= self.min_tokens
        self.num_tokens_per_step.append(num_tokens)
        tokens, positions = (cache[0].view(-1) for cache in (self.cache.keys, self.cache.values))
        for group in attention.groups:
            written = group.slot_mapping_T[:num_tokens]
            tokens[written] = batch.inputs.input_ids_1T[0, :num_tokens]
            positions[written] = batch.inputs.positions_1T[0, :num_tokens]
        offsets = torch.arange(self.cache.block_size)
        starts, lens = attention.query_start_loc.tolist(), attention.context_lens_B.tolist()
        assert starts[-1] == num_tokens
        histories: list[list[int]] = []
        for row, length in enumerate(lens):
            context = (attention.blocks_of(row)[:, None] * self.cache.block_size + offsets).flatten()[:length]
            assert positions[context].tolist() == list(range(length)), "the cache holds something else at these positions"
            history = tokens[context].tolist()
            num_new = starts[row + 1] - starts[row]
            assert (num_new == 1) == (row < attention.num_decodes)
            histories += [history[: length - num_new + 1 + position] for position in range(num_new)]
            for group, window in zip(attention.others, self.windows[1:], strict=True):
                first = 0 if window is None else max(0, length - num_new - window + 1)
                seen = (group.blocks_of(row)[:, None] * self.cache.block_size + offsets).flatten()[first:length]
                assert positions[seen].tolist() == list(range(first, length)), "a block was freed too early"
                assert tokens[seen].tolist() == history[first:], "the layers hold different tokens"
        self._advance_states(batch, histories)
        kept = [histories[row] for row in batch.inputs.kept_T.tolist()]
        for row, sampler in zip(batch.logits_rows, batch.sampler_rows, strict=True):
            known = sampler.sequence.token_ids
            if batch.num_pending and (sampler.sequence.constraint is not None or sampler.sequence.thinking is not None):
                continue  # what it was sampled may have been replaced meanwhile
            assert kept[row][: len(known)] == known[: len(kept[row])], "the cache holds another sequence's tokens"
            # Where tokens were pending, those of the step before may be known by now or not.
            num_ahead = {sampler.num_drafted, sampler.num_drafted + (batch.num_pending > 0)}
            assert len(kept[row]) - len(known) in num_ahead, "what is sampled from is not the last token"
        return torch.stack([self._logits(self.next_token(history)) for history in kept]) if kept else torch.empty(0, self.vocab_size)

    def copy_states(self, source: int | None, target: int) -> None:
        self.thread.submit(lambda: self.state_slots.__setitem__(target, [] if source is None else self.state_slots[source]))

    def _advance_states(self, batch: Batch, histories: list[list[int]]) -> None:
        assert sum(rows.num_rows for rows in batch.states) == (len(histories) if self.state_slots else 0)
        for rows in batch.states:
            before, stop = self.state_slots[rows.slot], rows.start + rows.num_rows
            computed = batch.inputs.input_ids_1T[0, rows.start : stop].tolist()
            for number, slot in rows.snapshots:
                self.state_slots[slot] = before + computed[:number]
            self.state_slots[rows.slot] = before + computed
            assert self.state_slots[rows.slot] == histories[stop - 1], "the states are those of another history"

    def _logits(self, preferred: int | Tensor) -> Tensor:
        return preferred if isinstance(preferred, Tensor) else -((torch.arange(self.vocab_size) - preferred) % self.vocab_size).float()


def make_core(
    next_token: NextToken = letter_after,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_waiting: int = 1000,
    max_waiting_tokens: int | None = None,
    max_queue_time: float = 0.0,
    aging_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    max_model_len: int = 200,
    enable_prefix_caching: bool = True,
    tokenizer: Tokenizer = TOKENIZER,
    stop_token_ids: frozenset[int] = frozenset({EOS}),
    grace: float = 60.0,
    rows_for_weights: float | None = None,
    proposer: Proposer | None = None,
    is_async: bool = False,
    reserves: bool = False,
    windows: tuple[int | None, ...] = (None,),
    kv_cache_dir: Path | None = None,
    kv_cache_dir_size: int = 2**20,
    model: str = "fake",
    num_slots: int = 0,
    grid: int = 16,
    max_in_flight: int = 1,
) -> EngineCore:
    """The model has a layer for each of `windows`. Its blocks are kept in `kv_cache_dir`, where those of another `model` are not found.

    With `num_slots` for states it has a recurrent layer too, of which snapshots are taken on a `grid`. Up to `max_in_flight` steps are in
    flight, as of a model in stages.

    Masks are late only after a `grace` that the test chooses; with `rows_for_weights`, sequences have draft tokens, by default of n-grams.

    Without `reserves`, sequences are admitted as long as they fit, and preempted later.
    """
    assert num_blocks * block_size >= max_model_len or windows != (None,)
    blocks = KVCacheManager(BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching), block_size, windows)
    runner = FakeRunner(num_blocks, block_size, next_token, tokenizer.vocab_size, windows, num_slots)
    persistence = None
    if kv_cache_dir is not None:
        cache = runner.cache
        block_format = BlockFormat.of(runner.layout, cache.groups, block_size=block_size, dtype=cache.dtype, model=model)
        persistence = Persistence(BlockFiles(kv_cache_dir, block_format, kv_cache_dir_size), cache, blocks, runner.thread.submit)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        waiting=WaitingQueue(
            max_sequences=max_waiting, max_tokens=max_waiting_tokens, max_seconds=max_queue_time, aging_seconds=aging_seconds, clock=clock
        ),
        speculation=None
        if rows_for_weights is None
        else Speculation(rows_for_weights, proposer=proposer or NgramProposer(), name="ngram" if proposer is None else "other"),
        reserves=reserves,
        persistence=persistence,
        states=StateScheduler(
            num_slots,
            block_size,
            max_num_seqs,
            runner.copy_states,
            enable_prefix_caching=enable_prefix_caching,
            grid=grid,
        )
        if num_slots
        else None,
    )
    return EngineCore(
        runner=cast(ModelRunner, runner),
        scheduler=scheduler,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        is_async=is_async,
        max_in_flight=max_in_flight,
        masks=MaskPool(grace),
    )


def runner_of(core: EngineCore) -> FakeRunner:
    return cast(FakeRunner, core.runner)


def make_request(
    request_id: str = "r",
    prompt: str | list[int] = "?",
    *,
    parser: ReasoningParserFactory | None = None,
    tail: str = "",
    make_answer: Callable[[], Answer] | None = None,
    grammar: Any = None,
    logits_processors: Sequence[Callable[[], Any] | ChosenProcessor] = (),
    priority: int = 0,
    cache_salt: str = "",
    bad_sequences: tuple[tuple[int, ...], ...] = (),
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    retention: Retention | None = None,
    prediction: Sequence[int] = (),
    adapter: Adapter | None = None,
    embeds: Sequence[PromptEmbeds | PromptImage] = (),
    preamble: PreambleParams | None = None,
    measures_pressure: bool = False,
    ends_within: bool = False,
    **params: Any,
) -> Request:
    """Greedy where nothing else is said. `tail` is what the parser of reasoning knows of the prompt."""
    prompt_token_ids = ids(prompt) if isinstance(prompt, str) else prompt
    sampling = SamplingParams(**({"temperature": 0.0} | params))

    turn = Turn(prompt_tail=tail, added_tokens=ADDED)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=sampling,
        make_answer=make_answer or AnswerFactory(TOKENIZER, prompt_token_ids, sampling, parser, None, turn),
        grammar=grammar,
        logits_processors=[
            given if isinstance(given, ChosenProcessor) else ChosenProcessor(per_sequence(given), {}) for given in logits_processors
        ],
        priority=priority,
        cache_salt=cache_salt,
        bad_sequences=bad_sequences,
        stop_sequences=stop_sequences,
        retention=retention,
        prediction=Prediction(prediction) if prediction else None,
        adapter=adapter,
        embeds=tuple(embeds),
        preamble=preamble,
        measures_pressure=measures_pressure,
        ends_within=ends_within,
    )


def beam_request(request_id: str, prompt: str | list[int], beam: BeamSearchParams, *, priority: int = 0, **rules: Any) -> Request:
    """One for beam search. `rules` are a grammar, logits processors, or fields of the sampling parameters."""
    own = {name: rules.pop(name) for name in ("grammar", "logits_processors", "parser", "tail") if name in rules}
    params = beam.sampling_params(**rules)
    read_by = ("stop", "include_stop_str_in_output", "skip_special_tokens", "min_tokens")
    reader = make_request(request_id, prompt, priority=priority, **{name: getattr(params, name) for name in read_by}, **own)
    return replace(reader, params=params, beam=beam)


def content(deltas: Sequence[SequenceDelta], index: int = 0) -> str:
    return "".join(event.text for delta in deltas if delta.index == index for event in delta.events if isinstance(event, Text))


def reasoning(deltas: Sequence[SequenceDelta], index: int = 0) -> str:
    return "".join(event.text for delta in deltas if delta.index == index for event in delta.events if isinstance(event, Reasoning))


def preamble(deltas: Sequence[SequenceDelta], index: int = 0) -> str:
    return "".join(event.text for delta in deltas if delta.index == index for event in delta.events if isinstance(event, Preamble))


def tokens(deltas: Sequence[SequenceDelta], index: int = 0) -> list[int]:
    return [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids]


def drive(core: EngineCore, *, max_steps: int = 2000) -> dict[str, list[SequenceDelta]]:
    """Steps until nothing is left to do, checking integrity all the way, and gives every request's deltas."""
    said: dict[str, list[SequenceDelta]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            break
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        core.check_integrity()
    assert not core.has_work, "there is work left that is never done"
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks, "blocks are held by no sequence"
    states = core.scheduler.states
    assert states is None or states.pool.num_free == states.pool.num_blocks, "slots are held by no sequence"
    return said


def generate(core: EngineCore, request: Request) -> list[SequenceDelta]:
    core.add(request)
    return drive(core)[request.request_id]


def num_calls(work: Callable[[], object]) -> int:
    """How many functions written in Python are called, which is what the host's time goes with."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
