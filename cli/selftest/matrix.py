"""The cells of the test, and the engines that they run in.

The reference computes one request after another, without speculative decoding and prefix caching. All engines are `AsyncLLM`s.
"""

import asyncio
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from penstock.assembly import check_speculation
from penstock.cli.selftest.arguments import SelftestArguments
from penstock.cli.selftest.cases import Case, Feature, draw_cases, script_of
from penstock.cli.selftest.results import Answer, Cell, Difference, Results, Situation, margin_of
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest, PenstockError, QueueFull
from penstock.engine.request import BACKGROUND
from penstock.engine.scripted.file import PREFIX as SCRIPTED
from penstock.engine.scripted.file import is_scripted, scripted_directory
from penstock.llm import outputs
from penstock.llm.offline import AsyncLLM
from penstock.llm.outputs import RequestOutput
from penstock.llm.sampling_params import RequestOutputKind, SamplingParams
from penstock.plugins.manager import Plugins

PROPOSERS = ("none", "ngram", "suffix", "draft")
BATCH_SIZE = 32
MAX_MODEL_LEN = 1024
BLOCK_SIZE = EngineConfig().block_size
SPARE_BLOCKS = 4
ROOMY = 512 * 2**20  # bytes
SCRIPTED_ROOMY = 2 * 2**20
RUNS_PER_ROUND = 5000
MAX_ROUNDS = 20
MIN_RUNS = 4  # in a cell of a round
ALONE_SHARE = 4  # a request alone takes the longest, and says the least
MAX_CASES = 8  # of each feature in a round
ABORTED = 0.1  # further requests, over those that run to their end
MAX_REFUSALS = 60
NUM_FORKS = 8  # of an answer that is pressed for blocks: they share its prompt, and outgrow the small pool together
# Names of `get_metrics`, by what they are called here.
COUNTERS = {
    "draft tokens": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
    "preemptions": "num_preemptions",
    "cached tokens": "prefix_cache_hits",
    "blocks from disk": "kv_cache_dir_hits",
}


@dataclass(frozen=True, slots=True)
class Engines:
    """Starts the engines of one round."""

    model: str | None
    draft_model: str | None
    options: Mapping[str, Any]
    is_adaptive: bool

    @property
    def is_scripted(self) -> bool:
        return is_scripted(self.model)

    @property
    def pool_bytes(self) -> int:
        """Of a pool in which nothing is preempted."""
        size: int = self.options.get("kv_cache_memory") or (SCRIPTED_ROOMY if self.is_scripted else ROOMY)
        return size

    @asynccontextmanager
    async def started(self, proposer: str, **settings: Any) -> AsyncIterator[AsyncLLM]:
        """Raises `ConfigurationError` where it cannot be."""
        options = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": BATCH_SIZE,
            **self.options,
            "kv_cache_memory": self.pool_bytes,
            "speculation": proposer,
            "adaptive_speculation": self.is_adaptive,
            **settings,
        }
        options["draft_model"] = (options.get("draft_model") or self.draft_model) if proposer == "draft" else None
        async with AsyncLLM(self.model, **options) as llm:
            yield llm


@dataclass(slots=True)
class Round:
    """One set of cases in all cells. `runs` are how many of each feature in a cell."""

    arguments: SelftestArguments
    results: Results
    engines: Engines
    rng: random.Random
    cases: list[Case]
    runs: int
    directory: Path
    references: dict[str, Answer] = field(default_factory=dict)
    _max_tokens: int = 0  # of prompt and answer
    _block_bytes: int = 0

    async def run(self, proposers: Sequence[str]) -> None:
        """All cells. Engines of a script, which computes next to nothing, run at once."""
        await self._refer()
        apart = [replace(self, rng=random.Random(self.rng.random()))._run_all(proposer) for proposer in proposers]
        if self.engines.is_scripted:
            await asyncio.gather(*apart)
        else:
            for one in apart:
                await one
        await self._measure_margins()

    async def _run_all(self, proposer: str) -> None:
        if await self._roomy(proposer):
            await self._small(proposer)
            await self._disk(proposer)

    async def _refer(self) -> None:
        """Computes the references, and drops the features that the model does not have."""
        async with self.engines.started("none", enable_prefix_caching=False) as llm:
            reasoned = False
            for place, case in enumerate(self.cases):
                if case.feature in self.results.untested:
                    continue
                try:
                    output = await ask(llm, case)
                    answer, num_prompt_tokens = Answer.of(output.outputs[0]), len(output.prompt_token_ids)
                    if case.feature is Feature.STOP:
                        case = self.cases[place] = case.stopped(self.rng, answer.text)
                        answer = Answer.of((await ask(llm, case)).outputs[0])
                except InvalidRequest as error:
                    self.results.untested[case.feature] = error.message
                    continue
                self.references[case.name] = answer
                self._max_tokens = max(self._max_tokens, num_prompt_tokens + case.params["max_tokens"])
                reasoned = reasoned or bool(answer.reasoning)
        if not reasoned:
            for feature in (Feature.REASONING, Feature.BUDGET):
                self.results.untested.setdefault(feature, "no answer of the model has reasoning")
        self.cases = [case for case in self.cases if case.feature not in self.results.untested]

    def _drawn(self, share: int = 1) -> list[Case]:
        """The runs of a cell of each feature, in some order; one `share` of them."""
        by_feature: dict[Feature, list[Case]] = {}
        for case in self.cases:
            by_feature.setdefault(case.feature, []).append(case)
        drawn = [cases[place % len(cases)] for cases in by_feature.values() for place in range(-(-self.runs // share))]
        self.rng.shuffle(drawn)
        return drawn

    async def _roomy(self, proposer: str) -> bool:
        """Whether the proposer can be used."""
        async with self._engine(proposer, tuple(Situation)) as llm:
            if llm is None:
                return False
            self._block_bytes = -(-self.engines.pool_bytes // num_blocks(llm))
            async with self._counted(llm, proposer, Situation.ALONE):
                for case in self._drawn(ALONE_SHARE):
                    await llm.reset_prefix_cache()
                    await self._check(llm, proposer, Situation.ALONE, case)
            await llm.reset_prefix_cache()
            async with self._counted(llm, proposer, Situation.BATCH):
                await self._batch(llm, proposer, Situation.BATCH)
            async with self._counted(llm, proposer, Situation.PREFIX):
                drawn = self._drawn()
                for chunk in chunks(drawn, 2 * len(self.cases)):
                    # Half of the prompts are known as a whole, and others as far as the system prompt.
                    await llm.reset_prefix_cache()
                    for case in self.rng.sample(self.cases, -(-len(self.cases) // 2)):
                        with suppress(PenstockError):  # those that count may fail as well, and are reported then
                            await ask(llm, case, max_tokens=1, min_tokens=0)
                    await self._some(llm, proposer, Situation.PREFIX, chunk)
        return True

    @property
    def _small_pool(self) -> dict[str, int]:
        """Settings for a pool that fits the longest case, and no batch."""
        length = self._max_tokens + 1
        return {"max_model_len": length, "kv_cache_memory": (-(-length // BLOCK_SIZE) + SPARE_BLOCKS) * self._block_bytes}

    async def _small(self, proposer: str) -> None:
        async with self._engine(proposer, (Situation.PREEMPTION,), **self._small_pool) as llm:
            if llm is not None:
                async with self._counted(llm, proposer, Situation.PREEMPTION):
                    await self._batch(llm, proposer, Situation.PREEMPTION)

    async def _disk(self, proposer: str) -> None:
        # Blocks that one engine has written are read by others.
        kept = Path(tempfile.mkdtemp(dir=self.directory))
        async with self._engine(proposer, (Situation.DISK,), kv_cache_dir=str(kept)) as llm:
            if llm is not None:
                await self._some(llm, proposer, None, self.cases)
        async with self._engine(proposer, (Situation.DISK,), kv_cache_dir=str(kept)) as llm:
            if llm is not None:
                async with self._counted(llm, proposer, Situation.DISK):
                    for chunk in chunks(self._drawn(), len(self.cases)):
                        await llm.reset_prefix_cache()
                        await self._some(llm, proposer, Situation.DISK, chunk)
        settings: dict[str, str] = {} if (proposer, Situation.DISK) in self.results.untested else {"kv_cache_dir": str(kept)}
        async with self._engine(proposer, (Situation.ALL,), **self._small_pool, **settings) as llm:
            if llm is not None:
                async with self._counted(llm, proposer, Situation.ALL):
                    await self._batch(llm, proposer, Situation.ALL)
        shutil.rmtree(kept)

    @asynccontextmanager
    async def _engine(self, proposer: str, situations: Sequence[Situation], **settings: Any) -> AsyncIterator[AsyncLLM | None]:
        """None where it cannot be started as these situations need it."""
        context = self.engines.started(proposer, **settings)
        try:
            llm = await context.__aenter__()
        except ConfigurationError as error:
            for situation in situations:
                self.results.untested[proposer, situation] = str(error)
            yield None
            return
        try:
            yield llm
        finally:
            await llm.shutdown()

    @asynccontextmanager
    async def _counted(self, llm: AsyncLLM, proposer: str, situation: Situation) -> AsyncIterator[None]:
        before = counters(llm)
        yield
        counts = self.results.evidence.setdefault((proposer, situation), Counter())
        counts.update(counters(llm) - before)
        say(f"{proposer:7} {situation:12} {self.results.num_runs:8,} answers of this round, {self.results.num_different} differ")

    async def _batch(self, llm: AsyncLLM, proposer: str, situation: Situation) -> None:
        """All of them at once as far as the batch goes, among requests that are aborted."""
        todo = [(case, False) for case in self._drawn()]
        todo += [(self.rng.choice(self.cases), True) for _ in range(max(1, int(len(todo) * ABORTED)))]
        self.rng.shuffle(todo)
        waiting = iter(todo)

        async def client(rng: random.Random) -> None:
            for case, is_aborted in waiting:
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.01)
                is_pressed = situation in (Situation.PREEMPTION, Situation.ALL)
                priority = BACKGROUND if is_pressed and rng.random() < 0.3 else 0
                num_answers = NUM_FORKS if is_pressed and not is_aborted and rng.random() < 0.3 else 1
                num_outputs = rng.randint(1, 12) if is_aborted else None
                await self._check(llm, proposer, situation, case, priority=priority, num_answers=num_answers, num_outputs=num_outputs)

        await asyncio.gather(*(client(random.Random(self.rng.random())) for _ in range(BATCH_SIZE)))

    async def _some(self, llm: AsyncLLM, proposer: str, situation: Situation | None, cases: Sequence[Case]) -> None:
        """A few at a time. Without a situation they are not counted."""
        waiting = iter(cases)

        async def client() -> None:
            for case in waiting:
                if situation is None:
                    with suppress(PenstockError):
                        await ask(llm, case)
                else:
                    await self._check(llm, proposer, situation, case)

        await asyncio.gather(*(client() for _ in range(4)))

    async def _check(
        self,
        llm: AsyncLLM,
        proposer: str,
        situation: Situation,
        case: Case,
        *,
        priority: int = 0,
        num_answers: int = 1,
        num_outputs: int | None = None,
    ) -> None:
        """Compares the answers of one request, which count as one. With `num_outputs` it is aborted after so many."""
        is_aborted, prompt_token_ids = num_outputs is not None, []
        expected = self.references[case.name]
        try:
            output = await ask(llm, case, priority=priority, num_outputs=num_outputs, n=num_answers)
            answers, prompt_token_ids = [Answer.of(one) for one in output.outputs], output.prompt_token_ids
            got = next((answer for answer in answers if answer.differs_from(expected, is_aborted=is_aborted)), answers[0])
        except PenstockError as error:
            got = Answer(error=str(error))
        results = self.results
        cell = results.cells.setdefault((proposer, situation, case.feature), Cell())
        if got.error is not None:
            cell.num_failed += 1
            results.errors[got.error] += 1
            return
        if is_aborted:
            results.num_aborted += 1
            results.evidence.setdefault((proposer, situation), Counter())["aborted"] += 1
        else:
            cell.num_runs += 1
        if got.differs_from(expected, is_aborted=is_aborted):
            cell.num_different += 1
            results.differences.append(Difference(proposer, situation, case, expected, got, prompt_token_ids, is_aborted))

    async def _measure_margins(self) -> None:
        """How clear the model's choices are where answers differ from the reference, and after that."""
        differences = self.results.differences
        if not differences:
            return
        async with self.engines.started("none", enable_prefix_caching=False) as llm:
            for difference in differences:
                difference.margin = await margin_of(llm, difference)
                if difference.margin is not None and difference.margin <= self.arguments.max_margin:
                    self.results.cells[difference.proposer, difference.situation, difference.case.feature].num_rounded += 1


def chunks(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    return (cases[start : start + size] for start in range(0, len(cases), size))


async def ask(llm: AsyncLLM, case: Case, *, priority: int = 0, num_outputs: int | None = None, **others: Any) -> RequestOutput:
    """The whole answer; with `num_outputs` what there is after so many outputs. Raises `PenstockError`.

    A request that is refused because the machine is too busy, such as for compiling its constraint, is sent again.
    """
    for _ in range(MAX_REFUSALS):
        try:
            return await _ask(llm, case, priority, num_outputs, others)
        except (EngineUnavailable, QueueFull):
            await llm.check_health()
            await asyncio.sleep(1.0)
    return await _ask(llm, case, priority, num_outputs, others)


async def _ask(llm: AsyncLLM, case: Case, priority: int, num_outputs: int | None, others: Mapping[str, Any]) -> RequestOutput:
    kind = RequestOutputKind.FINAL_ONLY if num_outputs is None else RequestOutputKind.CUMULATIVE
    params = SamplingParams(**{**case.sampling, **others}, output_kind=kind)
    output: RequestOutput | None = None
    async with aclosing(llm.chat(case.messages, params, priority=priority, **case.options)) as outputs:
        async for latest in outputs:
            output = latest
            if num_outputs is not None and (num_outputs := num_outputs - 1) == 0:
                break
    assert output is not None, "an answer has at least one output"
    return output


def counters(llm: AsyncLLM) -> Counter[str]:
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        for name, theirs in COUNTERS.items():
            if isinstance(metric, outputs.Counter) and metric.name == f"penstock:{theirs}":
                found[name] += int(metric.value)
    return found


def num_blocks(llm: AsyncLLM) -> int:
    """Of the pool."""
    (info,) = (metric for metric in llm.get_metrics() if metric.name == "penstock:cache_config_info")
    return int(info.labels["num_gpu_blocks"])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_matrix(arguments: SelftestArguments, after_round: Callable[[Results], None]) -> Results:
    """All rounds, each of which adds to the results.

    Raises `ConfigurationError` for a proposer that is not registered, and for a model that cannot be served as asked.
    """
    plugins = Plugins.start(arguments.options.get("plugins", ()), arguments.options.get("without", ()))
    for proposer in arguments.proposers or ():
        check_speculation(EngineConfig(speculation=proposer), plugins)
    num_cells = len(proposers_of(arguments)) * len(Feature) * (len(Situation) - 1 + 1 / ALONE_SHARE)
    num_rounds = max(2, arguments.num_jobs, min(MAX_ROUNDS, -(-arguments.num_runs // RUNS_PER_ROUND)))
    num_rounds = max(1, min(num_rounds, int(arguments.num_runs // (MIN_RUNS * num_cells))))
    runs = max(1, math.ceil(arguments.num_runs / (num_rounds * num_cells)))
    say(f"{num_rounds} rounds; of each feature {runs} answers by each proposer in each situation, and a quarter of them alone")
    results = Results()
    for one in _rounds(arguments, num_rounds, runs):
        results.add(one)
        say(f"{results.num_runs:,} answers, {results.num_different} differ")
        after_round(results)
    return results


def _rounds(arguments: SelftestArguments, num_rounds: int, runs: int) -> Iterator[Results]:
    if arguments.num_jobs == 1:
        for number in range(num_rounds):
            yield run_round(arguments, number, runs)
        return
    with ProcessPoolExecutor(arguments.num_jobs, mp_context=get_context("spawn")) as pool:
        started = [pool.submit(run_round, arguments, number, runs) for number in range(num_rounds)]
        for future in as_completed(started):
            yield future.result()


def proposers_of(arguments: SelftestArguments) -> tuple[str, ...]:
    return arguments.proposers or PROPOSERS


def run_round(arguments: SelftestArguments, number: int, runs: int) -> Results:
    """One set of cases, drawn by the round's number. In every second round drafts have to pay for themselves, as they do by default."""
    rng = random.Random(f"{arguments.seed} {number}")
    cases = draw_cases(rng, tuple(Feature), min(runs, MAX_CASES))
    model, draft = arguments.model, arguments.model
    scripts: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="penstock-selftest-") as name:
        directory = Path(name)
        if model is None:
            scripts = [directory / "selftest.jsonl", directory / "draft.jsonl"]
            scripts[0].write_text(script_of(cases))
            scripts[1].write_text(script_of(cases, draft=rng))
            model, draft = (f"{SCRIPTED}{path}" for path in scripts)
        threads = {"threads": 1} if is_scripted(model) else {}  # a script has nothing to compute
        engines = Engines(model, draft, {**threads, **arguments.options}, is_adaptive=number % 2 == 1)
        one = Round(arguments, Results(), engines, rng, cases, runs, directory)
        try:
            asyncio.run(one.run(proposers_of(arguments)))
        finally:
            for script in scripts:
                shutil.rmtree(scripted_directory(f"{SCRIPTED}{script}"))  # in the cache, where no other run would find a use for it
    return one.results
