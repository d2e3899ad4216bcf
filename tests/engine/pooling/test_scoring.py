import pytest
import torch

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import CosineScoring, CrossScoring, PoolingOutput, check_counts, paired, scoring_of


def test_texts_are_paired_one_with_all_or_each_with_its_own() -> None:
    assert paired("a", "xyz") == [("a", "x"), ("a", "y"), ("a", "z")]
    assert paired("abc", "xyz") == [("a", "x"), ("b", "y"), ("c", "z")]


@pytest.mark.parametrize(("first", "second", "param"), [(0, 1, "one"), (1, 0, "two"), (2, 1, "one"), (2, 3, "one")])
def test_counts_that_make_no_pairs_are_refused(first: int, second: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_counts(first, second, "one", "two")
    assert caught.value.param == param


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 5), (5, 5)])
def test_counts_that_make_pairs_are_fine(first: int, second: int) -> None:
    check_counts(first, second, "one", "two")


def test_a_model_that_scores_pairs_is_asked_for_them() -> None:
    assert isinstance(scoring_of({"score", "classify"}), CrossScoring)
    assert isinstance(scoring_of({"embed", "token_embed"}), CosineScoring)


@pytest.mark.parametrize("num_first", [1, 3])
def test_cosines_are_those_of_torch(num_first: int) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(num_first + 3, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    outputs = [PoolingOutput(vector, [place]) for place, vector in enumerate(vectors)]
    scores = CosineScoring().scores(outputs, num_first)
    expected = torch.cosine_similarity(vectors[:num_first], vectors[num_first:])
    torch.testing.assert_close(torch.tensor([score.value for score in scores]), expected)
    assert [score.prompt_token_ids for score in scores] == [[index % num_first, num_first + index] for index in range(3)]
