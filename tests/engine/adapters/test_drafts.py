"""Draft heads beside adapters: answers are those without a head, and drafts are made of the states of the model with the row's adapter."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from penstock.engine.adapters.registry import AdapterRows
from penstock.engine.model.adapted import NativeAdapters
from penstock.engine.model.drafters.eagle import eagle_head
from penstock.engine.model.drafters.heads import DraftHead
from penstock.engine.model.loader import LoadedModel
from tests.engine.model.test_native import needs_kernels
from tests.engine.speculation import test_draft_heads
from tests.engine.speculation.test_draft_heads import Pair, eagle_config, eagle_modules, engine, nextn_model, pair, random_weights
from tests.engines import loaded_model
from tests.fakes import drive, make_request, tokens
from tests.tiny_adapters import adapted_model, write_adapter
from tests.tiny_models import tiny_model

recorded = test_draft_heads.recorded
PROMPTS = [list(range(first, first + 27)) for first in (3, 40, 80)]  # with no adapter, with the first and with the second


def ask(loaded: LoadedModel, head: DraftHead | None, directories: list[Path]) -> list[list[int]]:
    """What each prompt is answered with its adapter, twice: from the prefix cache as well."""
    with engine(loaded, head, enable_lora=True) as core:
        assert core.runner.adapted is not None
        reader = core.runner.adapted.reader
        adapters = [None, *(reader.read(directory.name, directory) for directory in directories)]
        said = []
        for _ in range(2):
            for number, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True)):
                core.add(make_request(str(number), prompt, adapter=adapter, max_tokens=20, ignore_eos=True))
            deltas = drive(core)
            said += [tokens(deltas[str(number)]) for number in range(len(PROMPTS))]
        assert core.stats().num_prefix_cache_hits > 0
    return said


def write_adapters(model: PreTrainedModel, directory: Path, **settings: Any) -> list[Path]:
    """The second changes the last layer alone."""
    return [
        write_adapter(model, directory / "all", seed=1, **settings),
        write_adapter(model, directory / "last", seed=2, layers_to_transform=[2], **settings),
    ]


@pytest.mark.parametrize("kind", ["eagle", pytest.param("mtp", marks=pytest.mark.thorough)])
def test_drafts_are_made_of_what_the_model_computes_with_the_adapter(
    kind: str, tmp_path: Path, recorded: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    both = pair(kind)

    def model() -> PreTrainedModel:
        return tiny_model("llama") if kind == "eagle" else nextn_model("glm4_moe")

    directories = write_adapters(model(), tmp_path, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    expected = ask(both.loaded, None, directories)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert ask(both.loaded, both.head, directories) == expected
    plain = [both.plain, *(adapted_model(model(), directory) for directory in directories)]
    for number, prompt in enumerate(PROMPTS):
        own = Pair(both.loaded, both.head, plain[number], both.plain_head)
        drafts = [(token_ids, draft) for token_ids, draft in recorded if token_ids[0] == prompt[0]]
        assert len(drafts) > 10
        for token_ids, draft in drafts[::3]:
            assert draft == own.drafts(token_ids, len(draft))


@needs_kernels
def test_native_code_adds_the_updates_of_each_layer_where_it_stops_for_a_head(
    tmp_path: Path, recorded: list[tuple[tuple[int, ...], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[NativeAdapters] = []
    runs = NativeAdapters.runs

    def record(self: NativeAdapters, rows: AdapterRows) -> Any:
        steps.append(self)
        return runs(self, rows)

    monkeypatch.setattr(NativeAdapters, "runs", record)

    def model() -> PreTrainedModel:
        return tiny_model("llama", head_dim=64, hidden_size=64)

    loaded = loaded_model(model().bfloat16())
    config = eagle_config(head_dim=64)
    head = eagle_head(eagle_config(head_dim=64), loaded, random_weights(eagle_modules(config, set()).state_dict()))
    directories = write_adapters(model(), tmp_path)
    expected = ask(loaded, None, directories)
    assert steps
    steps.clear()
    assert ask(loaded, head, directories) == expected
    assert steps
    assert len(recorded) > 20
