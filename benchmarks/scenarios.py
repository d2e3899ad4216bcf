"""What is asked of a server: prompts of a known length, and how many of them at a time."""

import random
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """A number of requests, `concurrency` of them under way at any time. Lengths are in tokens of the default model.

    `shared_tokens` of each prompt are the same words for all requests of a round; everything else differs, from the first word on. With
    `is_copy` the answer is the text in the prompt, if the model does what it is asked to. With `long_tokens` one more request, with a
    prompt of that length, is being answered all the while and not measured. A scenario that is not `by_default` takes a server that is
    started for it, and runs only where it is named.
    """

    name: str
    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    is_copy: bool = False
    long_tokens: int = 0
    by_default: bool = True

    def prompts(self, seed: str, num_prompts: int) -> list[str]:
        """User messages. The same seed gives the same ones; other seeds give others, shared words included."""
        if self.is_copy:
            num_sentences = (self.prompt_tokens - TEMPLATE_TOKENS - PROOFREAD_TOKENS) // SENTENCE_TOKENS
            return [sentences(num_sentences, f"{seed} {index}") + PROOFREAD for index in range(num_prompts)]
        shared = words(self.shared_tokens, f"{seed} shared")
        num_own_words = self.prompt_tokens - self.shared_tokens - INSTRUCTION_TOKENS - TEMPLATE_TOKENS
        return [" ".join(shared + words(num_own_words, f"{seed} {index}")) + INSTRUCTION for index in range(num_prompts)]

    def long_prompt(self, seed: str) -> str:
        """The user message of the request that is not measured."""
        return " ".join(words(self.long_tokens - INSTRUCTION_TOKENS - TEMPLATE_TOKENS, f"{seed} long")) + INSTRUCTION

    def small(self) -> "Scenario":
        """The same, to see quickly that it works."""
        return replace(
            self,
            concurrency=min(2, self.concurrency),
            num_requests=2,
            output_tokens=min(4, self.output_tokens),
            long_tokens=min(4000, self.long_tokens),
        )


def words(count: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def sentences(count: int, seed: str) -> str:
    chosen = iter(words(count * SENTENCE_WORDS, seed))
    return " ".join(SENTENCE.format(*(next(chosen) for _ in range(SENTENCE_WORDS))) for _ in range(count))


SCENARIOS = [
    Scenario("concurrency-1", concurrency=1, num_requests=4, prompt_tokens=118, output_tokens=128),
    Scenario("concurrency-8", concurrency=8, num_requests=16, prompt_tokens=118, output_tokens=128),
    Scenario("concurrency-32", concurrency=32, num_requests=32, prompt_tokens=118, output_tokens=128),
    Scenario("prefill", concurrency=8, num_requests=8, prompt_tokens=1490, output_tokens=1),
    Scenario("shared-prefix", concurrency=4, num_requests=16, prompt_tokens=1070, output_tokens=16, shared_tokens=1000),
    Scenario("ngram", concurrency=1, num_requests=4, prompt_tokens=207, output_tokens=96, is_copy=True),
    Scenario("concurrency-128", concurrency=128, num_requests=128, prompt_tokens=118, output_tokens=128, by_default=False),
    Scenario(
        "long-among-short", concurrency=31, num_requests=31, prompt_tokens=118, output_tokens=128, long_tokens=32_000, by_default=False
    ),
]
