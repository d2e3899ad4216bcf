"""How far answers under a constraint are from the model's own distribution of valid answers, with masks and with exact sampling.

    python benchmarks/exact_sampling.py --json benchmarks/results/exact_sampling.json
    python benchmarks/exact_sampling.py --languages city --samples 2000

For each of a few small languages the true distribution P(x | valid) is computed by transformers, in float32: all token sequences that the
grammar allows and the stop token behind them, the likeliest prefixes first, until what is left out cannot add `LEFT_OUT` of the valid
probability. The engine, in float32 as well, then gives answers: those that are compared are of one request, with more of them than a client
may ask for (128). Printed are

- `TV`: the total variation distance of texts to P(x | valid). Of the masked process it is computed from the same enumeration, and so has
  no noise; of samples it has, and `floor` is what a perfect sampler of as many answers would show in the mean
- `p`: of the chi-square test of texts (those expected fewer than five times are one), and of token sequences
- `accepted`: valid answers per draw, of requests with 1, 10 and 100 answers, each with a trie of its own, and of the large one
- `tokens`: computed by the model for each token of an answer, stop tokens included, prompts not; for plain rejection this is derived from
  the enumeration, every draw ending at its first forbidden token
"""

import argparse
import asyncio
import copy
import functools
import heapq
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.report import surroundings
from penstock import LLM, EngineUnavailable, SamplingParams
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.deltas import SequenceDelta
from penstock.engine.model.loader import load_model
from penstock.engine.model.store import resolve_model
from penstock.engine.scheduling.step import Step
from penstock.llm.sampling_params import StructuredOutputsParams
from penstock.serving.context import LocalContext
from penstock.serving.requests import GenerationFields
from penstock.serving.structured_outputs import grammar_spec

N = 128  # answers of one request, as many as a client may ask for
NUM_REQUESTS = {1: 8, 10: 2, 100: 1}
BATCH = 64
LEFT_OUT = 1e-3
MAX_NODES = 20_000

Path_ = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Language:
    """What answers are held to, and the question that they answer."""

    question: str
    constraint: Mapping[str, Any]
    max_tokens: int = 40


CITIES = [
    *("Amsterdam", "Athens", "Berlin", "Bern", "Brussels", "Budapest", "Copenhagen", "Dublin", "Helsinki", "Lisbon"),
    *("London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Stockholm", "Vienna", "Warsaw", "Zagreb"),
]
BIRD = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["happy", "sad", "angry"]},
        "size": {"enum": ["small", "large"]},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["mood", "size", "color"],
}
LANGUAGES = {
    "city": Language("Name a capital of Europe that I should visit. Reply with its name alone.", {"choice": CITIES}),
    "date": Language(
        "On which day is Christmas in 2024? Reply with the date alone, as YYYY-MM-DD.",
        {"regex": "2024-1[12]-2[0-9]"},
    ),
    "bird": Language(
        'Describe a happy little red bird as JSON, such as {"mood": "sad", "size": "large", "color": "blue"}. Reply with the JSON alone.',
        {"json": BIRD},
    ),
}


@dataclass(slots=True)
class Enumeration:
    """Every answer, its stop token included, with its probability `true`, and as masks give it, `masked`.

    `valid` is the sum of the former, of which at most `left_out` is missing. A plain draw computes `tokens_per_draw` tokens in the mean.
    """

    true: dict[Path_, float] = field(default_factory=dict)
    masked: dict[Path_, float] = field(default_factory=dict)
    left_out: float = 0.0
    tokens_per_draw: float = 0.0
    num_nodes: int = 0

    @property
    def valid(self) -> float:
        return sum(self.true.values())


class Reference:
    """The model by transformers, after one prompt."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = load_model(directory, "float32", "cpu", quantization="none", attn_implementation="sdpa").model
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def prompt(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        ids: list[int] = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.inference_mode()
    def enumerate(self, prompt: list[int], grammar: CompiledGrammar, stop_ids: frozenset[int], vocab_size: int, limit: int) -> Enumeration:
        """Expands prefixes, the likeliest first."""
        found = Enumeration()
        output = self.model(torch.tensor([prompt]), use_cache=True)
        cache, first_V = output.past_key_values, output.logits[0, -1]
        # Prefixes to be expanded, by their probability: as it is, and as masks make it.
        prefixes: list[tuple[float, Path_, float]] = []
        open_mass = self._expand(found, prefixes, (), 1.0, 1.0, first_V, grammar, stop_ids, vocab_size, limit)
        while prefixes and open_mass > LEFT_OUT * found.valid and found.num_nodes < MAX_NODES:
            chosen = [heapq.heappop(prefixes) for _ in range(min(BATCH, len(prefixes)))]
            open_mass -= sum(-negative for negative, _, _ in chosen)
            for length in sorted({len(path) for _, path, _ in chosen}):
                group = [item for item in chosen if len(item[1]) == length]
                own = copy.deepcopy(cache)
                own.batch_repeat_interleave(len(group))
                logits_BV = self.model(torch.tensor([path for _, path, _ in group]), past_key_values=own, use_cache=True).logits[:, -1]
                for (negative, path, masked), logits_V in zip(group, logits_BV, strict=True):
                    open_mass += self._expand(found, prefixes, path, -negative, masked, logits_V, grammar, stop_ids, vocab_size, limit)
        found.left_out = open_mass
        return found

    def _expand(
        self,
        found: Enumeration,
        prefixes: list[tuple[float, Path_, float]],
        path: Path_,
        true: float,
        masked: float,
        logits_V: Tensor,
        grammar: CompiledGrammar,
        stop_ids: frozenset[int],
        vocab_size: int,
        limit: int,
    ) -> float:
        """Adds what the grammar allows after a prefix. Gives the probability of what is to be expanded of that."""
        found.num_nodes += 1
        found.tokens_per_draw += true
        matcher, row = grammar.matcher(), allocate_bitmask(1, vocab_size)
        for token_id in path:
            assert matcher.advance(token_id)
        matcher.fill_bitmask(row[0])
        bits = (row[0][:, None] >> torch.arange(32)) & 1
        ids = bits.flatten()[:vocab_size].nonzero()[:, 0]
        probs = logits_V[:vocab_size].double().softmax(-1)[ids]
        shares = probs / probs.sum()
        opened = 0.0
        for token_id, prob, share in zip(ids.tolist(), probs.tolist(), shares.tolist(), strict=True):
            after = (*path, token_id)
            if token_id in stop_ids:
                found.true[after], found.masked[after] = true * prob, masked * share
            elif len(after) < limit:
                heapq.heappush(prefixes, (-true * prob, after, masked * share))
                opened += true * prob
        return opened


class TokenCounter:
    """Counts the tokens that the engine's steps compute, beside what observed them before."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self.num_tokens = 0

    def begin(self, step: Step) -> None:
        self.num_tokens += sum(step.num_tokens.values())
        if self._observer is not None:
            self._observer.begin(step)

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        if self._observer is not None:
            self._observer.end(step, deltas)


@dataclass(slots=True)
class Sampled:
    """Answers as token sequences and as texts, the draws that they took, and the tokens that the model computed for them."""

    paths: list[Path_] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_draws: int = 0
    num_computed: int = 0
    num_masked: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.paths))

    @property
    def tokens_per_token(self) -> float:
        return self.num_computed / self.num_tokens

    @property
    def acceptance(self) -> float:
        return len(self.paths) / self.num_draws


def patiently(work: Callable[[], T]) -> T:
    """Again where the machine was too busy to compile the constraint in time."""
    while True:
        try:
            return work()
        except EngineUnavailable as busy:
            print(f"again: {busy}", file=sys.stderr, flush=True)


class Subject:
    """The engine under test."""

    def __init__(self, model: str | None) -> None:
        self.llm = LLM(model, dtype="float32", quantization="none", speculation="none", max_num_seqs=N)
        context = self.llm._model.context
        assert isinstance(context, LocalContext)
        self.context = context
        core = context.engine.core
        self.counter = core.observer = TokenCounter(core.observer)
        backends = dict(context.plugins.grammar_backends)
        self._compiler = GrammarCompiler(backends, context.tokenizer, context.vocab_size, context.stop_token_ids, time_limit=600)

    def grammar(self, language: Language) -> CompiledGrammar:
        spec = grammar_spec(GenerationFields(structured_outputs=self._outputs(language, None).wire()), "closed")
        assert spec is not None
        return asyncio.run(self._compiler.compile(spec))

    def sample(self, prompt: list[int], language: Language, sampling: str, counts: Iterable[int], seed: int) -> Sampled:
        """Answers of one request for each of the counts."""
        found = Sampled()
        for number, n in enumerate(counts):
            params = SamplingParams(
                n=min(n, N),
                max_tokens=language.max_tokens,
                seed=seed + 10**6 * number,
                structured_outputs=self._outputs(language, sampling),
            )
            object.__setattr__(params, "n", n)
            before = self.counter.num_tokens
            [output] = patiently(functools.partial(self.llm.generate, {"prompt_token_ids": prompt}, params, use_tqdm=False))
            # All of the prompt but its last token, as far as it was not cached.
            found.num_computed += self.counter.num_tokens - before - (len(prompt) - 1 - (output.num_cached_tokens or 0))
            for answer in output.outputs:
                found.paths.append(tuple(answer.token_ids))
                found.texts.append(answer.text)
                if answer.exact is not None:
                    found.num_draws += answer.exact.num_draws
                    found.num_masked += answer.exact.fallback is not None
        return found

    def _outputs(self, language: Language, sampling: Any) -> StructuredOutputsParams:
        return StructuredOutputsParams(**language.constraint, sampling=sampling)

    def close(self) -> None:
        self._compiler.close()
        self.llm.close()


def total_variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


def normalized(weights: Mapping[Any, float]) -> dict[Any, float]:
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def noise_floor(shares: Mapping[Any, float], count: int) -> float:
    """The mean total variation distance of so many draws to the distribution that they are from (normal approximation)."""
    return sum(math.sqrt(2 * share * (1 - share) / (math.pi * count)) for share in shares.values()) / 2


def p_value(found: Sequence[Any], shares: Mapping[Any, float]) -> float:
    """Of Pearson's chi-square test. What is expected fewer than five times is one class, or goes with the rarest where that is too few."""
    counts = Counter(found)
    frequent = [key for key, share in shares.items() if share * len(found) >= 5]
    observed = [counts[key] for key in frequent]
    expected = [shares[key] * len(found) for key in frequent]
    observed.append(len(found) - sum(observed))
    expected.append(max(0.0, len(found) - sum(expected)))
    if expected[-1] < 5 and len(expected) > 1:
        rest_observed, rest_expected = observed.pop(), expected.pop()
        rarest = expected.index(min(expected))
        observed[rarest] += rest_observed
        expected[rarest] += rest_expected
    if len(expected) < 2:
        return 1.0
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in zip(observed, expected, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0), torch.tensor(statistic / 2)))


def texts_of(weights: Mapping[Path_, float], tokenizer: Any) -> dict[str, float]:
    """The same of texts: those of all their tokenizations together."""
    texts: dict[str, float] = {}
    for path, weight in weights.items():
        text = tokenizer.decode(path[:-1])
        texts[text] = texts.get(text, 0.0) + weight
    return normalized(texts)


@dataclass(slots=True)
class Result:
    """What was found of one language."""

    language: str
    texts: int
    token_sequences: int
    prefixes: int
    valid: float
    left_out: float
    masked_tv: float
    samples: int
    exact_tv: float
    noise_floor: float
    exact_p_texts: float
    exact_p_token_sequences: float
    masked_samples: int
    masked_samples_tv: float
    masked_samples_p: float
    fallbacks: int
    accepted: dict[str, float]
    tokens: dict[str, float]
    likeliest: dict[str, list[float]]


def measure(name: str, reference: Reference, subject: Subject, num_samples: int, seed: int) -> Result:
    language = LANGUAGES[name]
    prompt, context, tokenizer = reference.prompt(language.question), subject.context, reference.tokenizer
    truth = reference.enumerate(prompt, subject.grammar(language), context.stop_token_ids, context.vocab_size, language.max_tokens)
    true_texts, masked_texts = texts_of(truth.true, tokenizer), texts_of(truth.masked, tokenizer)
    print(f"{name}: {len(true_texts)} texts, {truth.num_nodes} prefixes, P(valid) {truth.valid:.3g}", file=sys.stderr, flush=True)
    subject.sample(prompt, language, "exact", [1], seed)  # whose prompt the others find in the cache
    exact = subject.sample(prompt, language, "exact", [num_samples], seed + 10**8)
    print(f"{name}: {exact.num_computed} tokens computed for {exact.num_tokens} of answers", file=sys.stderr, flush=True)
    few = {n: subject.sample(prompt, language, "exact", [n] * times, seed + n * 10**9) for n, times in NUM_REQUESTS.items()}
    masked = subject.sample(prompt, language, "masked", [N], seed + 2 * 10**8)
    mean_length = sum(len(path) * share for path, share in normalized(truth.true).items())
    shares = Counter(exact.texts)
    return Result(
        language=name,
        texts=len(true_texts),
        token_sequences=len(truth.true),
        prefixes=truth.num_nodes,
        valid=truth.valid,
        left_out=truth.left_out / truth.valid,
        masked_tv=total_variation(masked_texts, true_texts),
        samples=len(exact.texts),
        exact_tv=total_variation(normalized(shares), true_texts),
        noise_floor=noise_floor(true_texts, len(exact.texts)),
        exact_p_texts=p_value(exact.texts, true_texts),
        exact_p_token_sequences=p_value(exact.paths, normalized(truth.true)),
        masked_samples=len(masked.texts),
        masked_samples_tv=total_variation(normalized(Counter(masked.texts)), true_texts),
        masked_samples_p=p_value(masked.texts, true_texts),
        fallbacks=exact.num_masked + sum(own.num_masked for own in few.values()),
        accepted={"rejection": truth.valid} | {str(n): own.acceptance for n, own in (few | {num_samples: exact}).items()},
        tokens={"rejection": truth.tokens_per_draw / truth.valid / mean_length, "masked": masked.tokens_per_token}
        | {str(n): own.tokens_per_token for n, own in (few | {num_samples: exact}).items()},
        likeliest={
            text: [round(share, 4), round(shares[text] / len(exact.texts), 4), round(masked_texts.get(text, 0.0), 4)]
            for text, share in sorted(true_texts.items(), key=lambda item: -item[1])[:8]
        },
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    yield f"{'language':8} {'texts':>5} {'P(valid)':>9} {'TV masked':>9} {'TV exact':>8} {'floor':>7} {'p texts':>8} {'p tokens':>8}"
    for result in results:
        yield (
            f"{result.language:8} {result.texts:5} {result.valid:9.2g} {result.masked_tv:9.4f} {result.exact_tv:8.4f} "
            f"{result.noise_floor:7.4f} {result.exact_p_texts:8.3f} {result.exact_p_token_sequences:8.3f}"
        )
    ways = ("rejection", "masked", *map(str, NUM_REQUESTS), str(results[0].samples))
    for title, of in (("accepted", "accepted"), ("tokens", "tokens")):
        yield f"{title:8} " + " ".join(f"{way if not way.isdigit() else 'n=' + way:>10}" for way in ways)
        for result in results:
            numbers: dict[str, float] = getattr(result, of)
            yield f"{result.language:8} " + " ".join(f"{numbers[way]:10.4g}" if way in numbers else f"{'-':>10}" for way in ways)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--model", metavar="ID|DIR", help="(default: the default model)")
    parser.add_argument("--languages", nargs="+", choices=list(LANGUAGES), default=list(LANGUAGES), help="(default: all)")
    parser.add_argument("--samples", type=int, default=20_000, help="answers of each language (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    around = surroundings([])
    reference, subject = Reference(resolve_model(args.model)), Subject(args.model)
    results: list[Result] = []
    try:
        for name in args.languages:
            results.append(measure(name, reference, subject, args.samples, args.seed))
            if args.json is not None:  # each time: the whole takes long
                document = around | {"results": [asdict(result) for result in results]}
                args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    finally:
        subject.close()
    for line in table(results):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
