"""The file of --models: what it sets, and which key each mistake is at."""

from pathlib import Path

import pytest

from penstock.engine.config import AdapterSource, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.serving.models.file import ModelsFile, read_models_file
from penstock.serving.options import Arguments

EXAMPLE = """
memory = "12GiB"
wait = 90

[defaults]
max-num-seqs = 16
reasoning_parser = "deepseek_r1"

[models.small]
model = "smollm2"
aliases = ["gpt-4o-mini", "default"]
pin = true
quantization = "int4"
max_model_len = "4K"
adapters = { support = "adapters/support" }
default_chat_template_kwargs = { enable_thinking = false }

[models."sentence/embedder"]
model = "minilm"
ttl = 600
memory = "300MiB"
max_num_seqs = 4
"""


def read(tmp_path: Path, text: str, arguments: Arguments | None = None) -> ModelsFile:
    path = tmp_path / "models.toml"
    path.write_text(text.replace("adapters/", f"{tmp_path}/"), encoding="utf-8")
    (tmp_path / "support").mkdir(exist_ok=True)
    values = {option.name: value for option, value in (arguments or Arguments()).values()}
    return read_models_file(Arguments.of(values | {"models": str(path)}))


def test_each_model_has_its_own_options_over_the_defaults_and_the_command_line(tmp_path: Path) -> None:
    given = Arguments(engine=EngineConfig(max_num_seqs=99, max_waiting_requests=7), models_memory=2**30)
    file = read(tmp_path, EXAMPLE, given)
    small, embedder = file.models
    assert (file.num_bytes, file.wait_seconds) == (12 * 2**30, 90.0)
    assert small.model_names == ("small", "gpt-4o-mini", "default")
    assert small.adapter_names == ("support",)
    assert (small.kind, embedder.kind) == ("generate", "pooling")
    assert (small.pin, small.ttl, small.num_bytes) == (True, None, None)
    engine = small.arguments.engine
    assert (engine.model, engine.quantization, engine.max_model_len, engine.max_num_seqs) == ("smollm2", "int4", 4096, 16)
    assert engine.max_waiting_requests == 7
    assert engine.adapters == (AdapterSource("support", str(tmp_path / "support")),)
    assert small.arguments.served_model_names == small.model_names
    assert small.arguments.server.default_chat_template_kwargs == {"enable_thinking": False}
    assert (embedder.name, embedder.ttl, embedder.num_bytes) == ("sentence/embedder", 600.0, 300 * 2**20)
    assert embedder.arguments.engine.max_num_seqs == 4


def test_a_model_without_a_source_is_the_one_of_its_name(tmp_path: Path) -> None:
    assert read(tmp_path, '[models."Qwen/Qwen3-0.6B"]').models[0].arguments.engine.model == "Qwen/Qwen3-0.6B"


def test_a_pooling_model_ignores_inherited_options_of_models_that_generate(tmp_path: Path) -> None:
    embedder = read(tmp_path, EXAMPLE).models[1]
    assert embedder.arguments.reasoning_parser == "deepseek_r1"
    assert embedder.for_pooling().reasoning_parser == "auto"
    own = read(tmp_path, '[models.minilm]\nreasoning_parser = "deepseek_r1"').models[0]
    assert own.for_pooling().reasoning_parser == "deepseek_r1", "a mistake of the operator's, to be refused"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a", "not TOML: Expected ']' at the end of a table declaration (at end of document)"),
        ("", "models: there are no models: each is a table such as [models.small]"),
        ("models = 1", "models: this is a table: [models]"),
        ("[model.a]", "model: there is no such key; did you mean models?"),
        ("memory = 'much'\n[models.a]", "memory: 'much' is not a size such as 2GiB, 512MB or a number of bytes"),
        ("wait = true\n[models.a]", "wait: True is no value for it"),
        ("[models.a]\nquantisation = 'int4'", "models.a.quantisation: there is no such key; did you mean quantization?"),
        ("[models.a]\nquantization = 'int5'", "models.a.quantization: invalid choice: 'int5' (choose from auto, none, int4, int8)"),
        ("[models.a]\nmodel = 5", "models.a.model: 5 is no value for it: it takes ID|DIR|GGUF"),
        ("[models.a]\nmodel = './nowhere'", "models.a.model: --model ./nowhere: there is no such file or directory"),
        ("[models.a]\nmax_num_seqs = 0", "models.a.max_num_seqs: '0' is not an integer of 1 or more"),
        ("[models.a]\nmax_num_seqs = [1]", "models.a.max_num_seqs: [1] is no value for it: it takes N"),
        ("[models.a]\nprefix_caching = 'no'", "models.a.prefix_caching: 'no' is neither true nor false"),
        (
            "[models.a]\noverride_generation_config = {temperatur = 1}",
            "models.a.override_generation_config: temperatur: the names are temperature, top_p, top_k, min_p, repetition_penalty, "
            "max_new_tokens",
        ),
        ("[models.a]\npin = 1", "models.a.pin: 1 is neither true nor false"),
        ("[models.a]\nport = 80", "models.a.port: this is set for the whole server, by its flag"),
        ("[models.a]\nthreads = 1\nnum_threads = 2", "models.a.num_threads: this is another name of threads, which is set already"),
        ("[models.a]\naliases = 'b'", "models.a.aliases: this is a list of texts"),
        ("[models.a]\n[models.b]\naliases = ['a']", "models.b.aliases: models.a has the name 'a' already"),
        ('[models."a b"]\nadapters = {"a b" = "dir"}', 'models."a b".adapters: models."a b" has the name \'a b\' already'),
        ('[models.a]\naliases = [""]', "models.a.aliases: '' is no name: it takes 1 to 256 printable characters"),
        ("[models.a]\ntensor_parallel_size = 2", "models.a.tensor_parallel_size: not with several models: ranks compute one model"),
        ("[models.a]\nadapters = {b = 'nowhere'}", "models.a.adapters: there is no directory nowhere"),
        (
            "memory = '250MiB'\n[models.smollm2]\nkv_cache_memory = '1GiB'",
            "models.smollm2: its kv_cache_memory is 1.00 GiB, and all models together may take 0.24 GiB (`memory` at the top)",
        ),
        (
            "memory = '250MiB'\n[models.minilm]\nmemory = '1GiB'",
            "models.minilm: its memory is 1.00 GiB, and all models together may take 0.24 GiB (`memory` at the top)",
        ),
        ("[defaults]\nmodel = 'smollm2'\n[models.a]", "defaults.model: this is set for one model"),
    ],
)
def test_a_mistake_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(tmp_path, text)
    assert str(refused.value) == f"--models {tmp_path / 'models.toml'}: {message}"


def test_the_flag_bounds_the_memory_before_the_file_and_an_embedder_has_no_cache(tmp_path: Path) -> None:
    text = "memory = '9GiB'\n[defaults]\nkv_cache_memory = '1GiB'\n[models.minilm]\n"
    given = Arguments(models_memory=2**29)
    assert read(tmp_path, text, given).models[0].kind == "pooling"
    with pytest.raises(ConfigurationError, match=r"models.smollm2: its kv_cache_memory is 1.00 GiB, .* 0.50 GiB \(--models-memory\)"):
        read(tmp_path, f"{text}[models.smollm2]\n", given)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        read_models_file(Arguments(models=str(tmp_path / "missing.toml")))


def test_flags_about_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--model is about one model, and --models serves several: set it in the file"):
        read(tmp_path, EXAMPLE, Arguments(engine=EngineConfig(model="smollm2")))
