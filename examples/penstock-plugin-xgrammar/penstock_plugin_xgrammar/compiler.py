"""xgrammar's compiler in a sandbox: some inputs take half a minute or all memory."""

from dataclasses import replace
from typing import Any

from penstock import InvalidRequest, Limits, Sandbox, Vocabulary

# The niceness is that of a process that holds no lock others wait for. As text a grammar takes half as much again as in memory.
LIMITS = Limits(cpu_seconds=5.0, memory_bytes=2 * 2**30, wall_seconds=30.0, result_bytes=2**27, niceness=19)
MAX_BYTES = 48 * 2**20  # of a compiled grammar; reading it in takes a third of a second, without the interpreter's lock
MAX_WAIT = 3.0  # seconds for the process to be free: a constraint that is compiled after that should still be waited for
MAX_TOKEN_BYTES = 2**16 - 1

_loaded: tuple[Any, Any, int]  # in the sandbox: the vocabulary as xgrammar's TokenizerInfo, its compiler for that, and `max_bytes`


class Compiler:
    """Compiles one grammar at a time. Any number of threads may ask."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits = LIMITS, max_bytes: int = MAX_BYTES) -> None:
        initargs = (replace(vocabulary, encode=None, added_token_ids=dict(vocabulary.added_token_ids)), max_bytes)
        self._sandbox = Sandbox("compiling with xgrammar", limits, max_wait=MAX_WAIT, initializer=load, initargs=initargs)
        self._tokenizer_info: Any = None

    def prestart(self) -> None:
        """Begins to load xgrammar, which takes seconds, and returns."""
        self._sandbox.prestart()

    def compile(self, ebnf: str) -> Any:
        """xgrammar's `CompiledGrammar`. Raises as `Sandbox.run`, `InvalidRequest` in xgrammar's own words."""
        compiled = self._sandbox.run_blocking(compile_ebnf, ebnf)

        import xgrammar

        if self._tokenizer_info is None:
            self._tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(self._sandbox.run_blocking(tokenizer_info))
        return xgrammar.CompiledGrammar.deserialize_json(compiled, self._tokenizer_info)

    def close(self) -> None:
        self._sandbox.close()


# From here on: in the sandbox. Importing xgrammar brings PyTorch.


def load(vocabulary: Vocabulary, max_bytes: int) -> None:
    import xgrammar

    global _loaded
    stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
    info = xgrammar.TokenizerInfo(spelt_tokens(vocabulary), vocab_size=vocabulary.size, stop_token_ids=stop_token_ids)
    _loaded = info, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), max_bytes


def spelt_tokens(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of each token. One without any is never allowed: the stop tokens as text, and those that spell what no text holds.

    An added token gets a byte that is in no text either, so that a rule may name it.
    """
    added = set(vocabulary.added_token_ids.values())
    tokens = [token if token and b"\0" not in token and len(token) <= MAX_TOKEN_BYTES else b"" for token in vocabulary.token_bytes]
    return [
        b"" if token_id in vocabulary.stop_token_ids else b"\xff%d" % token_id if token_id in added else token
        for token_id, token in enumerate(tokens[: vocabulary.size])
    ]


def tokenizer_info() -> str:
    text: str = _loaded[0].serialize_json()
    return text


def compile_ebnf(ebnf: str) -> str:
    import xgrammar

    _, compiler, max_bytes = _loaded
    try:
        grammar = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(ebnf))
    except (RuntimeError, ValueError) as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise InvalidRequest(_reason(str(error))) from None
    if grammar.memory_size_bytes > max_bytes:
        raise InvalidRequest(f"compiled, it would take more than {max_bytes / 2**20:.0f} MiB")
    text: str = grammar.serialize_json()
    return text


def _reason(message: str) -> str:
    """xgrammar's own words, without the time and the place in its source."""
    line = message.strip().splitlines()[0] if message.strip() else "refused"
    for parser in ("EBNF lexer error ", "EBNF parser error "):
        line = line.rpartition(parser)[2]
    return line[:200]
