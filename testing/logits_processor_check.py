"""The check that every logits processor must pass, on random logits."""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.contracts.hooks import RegisteredLogitsProcessor
from penstock.engine.contracts.logits_processor import LogitsRow, SequenceProcessor, as_processor, choose

if TYPE_CHECKING:
    from torch import Tensor


def check_logits_processor(
    registered: RegisteredLogitsProcessor,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocab_size: int = 64,
    num_sequences: int = 4,
    num_steps: int = 12,
    seed: int = 0,
) -> None:
    """Raises `AssertionError` where a logits processor breaks a promise.

    It raises nothing, leaves a token to choose and no NaN, does not change the token ids, and does the same to a row whatever rows are
    beside it. Raises `TypeError` or `ValueError` where it takes no such arguments.
    """
    import torch

    chosen = choose(as_processor(registered), arguments or {})
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    histories = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))] for _ in range(num_sequences)]
    together, alone = (
        [chosen.begin(LogitsRow(f"request {row}", token_ids=list(history))) for row, history in enumerate(histories)] for _ in range(2)
    )
    for _ in range(num_steps):
        logits_RV = torch.randn(num_sequences, vocab_size, generator=generator)
        apart_RV = torch.cat([_run(logits_RV[row : row + 1], [processor]) for row, processor in enumerate(alone)])
        joint_RV = _run(logits_RV, together)
        for row, history in enumerate(histories):
            assert not joint_RV[row].isnan().any(), f"after {history} there is NaN among the logits"
            assert (joint_RV[row] > -torch.inf).any(), f"after {history} no token is left to choose from"
            assert torch.equal(joint_RV[row], apart_RV[row]), f"after {history} other rows beside it make a difference"
            assert together[row].row.token_ids == alone[row].row.token_ids == history, "the token ids were changed"
            token_id = rng.choice((joint_RV[row] > -torch.inf).nonzero()[:, 0].tolist())
            for token_ids in (history, together[row].row.token_ids, alone[row].row.token_ids):
                token_ids.append(token_id)


def _run(logits_RV: "Tensor", processors: "list[SequenceProcessor]") -> "Tensor":
    from penstock.engine.sampling.sampler import ProcessorPass

    run = ProcessorPass(logits_RV.clone(), [[processor] for processor in processors])
    run.run()
    assert not run.failures, next(iter(run.failures.values()))
    return run.logits_RV
