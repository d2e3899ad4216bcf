"""A draft model changes no answer, proposes what it would say, and is refused where it cannot."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import batch
from penstock.engine.build import build_core, load_draft
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.model.drafters.configured import check_draft, drafter_over
from penstock.engine.model.drafters.drafter import DraftModel, Feed
from penstock.engine.model.loader import LoadedModel
from penstock.engine.multimodal.vectors import embeds_at
from penstock.engine.scheduling.step import Speculation
from penstock.engine.speculation.proposers import SequenceDraft
from penstock.plugins.reasoning.formats import FORMATS
from tests.engines import loaded_model
from tests.fakes import THINK, byte_tokenizer, drive, make_request, tokens
from tests.matchers import Grammar, Walk
from tests.tiny_models import WINDOW, tiny_model

BLOCK_SIZE = 8


@functools.cache
def model_with(noise: float | None = None, name: str = "llama") -> LoadedModel:
    """The same weights each time, but for noise."""
    model = tiny_model(name)
    if noise is not None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return loaded_model(model)


@contextmanager
def engine(
    noise: float | None, *, num_blocks: int = 128, model: Callable[..., LoadedModel] = model_with, **settings: Any
) -> Iterator[EngineCore]:
    """With a draft model whose weights are the model's and noise, or without one."""
    loaded, draft = model(), None if noise is None else model(noise)
    per_block = block_bytes(loaded.kv_layout, BLOCK_SIZE, loaded.dtype) * (1 if draft is None else 2)
    config = EngineConfig(
        kv_cache_memory=num_blocks * per_block,
        block_size=BLOCK_SIZE,
        compile="off",
        speculation="none" if draft is None else "draft",
        draft_model=None if draft is None else "tiny",
        max_num_seqs=8,
        **settings,
    )
    core = build_core(loaded, byte_tokenizer(), config, draft=draft)
    core.scheduler.lengths = None
    if core.scheduler.speculation is not None:
        core.scheduler.speculation.draft_cost = 0.1
    try:
        yield core
        core.check_integrity()
    finally:
        core.close()
        core.runner.shutdown()


PLAN: list[dict[str, Any]] = [
    {"prompt": list(range(3, 30)), "max_tokens": 40},
    {"prompt": list(range(3, 30)), "max_tokens": 30, "n": 2, "temperature": 1.0, "seed": 5},
    {"prompt": [5] * 40, "max_tokens": 25, "temperature": 0.7, "seed": 1, "repetition_penalty": 1.2},
    {"prompt": [9, 4], "max_tokens": 20, "grammar": lambda: Grammar(lambda: Walk(3, forces=True))},
    {"prompt": [9, 4, 7], "max_tokens": 20, "min_tokens": 4, "logprobs": 1},
    {"prompt": list(range(40, 70)), "max_tokens": 1},
    {"prompt": [21, 22, THINK], "max_tokens": 30, "parser": FORMATS["deepseek_r1"], "thinking_token_budget": 5},
    {"prompt": list(range(60, 90)), "max_tokens": 30, "stop": tuple("abcdefgh"), "temperature": 1.0, "seed": 2},
    {"prompt": list(range(3, 30)), "max_tokens": 20, "prediction": [11, 12, 13, 14]},
]


def answers(core: EngineCore, *, rounds: int = 2) -> list[list[int]]:
    said = []
    for number in range(rounds):
        for index, options in enumerate(PLAN):
            made = {name: value() if name == "grammar" else value for name, value in options.items()}
            core.add(make_request(f"{number} {index}", ignore_eos="grammar" not in options, **made))
        deltas = drive(core)
        for index, options in enumerate(PLAN):
            said += [tokens(deltas[f"{number} {index}"], one) for one in range(options.get("n", 1))]
    return said


@functools.cache
def plain_answers() -> list[list[int]]:
    with engine(None) as core:
        return answers(core)


SETTINGS: list[tuple[int, dict[str, Any]]] = [(128, {}), (18, {}), (128, {"enable_prefix_caching": False, "max_num_batched_tokens": 16})]


@pytest.mark.parametrize(
    ("noise", "num_blocks", "settings"),
    [
        *(pytest.param(0.003, *settings, marks=[pytest.mark.thorough] * (settings is not SETTINGS[1])) for settings in SETTINGS),
        *(pytest.param(noise, *SETTINGS[0]) for noise in (0.0, 1.0)),
        *(pytest.param(noise, *settings, marks=pytest.mark.thorough) for noise in (0.0, 1.0) for settings in SETTINGS[1:]),
    ],
)
def test_answers_are_the_same_with_a_draft_model(noise: float, num_blocks: int, settings: dict[str, Any]) -> None:
    with engine(noise, num_blocks=num_blocks, **settings) as core:
        assert answers(core) == plain_answers()
        stats = core.stats()
        assert noise or stats.num_accepted_tokens > 0
        assert (stats.num_preemptions > 0) == (num_blocks == 18)


def test_a_draft_model_with_the_same_weights_is_always_right() -> None:
    with engine(0.0) as core:
        core.add(make_request("one", list(range(3, 30)), max_tokens=60, ignore_eos=True))
        [deltas] = drive(core).values()
        stats = core.stats()
    assert len(tokens(deltas)) == 60
    assert stats.drafts["draft"].num_drafted == stats.num_accepted_tokens
    assert stats.num_steps < 20


@pytest.mark.parametrize(("num_blocks", "max_num_batched_tokens"), [(128, 512), (128, 16), (20, 512)])
def test_it_is_right_in_every_batch(num_blocks: int, max_num_batched_tokens: int) -> None:
    """With chunked prefill, forks, a shared prefix and preemption its keys and values are those of the same tokens."""
    with engine(0.0, num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens) as core:
        for number in range(4):
            n = 1 + number % 2
            core.add(make_request(str(number), [*range(3, 40), number], n=n, max_tokens=20 + number, ignore_eos=True))
        drive(core)
        stats = core.stats()
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens
    assert (stats.num_preemptions > 0) == (num_blocks == 20)


def test_a_prefix_from_the_cache_is_known_to_the_draft_model() -> None:
    """A later request finds the blocks of an earlier one: the draft model has computed them as well."""
    with engine(0.0) as core:
        for number in range(2):
            core.add(make_request(str(number), list(range(3, 60)), max_tokens=30, ignore_eos=True))
            [deltas] = drive(core).values()
        assert deltas[0].prompt is not None
        assert deltas[0].prompt.num_cached_tokens > 40
        assert core.stats().num_draft_tokens == core.stats().num_accepted_tokens


def test_a_draft_model_that_is_wrong_is_soon_left_alone() -> None:
    with engine(1.0) as core:
        core.add(make_request("one", list(range(3, 30)), max_tokens=90, ignore_eos=True))
        drive(core)
        drafter = core.runner.drafter
        assert drafter is not None
        assert core.stats().num_draft_tokens < 40
        assert drafter.num_passes < 40


def test_it_runs_for_as_many_tokens_as_pay() -> None:
    def num_passes(*accuracies: float, cost: float = 0.3) -> int:
        return Speculation(6.0, draft_cost=cost).num_passes(list(accuracies), num_sequences=len(accuracies))

    assert num_passes(0.9) > num_passes(0.7) > num_passes(0.4) == 0
    assert num_passes(0.9, cost=0.1) > num_passes(0.9, cost=0.5)
    assert num_passes(0.9) > num_passes(*[0.9] * 8)
    assert num_passes() == 0


def test_the_accuracy_is_that_of_what_the_draft_model_said() -> None:
    token_ids = [1, 2]
    sequence = SequenceDraft(token_ids)
    first = sequence.accuracy
    assert sequence.read()
    assert not sequence.has_guess
    sequence.offer([3, 4, 5])
    assert sequence.propose(2) == [3, 4]
    token_ids += [3, 4]
    assert sequence.read()
    assert not sequence.has_guess
    assert sequence.accuracy > first
    sequence.offer([9])
    token_ids.append(5)
    assert sequence.read()
    assert sequence.accuracy < 1 - (1 - first) * 0.8**2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": "draft"}, "go together"),
        ({"draft_model": "smollm2"}, "go together"),
        ({"speculation": "draft", "draft_model": "x", "async_scheduling": True}, "--async-scheduling"),
    ],
)
def test_a_draft_model_is_refused_where_it_cannot_run(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_draft(EngineConfig(**settings), byte_tokenizer(), Path())


def test_a_draft_model_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.model.drafters.configured.resolve_device", lambda device: torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="on the CPU only, and the model runs on cuda:0"):
        check_draft(EngineConfig(speculation="draft", draft_model="x"), byte_tokenizer(), Path())


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.serialized().replace("</think>", "</thought>"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(speculation="draft", draft_model=str(tmp_path))
    with pytest.raises(ConfigurationError, match="token 258 is '</thought>', and the model's '</think>'"):
        check_draft(config, tokenizer, Path())


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[Feed]:
    """What draft models compute."""
    found: list[Feed] = []
    run = DraftModel._run

    def record(self: DraftModel, feeds: list[Feed]) -> list[int]:
        found.extend(feeds)
        return run(self, feeds)

    monkeypatch.setattr(DraftModel, "_run", record)
    return found


def test_a_sequence_gets_no_drafts_beyond_the_context_of_the_draft_model(fed: list[Feed]) -> None:
    def model(noise: float | None = None) -> LoadedModel:
        return replace(model_with(noise), max_model_len=128 if noise is None else 48)

    said = []
    for noise in (None, 0.0):
        with engine(noise, model=model) as core:
            core.add(make_request("through", list(range(3, 30)), max_tokens=60, ignore_eos=True))
            core.add(make_request("beyond", list(range(3, 60)), max_tokens=20, ignore_eos=True))
            core.add(make_request("within", list(range(60, 70)), max_tokens=20, ignore_eos=True))
            deltas = drive(core)
            said.append([tokens(deltas[name]) for name in ("through", "beyond", "within")])
            stats = core.stats()
    assert said[0] == said[1]
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens
    assert max(feed.stop for feed in fed) == 48


def test_a_draft_model_computes_blocks_that_were_loaded_from_files(
    tmp_path: Path, fed: list[Feed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens in each step, for two sequences at once."""
    monkeypatch.setattr(batch, "CATCH_UP_TOKENS", 16)

    def model(noise: float | None = None) -> LoadedModel:
        return replace(model_with(noise), weights_digest="tiny")

    prompt = list(range(3, 52))
    said = []
    for noise in (None, 0.0):
        with engine(noise, model=model, kv_cache_dir=str(tmp_path)) as core:
            core.add(make_request("first", prompt, max_tokens=40, ignore_eos=True))
            core.add(make_request("beside", prompt, max_tokens=20, ignore_eos=True))
            deltas = drive(core, max_steps=10**6)
            core.add(make_request("again", [*prompt, 9], max_tokens=20, ignore_eos=True))
            deltas |= drive(core, max_steps=10**6)
            said.append([tokens(deltas[name]) for name in ("first", "beside", "again")])
            stats = core.stats()
            assert core.scheduler.pool.undrafted == set()
    assert said[0] == said[1]
    assert stats.persistence is not None
    assert stats.persistence.num_hits >= 5
    assert min(feed.first for feed in fed) == 0
    assert max(len(feed.token_ids) for feed in fed) < 24
    assert 10 < stats.num_draft_tokens == stats.num_accepted_tokens


def test_a_draft_model_with_a_shorter_context_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tokenizer = byte_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.serialized())
    tiny_model("llama").save_pretrained(tmp_path)
    config = EngineConfig(speculation="draft", draft_model=str(tmp_path), dtype="float32")
    draft: Any = load_draft(config, tokenizer, loaded_model(tiny_model("llama"), max_model_len=1000))
    assert draft.max_model_len == 512
    assert "a context of 512 tokens" in caplog.text


def test_a_draft_model_with_a_smaller_vocabulary_is_refused() -> None:
    with engine(None) as core, pytest.raises(ConfigurationError, match="it knows 320 tokens, and the model 321"):
        drafter_over(model_with(), model_with(), core.runner.cache, EngineConfig(), 321)


@pytest.mark.parametrize("num_blocks", [128, pytest.param(18, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "windows"), [("gemma2", [None, WINDOW]), ("mistral", [None])])  # mistral's layers all have a window
def test_a_draft_model_follows_the_layers_that_keep_the_whole_text(
    name: str, windows: list[int | None], num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences are longer than the window, and the draft model has windows as well: with the same weights it is right."""
    caplog.set_level("INFO")
    model = functools.partial(model_with, name=name)
    said = []
    for noise in (None, 0.0):
        # Of gemma2's layers each has blocks of its own.
        with engine(noise, num_blocks=num_blocks * (2 if name == "gemma2" else 1), model=model) as core:
            for number in range(4):
                core.add(make_request(str(number), [*range(3, 40), number], n=1 + number % 2, max_tokens=30, ignore_eos=True))
            deltas = drive(core)
            core.add(make_request("again", [*range(3, 40), 1], max_tokens=20, ignore_eos=True))
            deltas |= drive(core)
            stats = core.stats()
            said.append({request_id: tokens(own) for request_id, own in deltas.items()})
            found = [group.sliding_window for group in core.runner.cache.groups]
    assert said[0] == said[1]
    assert list(dict.fromkeys(found)) == windows
    assert ("as with --no-hybrid-kv-cache" in caplog.text) == (name == "mistral")
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens
    assert stats.num_prefix_cache_hits > 0
    assert (stats.num_preemptions > 0) == (num_blocks == 18)


@pytest.mark.parametrize("max_num_batched_tokens", [512, 16])
def test_prompts_with_vectors_get_no_drafts_and_leave_their_text_to_others(max_num_batched_tokens: int) -> None:
    """A draft model sees token ids alone. What comes before the vectors is computed all the same, as other prompts may begin with it."""
    text = list(range(3, 30))
    vectors = embeds_at(range(27, 33), torch.ones(6, 64))
    said = []
    for noise in (None, 0.0):
        with engine(noise, max_num_batched_tokens=max_num_batched_tokens) as core:
            core.add(make_request("image", text + [0] * 6 + [4, 5], embeds=(vectors,), max_tokens=20, ignore_eos=True))
            said.append(tokens(drive(core)["image"]))
            assert core.stats().num_draft_tokens == 0
            core.add(make_request("text", [*text[:24], 7], max_tokens=20, ignore_eos=True))
            said.append(tokens(drive(core)["text"]))
            assert core.stats().num_prefix_cache_hits == 24
            assert core.stats().num_draft_tokens == core.stats().num_accepted_tokens
            assert noise is None or core.stats().num_draft_tokens > 0
    assert said[:2] == said[2:]
