"""The proposers of draft tokens as a user of the library chooses them: by name, from a plug-in's file, or a draft model."""

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ConfigurationError, SamplingParams
from penstock.engine.scheduling.step import Speculation
from penstock.llm.outputs import Counter
from tests.engine.speculation.test_draft_heads import eagle_config, eagle_modules, random_weights
from tests.engine.speculation.test_draft_heads import write_head as write_eagle
from tests.llm.model_directory import SETTINGS, write_model

PLUGIN = """
from penstock import Proposer, hookimpl, proposer_of

@hookimpl
def register_proposers(register):
    register("again", lambda: proposer_of(lambda token_ids: token_ids[-4:]))
"""
PROMPTS = ["hello hello hello", "one two one two"]


def said(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def drafted(llm: LLM) -> dict[str, float]:
    name = "spec_decode_num_draft_tokens_by_proposer"
    metrics = [metric for metric in llm.get_metrics() if isinstance(metric, Counter) and metric.name.endswith(name)]
    return {metric.labels["proposer"]: metric.value for metric in metrics}


def write_head(directory: Path) -> Path:
    """An EAGLE-3 head of random weights."""
    config = eagle_config(vocab_size=262)
    weights = random_weights(eagle_modules(eagle_config(vocab_size=262), {"lm_head.weight"}).state_dict())
    write_eagle(directory, config, weights)
    return directory


@pytest.mark.parametrize(("name", "source"), [("suffix", ""), ("again", ""), ("draft", "model"), ("draft", "head")])
def test_a_proposer_changes_no_answer(
    name: str, source: str, llm: LLM, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "again.py").write_text(PLUGIN)
    more: dict[str, dict[str, Any]] = {"again": {"plugins": [str(tmp_path / "again.py")]}}
    if source == "model":
        more[name] = {"draft_model": str(write_model(tmp_path / "draft", num_hidden_layers=1, layer_types=["full_attention"]))}
    elif source == "head":
        more[name] = {"draft_model": str(write_head(tmp_path / "head"))}
        monkeypatch.setattr(Speculation, "num_passes", lambda *_, **__: 2)  # in a model as small as this it pays for none
    with LLM(model_dir, speculation=name, **more.get(name, {}), **SETTINGS) as other:
        assert said(other) == said(llm)
        assert said(other) == said(llm)
        counts = drafted(other)
        assert counts[name] > 0
        other.sleep(level=2)
        other.wake_up()
        assert said(other) == said(llm)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": "sufix"}, "did you mean 'suffix'"),
        ({"speculation": "draft"}, "go together"),
        ({"speculation": "llguidance"}, "it is the name of a grammar backend"),
    ],
)
def test_a_proposer_that_is_not_there_is_refused(settings: dict[str, Any], reason: str, model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LLM(model_dir, **settings, **SETTINGS)


def test_a_draft_model_with_another_vocabulary_is_refused_before_the_weights_are_read(model_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<tool_call>", "<tool_calls>"))
    with pytest.raises(ConfigurationError, match="token 258 is '<tool_calls>', and the model's '<tool_call>'"):
        LLM(model_dir, speculation="draft", draft_model=str(other), **SETTINGS)
