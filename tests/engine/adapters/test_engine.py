"""Adapters in the engine: every answer is what peft's own model gives for the same prompt, whatever runs beside it."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.registry import Adapter
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.model.loader import LoadedModel
from penstock.engine.multimodal.vectors import embeds_at
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.speculation.proposers import SequenceNgrams
from tests.engines import core_over, loaded_model
from tests.fakes import VOCAB_SIZE, beam_request, drive, make_request, tokens
from tests.tiny_adapters import LINEARS, adapted_model, quiet, write_adapter, write_encoded_prompt, write_tuned_prompt
from tests.tiny_models import tiny_model

NUM_NEW_TOKENS = 10
CLEAR_MARGIN = 1e-3
BLOCK_SIZE = 8
TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "qwen3_moe": LINEARS[:4],
    "gpt_oss": LINEARS[:4],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}
# Of one model each has its own rank, and all but the first change some layers only.
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"r": 8, "use_rslora": True, "layers_to_transform": [0, 2]},
    {"r": 2, "lora_alpha": 3, "rank_pattern": {".*0.*": 5}, "alpha_pattern": {".*1.*": 7}},
)
TEXT = random.Random(1).choices(range(VOCAB_SIZE), k=45)
PROMPTS = [TEXT[:length] for length in (1, 9, 26, 45)]


@dataclass(frozen=True)
class Subject:
    """A model with adapters, None for none, and what peft says of each prompt: None where rounding may change that."""

    loaded: LoadedModel
    directories: list[Path | None]
    answers: dict[tuple[int, int], list[int] | None]

    def answer(self, adapter: int, prompt: int) -> list[int]:
        answer = self.answers[adapter, prompt]
        assert answer is not None
        return answer


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Subject:
        directory = tmp_path_factory.mktemp(name)
        settings = {"target_modules": TARGETS.get(name, LINEARS), "fan_in_fan_out": name == "gpt2"}
        directories: list[Path | None] = [None]
        for number, config in enumerate(CONFIGS):
            directories.append(write_adapter(tiny_model(name), directory / str(number), seed=number, **settings | config))
        if name == "llama":
            directories.append(write_encoded_prompt(tiny_model(name), directory / "encoded"))
            directories.append(write_tuned_prompt(tiny_model(name), directory / "tuned"))
        answers: dict[tuple[int, int], list[int] | None] = {}
        for number, adapter in enumerate(directories):
            model = tiny_model(name) if adapter is None else adapted_model(tiny_model(name), adapter)
            answers |= {(number, place): greedy(model, prompt) for place, prompt in enumerate(PROMPTS)}
        assert len({tuple(answer) for answer in answers.values() if answer}) > 6, "the adapters change too little"
        return Subject(loaded_model(tiny_model(name), max_model_len=64), directories, answers)

    return make


def greedy(model: Any, prompt: list[int]) -> list[int] | None:
    input_ids = torch.tensor([prompt])
    with quiet():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            output_scores=True,
            return_dict_in_generate=True,
            suppress_tokens=list(range(VOCAB_SIZE, model.config.vocab_size)) or None,
        )
    best_T2 = torch.cat(output.scores).topk(2).values
    is_clear = float((best_T2[:, 0] - best_T2[:, 1]).min()) > CLEAR_MARGIN
    return output.sequences[0, len(prompt) :].tolist() if is_clear else None


@contextmanager
def engine(subject: Subject, **settings: Any) -> Iterator[tuple[EngineCore, list[Adapter | None]]]:
    """With all adapters of the subject, the first of them none."""
    core = core_over(subject.loaded, **{"block_size": BLOCK_SIZE, "enable_lora": True} | settings)
    try:
        yield core, [None if path is None else read(core, path) for path in subject.directories]
    finally:
        core.check_integrity()
        core.runner.shutdown()


def read(core: EngineCore, directory: Path) -> Adapter:
    assert core.runner.adapted is not None
    return core.runner.adapted.reader.read(directory.name, directory)


def run_all(core: EngineCore, adapters: list[Adapter | None], *, stagger: int = 0) -> dict[tuple[int, int], list[int]]:
    """All prompts with all adapters at once, each request `stagger` steps after the one before."""
    said: dict[str, list[SequenceDelta]] = {}
    for place, prompt in enumerate(PROMPTS):
        for number, adapter in enumerate(adapters):
            core.add(make_request(f"{number} {place}", prompt, adapter=adapter, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
            for _ in range(stagger):
                for request_id, deltas in core.step().items():
                    said.setdefault(request_id, []).extend(deltas)
    for request_id, deltas in drive(core).items():
        said.setdefault(request_id, []).extend(deltas)
    return {(int(request_id.split()[0]), int(request_id.split()[1])): tokens(deltas) for request_id, deltas in said.items()}


def assert_same(got: dict[tuple[int, int], list[int]], subject: Subject) -> None:
    clear = {key: answer for key, answer in subject.answers.items() if answer is not None}
    assert {key: got[key] for key in clear} == clear
    assert got.keys() == subject.answers.keys()


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 12, "max_num_batched_tokens": 30},
    "one slot": {"max_loras": 1},
    "ahead": {"async_scheduling": True},
}


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("phi3", "qwen3_moe", "gemma2", "cohere2", "olmo2", "deepseek_v3")),
    ],
)
def test_rows_of_any_adapters_in_a_batch_get_what_peft_gives(name: str, subject_of: Any) -> None:
    subject = subject_of(name)
    with engine(subject) as (core, adapters):
        assert_same(run_all(core, adapters), subject)
        again = run_all(core, adapters)  # from the prefix cache
        assert core.stats().num_prefix_cache_hits > 0
    assert_same(again, subject)


@pytest.mark.parametrize("case", SETTINGS)
def test_however_requests_are_cut_cached_or_preempted_adapters_stay_theirs(case: str, subject_of: Any) -> None:
    subject = subject_of("llama")
    with engine(subject, **SETTINGS[case]) as (core, adapters):
        assert_same(run_all(core, adapters, stagger=1), subject)
        assert (core.stats().num_preemptions > 0) == (case == "preemption")


def guess(self: SequenceNgrams, num_tokens: int, *, answers: list[list[int]]) -> list[int]:
    """What the adapter of one of the requests says, but for every third token."""
    known = self._token_ids
    whole = next((answer for answer in answers if answer[: len(known)] == known), [])
    drafted = [(token_id + (place % 3 == 0)) % VOCAB_SIZE for place, token_id in enumerate(whole[len(known) :], start=len(known))]
    return (drafted + [0] * num_tokens)[:num_tokens]


def test_draft_tokens_are_checked_with_the_adapter(subject_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("llama")
    answers = [PROMPTS[place] + answer for (_, place), answer in subject.answers.items() if answer is not None]
    monkeypatch.setattr(SequenceNgrams, "accuracy", property(lambda self: 0.9, lambda self, value: None), raising=False)
    monkeypatch.setattr(SequenceNgrams, "propose", functools.partialmethod(guess, answers=answers))
    with engine(subject, speculation="ngram", adaptive_speculation=False) as (core, adapters):
        assert_same(run_all(core, adapters), subject)
        assert core.stats().num_accepted_tokens > 0


def test_forks_and_beams_keep_the_adapter(subject_of: Any) -> None:
    subject = subject_of("llama")
    with engine(subject) as (core, adapters):
        for number, adapter in enumerate(adapters):
            core.add(make_request(f"n{number}", PROMPTS[2], adapter=adapter, n=2, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
            search = beam_request(f"b{number}", PROMPTS[2], BeamSearchParams(beam_width=1, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
            search.adapter = adapter
            core.add(search)
        said = drive(core)
    for number in range(len(adapters)):
        expected = subject.answers[number, 2]
        if expected is not None:
            assert [tokens(said[f"n{number}"], index) for index in (0, 1)] == [expected, expected]
            assert tokens(said[f"b{number}"]) == expected


def test_virtual_tokens_count_as_tokens_of_the_prompt(subject_of: Any) -> None:
    with engine(subject_of("llama")) as (core, adapters):
        tuned = adapters[-1]
        core.add(make_request("tuned", PROMPTS[1], adapter=tuned, max_tokens=100, ignore_eos=True))
        [deltas] = drive(core).values()
        assert deltas[0].prompt is not None
        assert deltas[0].prompt.num_tokens == 9 + len(PROMPTS[1])
        assert len(tokens(deltas)) == 64 - 9 - len(PROMPTS[1])
        with pytest.raises(InvalidRequest, match="the prompt has 69 tokens"):
            core.add(make_request("long", TEXT + TEXT[:15], adapter=tuned, max_tokens=1))
        with pytest.raises(InvalidRequest, match="the prompt holds vectors"):
            core.add(make_request("scored", PROMPTS[1], adapter=tuned, max_tokens=1, prompt_logprobs=1))


def test_vectors_in_a_prompt_are_computed_with_the_adapter(subject_of: Any) -> None:
    subject = subject_of("llama")
    table: Any = subject.loaded.model.get_input_embeddings()
    with engine(subject) as (core, adapters), torch.inference_mode():
        for number, adapter in enumerate(adapters):
            prompt = PROMPTS[2]
            vectors = embeds_at(range(3, 9), table(torch.tensor(prompt[3:9])).clone())
            hidden = [*prompt[:3], *[0] * 6, *prompt[9:]]
            settings: dict[str, Any] = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
            core.add(make_request(str(number), hidden, adapter=adapter, embeds=[vectors], **settings))
        said = drive(core)
    for number in range(len(adapters)):
        expected = subject.answers[number, 2]
        assert expected in (None, tokens(said[str(number)]))


def test_nothing_of_adapters_is_in_the_model_between_their_steps(subject_of: Any) -> None:
    subject = subject_of("llama")
    with engine(subject) as (core, adapters):
        run_all(core, adapters)
        assert not any("forward" in vars(module) for module in subject.loaded.model.modules())


def test_a_salt_never_finds_the_blocks_of_an_adapter(subject_of: Any) -> None:
    with engine(subject_of("llama")) as (core, adapters):
        adapter = adapters[1]
        assert adapter is not None
        core.add(make_request("a", PROMPTS[3], adapter=adapter, max_tokens=1))
        drive(core)
        for number, salt in enumerate((adapter.name, adapter.digest.hex(), adapter.digest.decode("latin-1"))):
            core.add(make_request(str(number), PROMPTS[3], cache_salt=salt, max_tokens=1))
        drive(core)
        assert core.stats().num_prefix_cache_hits == 0


def test_an_engine_without_adapters_refuses_them(subject_of: Any) -> None:
    subject = subject_of("llama")
    core = core_over(subject.loaded)
    with pytest.raises(InvalidRequest, match="built without adapters"):
        core.add(make_request(adapter=Adapter("a", "")))
    core.runner.shutdown()


def test_adapters_come_and_go_while_requests_of_them_run(subject_of: Any) -> None:
    subject = subject_of("llama")
    chance = random.Random(0)
    with engine(subject, max_loras=2, num_blocks=12, max_num_batched_tokens=20, max_num_seqs=6) as (core, _):
        wanted: dict[str, list[int]] = {}
        said: dict[str, list[SequenceDelta]] = {}
        for number in range(60):
            which, place = chance.randrange(len(subject.directories)), chance.randrange(len(PROMPTS))
            answer, directory = subject.answers[which, place], subject.directories[which]
            if answer is None:
                continue
            # Loaded anew, as after an unload: requests that run keep the one that they began with.
            adapter = None if directory is None else read(core, directory)
            priority = chance.choice((0, 0, 0, 1))
            wanted[str(number)] = answer
            core.add(
                make_request(str(number), PROMPTS[place], adapter=adapter, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, priority=priority)
            )
            if chance.random() < 0.1:
                core.abort(gone := chance.choice(list(wanted)))
                if gone not in said or len(tokens(said[gone])) < NUM_NEW_TOKENS:
                    del wanted[gone]
                    said.pop(gone, None)
            for _ in range(chance.randrange(4)):
                if core.has_work:
                    for request_id, deltas in core.step().items():
                        said.setdefault(request_id, []).extend(deltas)
                    core.check_integrity()
        for request_id, deltas in drive(core).items():
            said.setdefault(request_id, []).extend(deltas)
        assert core.stats().num_preemptions > 0
    assert {request_id: tokens(said[request_id]) for request_id in wanted} == wanted
