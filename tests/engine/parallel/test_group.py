"""What ranks send each other, and what is refused before any of them is started."""

import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.engine.adapters.checkpoint import LowRank
from penstock.engine.adapters.registry import Adapter, AdapterRows
from penstock.engine.attention.interface import flatten
from penstock.engine.batch import Batch, StepInputs
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.forward import ForwardPass, adapter_message, adapter_of, batch_of, step_message
from penstock.engine.parallel import group
from penstock.engine.parallel.group import Channel, Group, Order, Ranks
from penstock.engine.parallel.rendezvous import Launch, lead, leading
from penstock.engine.parallel.sharding import check_alike, sharding_of
from penstock.engine.weights.packed import pack, quantized
from penstock.engine.weights.quantization import StoredWeight
from tests.engines import loaded_model
from tests.tiny_models import tiny_config, tiny_model


def test_messages_arrive_whole_and_in_order() -> None:
    one, other = map(Channel, socket.socketpair())
    messages = [b"", b"short", bytes(range(256)) * 100]
    for message in messages:
        one.send(message)
    assert [bytes(other.receive()) for _ in messages] == messages
    one.socket.sendall(b"\x09\0\0\0\0\0\0\0half")
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_a_message_beyond_the_limit_is_refused_before_it_is_read() -> None:
    one, other = map(Channel, socket.socketpair())
    one.send(bytes(65))
    with pytest.raises(ValueError, match="65 bytes"):
        other.receive(64)
    one.close()
    other.close()


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_step_is_the_same_on_the_other_side(has_adapters: bool) -> None:
    tables_PN = torch.zeros(4, 8, dtype=torch.int32)
    attention = flatten([5, 16, 17, 18], [0, 1, 4], [6, 3], [2, 0], num_decodes=1)
    inputs = StepInputs.pack(attention, [7, 8, 9, 10], [5, 0, 1, 2], [0, 3], [2, 0, 1, 0, 4, 6], tables_PN)
    adapter = Adapter("a", "")
    rows = AdapterRows([-1, 3, 3, 3], {3: adapter}) if has_adapters else None
    batch = Batch(inputs, [], [], [], None, [(1, 2), (3, 4)], num_pending=1, adapters=rows)
    message = torch.cat(step_message(inputs, batch, is_seen=True))
    other, has_embeds, is_seen = batch_of(message, tables_PN, {3: adapter})
    assert (has_embeds, is_seen) == (False, True)
    assert other.copies == batch.copies
    assert other.num_pending == 1
    assert other.adapters == rows
    assert torch.equal(other.inputs.packed, inputs.packed)
    for name in ("input_ids_1T", "positions_1T", "kept_T", "table_updates_3U"):
        assert torch.equal(getattr(other.inputs, name), getattr(inputs, name))
    assert other.inputs.attention.max_context_len == 6


def test_an_adapter_is_the_same_on_the_other_side() -> None:
    updates = {"x.q_proj": LowRank(torch.randn(3, 5), torch.randn(7, 3)), "y": LowRank(torch.randn(1, 2), torch.randn(2, 1))}
    adapter = Adapter("a", "", {path: LowRank(each.down_RI.bfloat16(), each.up_OR.bfloat16()) for path, each in updates.items()})
    other = adapter_of(adapter_message(adapter))
    assert other.number == adapter.number
    assert other.updates.keys() == adapter.updates.keys()
    for path, update in adapter.updates.items():
        assert torch.equal(other.updates[path].down_RI, update.down_RI)
        assert torch.equal(other.updates[path].up_OR, update.up_OR)


def test_ranks_keep_an_adapter_for_each_slot_and_no_more() -> None:
    loaded = loaded_model(tiny_model("gpt2"))
    follower = ForwardPass(loaded, cast(Any, None))
    received: list[AdapterRows | None] = []
    orders: list[Order] = []

    class Leader(Group):
        size = 2

        def send(self, order: Order, *numbers: torch.Tensor) -> None:
            orders.append(order)
            if order is Order.ADAPTER:
                follower.keep(torch.cat(numbers))
            else:
                received.append(batch_of(torch.cat(numbers), tables_PN, follower._adapters)[0].adapters)

    leader = ForwardPass(replace(loaded, sharding=replace(loaded.sharding, group=Leader())), cast(Any, None))
    tables_PN = torch.zeros(4, 8, dtype=torch.int32)
    inputs = StepInputs.pack(flatten([5], [0, 1], [6], [2], num_decodes=1), [7], [5], [0], [], tables_PN)
    adapters = [Adapter(name, "", {"y": LowRank(torch.full((1, 2), float(ord(name))), torch.ones(2, 1))}) for name in "abc"]
    used = [adapters[0], adapters[0], adapters[1], adapters[2], adapters[0]]
    for adapter in used:
        leader.order(inputs, Batch(inputs, [], [], [], None, [], adapters=AdapterRows([1], {1: adapter})), is_seen=False)
    assert [rows and float(rows.adapters[1].updates["y"].down_RI[0, 0]) for rows in received] == [ord(each.name) for each in used]
    assert orders.count(Order.ADAPTER) == 4, "it is sent again only where another one has had its slot"
    assert len(follower._adapters) == 1


def test_a_rank_that_does_not_end_the_last_step_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "EXIT_SECONDS", 0.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    own, its = map(Channel, socket.socketpair())
    ranks = Ranks(0, 2, {1: own}, {1: process})
    with ranks.last_step():
        assert process.wait(60) == -signal.SIGKILL
    ranks.close()
    its.close()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [slice(16, 48), slice(5, 30)])
def test_parts_of_a_quantized_weight_are_its_rows_and_columns(bits: int, rows: slice) -> None:
    weight = pack(quantized(torch.randn(50, 128, generator=torch.Generator().manual_seed(0)), bits))
    whole = weight.dequantized()
    assert torch.equal(weight.rows(torch.arange(50)[rows]).dequantized(), whole[rows])
    assert torch.equal(weight.columns(slice(32, 96)).dequantized(), whole[:, 32:96])
    with pytest.raises(ValueError, match="no multiple of 32"):
        weight.columns(slice(16, 32))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads, 9, cannot be divided by 2"),
    ("llama", {"num_key_value_heads": 1}, "num_key_value_heads, 1, cannot be divided by 2"),
    ("deepseek_v3", {}, "latent attention"),
    ("mamba2", {}, "recurrent layers"),
    ("qwen3_next", {}, "recurrent layers"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED)
def test_models_that_cannot_be_shared_are_refused_by_name(name: str, settings: dict[str, Any], reason: str) -> None:
    config = tiny_config(name)
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ConfigurationError, match=reason), leading(EngineConfig(tensor_parallel_size=2), lambda: config):
        pass


class Pair(Group):
    """Rank 0 of two, of which the other has said these numbers."""

    size = 2

    def __init__(self, numbers: list[int]) -> None:
        self.theirs, self.ours = iter(numbers), list[int]()

    def least(self, number: int) -> int:
        self.ours.append(number)
        return min(number, next(self.theirs))


def test_ranks_with_other_weight_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    one = Pair([0, 0])
    with pytest.raises(ConfigurationError, match="different models"):
        check_alike(one, [file], "float32")
    check_alike(Pair(one.ours), [file], "float32")
    for content, dtype in ((b"other", "float32"), (b"two", "bfloat16")):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="different models"):
            check_alike(Pair(one.ours), [file], dtype)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_cache_dir": "x"}, "--kv-cache-dir"),
        ({"compile": "on"}, "--compile on"),
        ({"speculation": "mtp"}, "--speculation mtp"),
        ({"tensor_parallel_size": 1, "distributed_address": "h:1"}, "--distributed-address"),
    ],
)
def test_options_that_are_not_for_several_ranks_are_refused(options: dict[str, Any], flag: str) -> None:
    config = EngineConfig(**{"tensor_parallel_size": 2} | options)
    with pytest.raises(ConfigurationError, match=flag), leading(config, lambda: tiny_config("llama")):
        pass


def test_a_rank_that_does_not_join_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = EngineConfig(tensor_parallel_size=3, distributed_address=f"127.0.0.1:{port}", distributed_timeout=0.3)
    with pytest.raises(ConfigurationError, match=r"ranks 1, 2 have not joined within 0.3 s"):
        lead(config, "cpu")


def test_ranks_of_one_machine_meet_where_no_other_machine_can() -> None:
    store, number = Launch().store(is_leader=True, seconds=5.0)
    port = f"{number:04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]
    with pytest.raises(ConfigurationError, match="cannot be taken"):
        Launch(port=number).store(is_leader=True, seconds=5.0)
    del store  # which listens until then


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gpt2", {}, "GPT2LMHeadModel cannot be shared by ranks: transformers has no plan for it"),
        ("gpt_oss", {}, "cannot be shared by ranks"),
        ("llama", {"intermediate_size": 95}, "95 outputs of model.layers.0.mlp.gate_proj cannot be divided by 2"),
    ],
)
def test_layers_that_no_plan_divides_are_refused_by_name(name: str, settings: dict[str, Any], reason: str) -> None:
    config = tiny_config(name)
    config.architectures = {"gpt2": ["GPT2LMHeadModel"]}.get(name)
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ConfigurationError, match=reason):
        sharding_of(config, Pair([]))


def test_experts_in_few_bits_are_refused() -> None:
    sharding = sharding_of(tiny_config("qwen3_moe"), Pair([]))
    weight = StoredWeight(pack(quantized(torch.ones(16, 64), 8)), "Q8_0")
    with pytest.raises(ConfigurationError, match=r"experts\.3\.up_proj is an expert's in few bits"):
        sharding.along_blocks([("model.layers.0.mlp.experts.3.up_proj.weight", weight)])
