"""How the loops of a step are divided among threads: none with enough work is left to one, and little work is in those that are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.engine.core import EngineCore
from penstock.engine.model.fused import fuse_linears
from penstock.engine.native.runtime import native_library
from penstock.engine.weights.linear import can_panel, quantize_linears
from tests.engines import core_over, loaded_model
from tests.fakes import make_request
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")

NUM_THREADS = 8
WORTH_TWO = 800  # nanoseconds of a loop's work: four times what a thread adds to it
PRODUCTS_PER_NANOSECOND = 64  # as parallel.h has it
HIDDEN, INNER, VOCABULARY = 512, 1024, 16_384
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": HIDDEN // 8,
}
NUM_WEIGHTS = 3 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
needs_panels = pytest.mark.skipif(not can_panel(torch.empty(32, 2, dtype=torch.bfloat16)), reason="torch multiplies bfloat16 here")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop as it was divided: its turns, its threads, and what it takes one thread, in nanoseconds."""

    count: int
    num_threads: int
    nanoseconds: int

    @property
    def critical_nanoseconds(self) -> float:
        """Of the thread with most turns."""
        return self.nanoseconds * -(-self.count // self.num_threads) / max(self.count, 1)


def steps_of(core: EngineCore, prompts: list[list[int]]) -> Iterator[list[Loop]]:
    """The loops of one step after the other, with all these prompts at once."""
    library = native_library()
    assert library is not None
    for number, prompt in enumerate(prompts):
        core.add(make_request(str(number), prompt, temperature=0.0, max_tokens=3, ignore_eos=True))
    records = torch.zeros(1000, 3, dtype=torch.int64)
    while core.has_work:
        library.penstock_record_loops(records.data_ptr(), len(records))
        core.step()
        num_loops = library.penstock_record_loops(None, 0)
        assert 0 < num_loops < len(records)
        yield [Loop(*record) for record in records[:num_loops].tolist()]


def core_of(bits: int) -> EngineCore:
    model = tiny_model("llama", vocab_size=VOCABULARY, **SIZES).bfloat16()
    if bits < 16:
        fuse_linears(model)
        quantize_linears(model, bits)
    return core_over(loaded_model(model), num_blocks=64, num_threads=NUM_THREADS, pin_threads="off", enable_prefix_caching=False)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("bits", [4, 8, pytest.param(16, marks=needs_panels)])
def test_no_loop_with_work_for_two_is_left_to_one_thread(bits: int, num_rows: int) -> None:
    core = core_of(bits)
    prompts = [list(range(3, 23 + number)) for number in range(num_rows)]
    for loops in steps_of(core, prompts):
        assert [loop for loop in loops if loop.num_threads == 1 and loop.nanoseconds >= WORTH_TWO] == []
        work = sum(loop.nanoseconds for loop in loops)
        assert work >= NUM_WEIGHTS * num_rows / PRODUCTS_PER_NANOSECOND  # the linear layers are among them
        assert sum(loop.nanoseconds for loop in loops if loop.num_threads == 1) < 0.01 * work
        assert sum(loop.critical_nanoseconds for loop in loops) < work / (0.9 * NUM_THREADS)
    core.runner.shutdown()
