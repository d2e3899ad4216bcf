"""What is asked of a server: prompts of a known length, and how many of them at a time."""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

from benchmarks import natural
from benchmarks.natural import Conversation
from benchmarks.tool_tasks import tool_tasks

# Each is one token, with and without a space before it, in the default model's vocabulary; in others most are.
WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part place case
week company system program question work government number night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea kid body information back parent face others level office door health person art
war history party result change reason research girl moment air teacher force education river winter summer music letter window
paper forest ocean bridge market doctor engine stone bird horse train light fire gold glass bread sugar salt king machine library
color voice dream heart road field
"""
WORDS = WORD_LIST.split()

# Models end an answer early where they may: this one is asked for at length, for servers that refuse `ignore_eos`.
INSTRUCTION = ". Write a very long story in which all of these words come up, and do not stop early."
INSTRUCTION_TOKENS = 21

# What a model that is asked to correct them only copies.
SENTENCE = "The {} of the {} was in the {}, and the {} was near the {}."
SENTENCE_WORDS = 5
SENTENCE_TOKENS = 18
PROOFREAD = "\n\nCorrect the spelling of the text above and write it out again."
PROOFREAD_TOKENS = 15
TEMPLATE_TOKENS = 30  # what the default model's chat template puts around a message, its system message included


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """A number of conversations, `concurrency` of them under way at any time; each turn of one is a request.

    `output_tokens` are the most that an answer may have. A scenario that is not `by_default` takes a server that is started for it, and
    runs only where it is named.
    """

    name: str
    concurrency: int
    num_conversations: int
    output_tokens: int
    num_adapters: int = 0  # that requests take in turn: adapter-0, adapter-1 and so on, as benchmarks/adapters.py writes them
    long_tokens: int = 0  # of one more prompt, which is being answered all the while and not measured
    by_default: bool = True

    @property
    def fields(self) -> dict[str, Any]:
        """Of each request, beside the model, the messages and the number of tokens. A `seed` is counted up from request to request."""
        return {"temperature": 0}

    def model_of(self, number: int) -> dict[str, str]:
        """The model of that conversation, where it is not the server's first one."""
        return {"model": f"adapter-{number % self.num_adapters}"} if self.num_adapters else {}

    @property
    def runs_to_full_length(self) -> bool:
        """Whether answers are to go on where the model would end them, on servers that know how."""
        return True

    @abstractmethod
    def conversations(self, seed: str, count: int) -> list[Conversation]:
        """The same seed gives the same ones; other seeds give others, what they share included."""

    def small(self) -> Self:
        """The same, to see quickly that it works."""
        return replace(
            self,
            concurrency=min(2, self.concurrency),
            num_conversations=2,
            output_tokens=min(4, self.output_tokens),
            long_tokens=min(4000, self.long_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class WordScenario(Scenario):
    """Prompts of words in no order, of a known length in tokens of the default model, and greedy answers of a fixed one.

    `shared_tokens` of each prompt are the same words for all requests of a round; everything else differs, from the first word on. With
    `is_copy` the answer is the text in the prompt, if the model does what it is asked to.
    """

    prompt_tokens: int
    shared_tokens: int = 0
    is_copy: bool = False

    def conversations(self, seed: str, count: int) -> list[Conversation]:
        return [Conversation((prompt,)) for prompt in self.prompts(seed, count)]

    def prompts(self, seed: str, num_prompts: int) -> list[str]:
        """User messages. The same seed gives the same ones; other seeds give others, shared words included."""
        if self.is_copy:
            num_sentences = (self.prompt_tokens - TEMPLATE_TOKENS - PROOFREAD_TOKENS) // SENTENCE_TOKENS
            return [sentences(num_sentences, f"{seed} {index}") + PROOFREAD for index in range(num_prompts)]
        shared = words(self.shared_tokens, f"{seed} shared")
        num_own_words = self.prompt_tokens - self.shared_tokens - INSTRUCTION_TOKENS - TEMPLATE_TOKENS
        return [" ".join(shared + words(num_own_words, f"{seed} {index}")) + INSTRUCTION for index in range(num_prompts)]


@dataclass(frozen=True, kw_only=True)
class NaturalScenario(Scenario):
    """Requests as people and their programs make them: answers end where the model ends them, and say what it makes of the question."""

    write: natural.Writer
    temperature: float = 0.0

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": 0} if self.temperature else {"temperature": 0}

    @property
    def runs_to_full_length(self) -> bool:
        return False

    def conversations(self, seed: str, count: int) -> list[Conversation]:
        return self.write(seed, count)


def words(count: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def sentences(count: int, seed: str) -> str:
    chosen = iter(words(count * SENTENCE_WORDS, seed))
    return " ".join(SENTENCE.format(*(next(chosen) for _ in range(SENTENCE_WORDS))) for _ in range(count))


def long_prompt(num_tokens: int, seed: str) -> str:
    """The user message of a request that is not measured."""
    return " ".join(words(num_tokens - INSTRUCTION_TOKENS - TEMPLATE_TOKENS, f"{seed} long")) + INSTRUCTION


SCENARIOS: list[Scenario] = [
    WordScenario(name="concurrency-1", concurrency=1, num_conversations=4, prompt_tokens=118, output_tokens=128),
    WordScenario(name="concurrency-8", concurrency=8, num_conversations=16, prompt_tokens=118, output_tokens=128),
    WordScenario(name="concurrency-32", concurrency=32, num_conversations=32, prompt_tokens=118, output_tokens=128),
    WordScenario(name="prefill", concurrency=8, num_conversations=8, prompt_tokens=1490, output_tokens=1),
    WordScenario(name="shared-prefix", concurrency=4, num_conversations=16, prompt_tokens=1070, output_tokens=16, shared_tokens=1000),
    WordScenario(name="ngram", concurrency=1, num_conversations=4, prompt_tokens=207, output_tokens=96, is_copy=True),
    WordScenario(
        name="adapters-8", concurrency=8, num_conversations=16, prompt_tokens=118, output_tokens=128, num_adapters=8, by_default=False
    ),
    WordScenario(name="concurrency-128", concurrency=128, num_conversations=128, prompt_tokens=118, output_tokens=128, by_default=False),
    WordScenario(
        name="long-among-short",
        concurrency=31,
        num_conversations=31,
        prompt_tokens=118,
        output_tokens=128,
        long_tokens=32_000,
        by_default=False,
    ),
    *(
        NaturalScenario(
            name=f"prose-{streams}",
            concurrency=streams,
            num_conversations=max(4, streams if streams > 8 else 2 * streams),
            output_tokens=256,
            temperature=0.8,
            write=natural.prose,
            by_default=streams < 128,
        )
        for streams in (1, 8, 32, 128)
    ),
    NaturalScenario(name="agent", concurrency=4, num_conversations=4, output_tokens=128, write=natural.tool_loops),
    NaturalScenario(name="agent-1", concurrency=1, num_conversations=6, output_tokens=128, write=natural.tool_loops, by_default=False),
    NaturalScenario(name="agent-tasks", concurrency=3, num_conversations=3, output_tokens=192, write=tool_tasks),
    NaturalScenario(name="rag", concurrency=8, num_conversations=24, output_tokens=64, write=natural.questions_on_documents),
    NaturalScenario(name="code-edit", concurrency=2, num_conversations=4, output_tokens=640, write=natural.code_edits),
]
