"""Compiles constraints off the event loop, each once."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Protocol

from penstock.engine.errors import QueueFull, UnsupportedGrammar
from penstock.engine.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, Vocabulary

MAX_BYTES = 2**29
MAX_REFUSALS = 1024
MAX_PENDING = 64
TIME_LIMIT = 10.0
NUM_WORKERS = 2


class VocabularySource(Protocol):
    """A tokenizer, as far as grammars need it."""

    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary: ...


class GrammarCompiler:
    """Every request's way to its grammar: compiled at most once at a time, kept while memory allows; refusals are kept too.

    `factories` are the backends by name, in the order in which they are tried where a request names none. None is made before the first
    constraint comes. `max_bytes` bounds the grammars kept, least recently used ones going first; one in use lives on with its sequences.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[Vocabulary], GrammarBackend]],
        tokenizer: VocabularySource,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        max_bytes: int = MAX_BYTES,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self._factories = factories
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_bytes = max_bytes
        self._time_limit = time_limit
        self._backends: dict[str, GrammarBackend] = {}
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._refusals: OrderedDict[str, UnsupportedGrammar] = OrderedDict()
        self._pending: dict[str, asyncio.Task[CompiledGrammar | UnsupportedGrammar]] = {}
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="penstock-grammar")
        self.num_bytes = 0

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None) -> CompiledGrammar:
        """The grammar of `spec`, by the named backend or by the first that takes it.

        Raises `UnsupportedGrammar` where none does or the time limit passes, and `QueueFull` where too many others wait to be compiled.
        """
        assert backend_name is None or backend_name in self._factories
        key = _key(spec, backend_name)
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
            return grammar
        outcome = self._refusals.get(key) or await self._compiled(key, spec, backend_name)
        if isinstance(outcome, UnsupportedGrammar):
            # A fresh exception each time: one that is raised again collects tracebacks. The path is this request's own.
            raise UnsupportedGrammar(outcome.message, spec.param + (outcome.param or ""))
        return outcome

    async def _compiled(self, key: str, spec: GrammarSpec, backend_name: str | None) -> CompiledGrammar | UnsupportedGrammar:
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= MAX_PENDING:
                raise QueueFull("too many constraints are being compiled")
            task = self._pending[key] = asyncio.create_task(self._run(key, spec, backend_name))
        try:
            # Shielded: a client that gives up does not take the grammar from others who wait for it.
            return await asyncio.wait_for(asyncio.shield(task), self._time_limit)
        except TimeoutError:
            raise UnsupportedGrammar(f"compiling the constraint took longer than {self._time_limit:g} s", spec.param) from None

    async def _run(self, key: str, spec: GrammarSpec, backend_name: str | None) -> CompiledGrammar | UnsupportedGrammar:
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._workers, self._compile, spec, backend_name)
        finally:
            del self._pending[key]
        if isinstance(outcome, UnsupportedGrammar):
            self._refusals[key] = outcome
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)
        else:
            self._keep(key, outcome)
        return outcome

    def _compile(self, spec: GrammarSpec, backend_name: str | None) -> CompiledGrammar | UnsupportedGrammar:
        """Runs in a worker. A refusal comes back with its path relative to the spec's own."""
        refusal: UnsupportedGrammar | None = None
        for name in self._factories if backend_name is None else (backend_name,):
            try:
                return self._backend(name).compile(spec)
            except UnsupportedGrammar as error:
                path = (error.param or "").removeprefix(spec.param)
                refusal = refusal or UnsupportedGrammar(error.message, path)
        return refusal or UnsupportedGrammar("no grammar backend is loaded", "")

    def _backend(self, name: str) -> GrammarBackend:
        # Two workers may both get here first; the second backend then replaces an equal one.
        if name not in self._backends:
            self._backends[name] = self._factories[name](self._vocabulary)
        return self._backends[name]

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary(self._vocab_size, self._stop_token_ids)

    def _keep(self, key: str, grammar: CompiledGrammar) -> None:
        if grammar.num_bytes > self._max_bytes:
            return
        self._grammars[key] = grammar
        self.num_bytes += grammar.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._grammars.popitem(last=False)[1].num_bytes

    def check_integrity(self) -> None:
        """Asserts that what is kept adds up and that nothing is left waiting. For tests, between requests."""
        assert self.num_bytes == sum(grammar.num_bytes for grammar in self._grammars.values()) <= self._max_bytes
        assert not self._pending
        assert len(self._refusals) <= MAX_REFUSALS

    def close(self) -> None:
        """Compiles nothing more; returns at once."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _key(spec: GrammarSpec, backend_name: str | None) -> str:
    """A digest: a cache of refused schemas should not keep megabytes of them. Members' order is part of the text."""
    fields = (spec.kind, spec.text, spec.whitespace_pattern, backend_name)
    return hashlib.sha256(repr(fields).encode("utf-8", "surrogatepass")).hexdigest()
