"""A replica of two ranks in a placement group of a real Ray, with adapters that are loaded as requests ask for them."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from openai import APIConnectionError, InternalServerError, NotFoundError, OpenAI
from transformers import AutoModelForCausalLM

from penstock import LLM, LoRARequest, SamplingParams
from tests.integrations.local_ray import LocalRay, local_ray, title
from tests.llm.model_directory import SETTINGS, write_model
from tests.tiny_adapters import write_adapter

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'penstock[ray]'"),
]

PROMPT, NUM_TOKENS = "Once upon a time", 20
NAMES = ("first", "second")
FLAGS = ["--dtype", "float32", "--compile", "off", "--kv-cache-memory", "4MiB", "--threads", "1", "--device", "cpu"]
FLAGS += ["--tensor-parallel-size", "2", "--max-loras", "1", "--max-cpu-loras", "1", "--served-model-name", "tiny"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    model = AutoModelForCausalLM.from_pretrained(write_model(directory / "model"))
    for seed, name in enumerate(NAMES):
        write_adapter(model, directory / "adapters" / name, seed=seed + 1)
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, str]:
    """What one process says, with each adapter and without."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(directory / "model"), enable_lora=True, **SETTINGS) as llm:
        requests = {"tiny": None} | {
            name: LoRARequest(name, number, str(directory / "adapters" / name)) for number, name in enumerate(NAMES, start=1)
        }
        return {
            name: llm.generate(PROMPT, params, lora_request=request, use_tqdm=False)[0].outputs[0].text
            for name, request in requests.items()
        }


@pytest.fixture(scope="module")
def ray_of_ranks(directory: Path) -> Iterator[LocalRay]:
    flags = ["--model", str(directory / "model"), "--adapter-dir", str(directory / "adapters"), *FLAGS]
    with local_ray(directory / "ray.log", "--replicas", "1", "--", *flags) as served:
        yield served


def said(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True})
    return answer.choices[0].text


def test_two_ranks_say_what_one_process_says_with_each_adapter(ray_of_ranks: LocalRay, expected: dict[str, str]) -> None:
    assert len(set(expected.values())) == 3
    client = OpenAI(base_url=ray_of_ranks.url, api_key="none", max_retries=0)
    for model in ("tiny", "first", "second", "first"):  # each has to leave for the other: --max-cpu-loras is 1
        assert said(client, model) == expected[model]
    assert [model.id for model in client.models.list()] == ["tiny", "first"]
    with pytest.raises(NotFoundError, match="third"):
        said(client, "third")


def test_a_replica_that_has_lost_a_rank_is_replaced(ray_of_ranks: LocalRay, expected: dict[str, str]) -> None:
    """The engine fails with the rank, and with that the replica's check of health."""
    family = psutil.Process(ray_of_ranks.process.pid).children(recursive=True)
    (rank,) = (process for process in family if " worker --join " in title(process) and "penstock.server" in title(process))
    rank.kill()
    client = OpenAI(base_url=ray_of_ranks.url, api_key="none", max_retries=0, timeout=60)
    deadline = time.monotonic() + 200
    while True:
        assert time.monotonic() < deadline
        try:
            text = said(client, "tiny")
        except (InternalServerError, APIConnectionError):
            time.sleep(1)
        else:
            assert text == expected["tiny"]
            return
