"""Check that the combinations not audited show every two values of different axes together."""

from itertools import combinations, product

import pytest

from tests.helpers.pairwise import pairwise, some


def is_audited(parameter) -> bool:
    return any(mark.name == "audit" for mark in parameter.marks)


@pytest.mark.parametrize("sizes", [(2, 3), (4, 6, 6), (6, 2, 3, 4, 2)], ids=str)
def test_every_pair_is_kept_and_every_combination_is_there(sizes):
    axes = [[f"{axis}{place}" for place in range(size)] for axis, size in zip("abcde", sizes, strict=False)]
    parameters = pairwise(*axes)
    assert [parameter.values for parameter in parameters] == list(product(*axes))
    kept = [parameter.values for parameter in parameters if not is_audited(parameter)]
    for first, second in combinations(range(len(axes)), 2):
        assert {(case[first], case[second]) for case in kept} == set(product(axes[first], axes[second]))
    largest, next_largest = sorted(sizes)[:-3:-1]
    assert len(kept) <= 1.5 * largest * next_largest


def test_the_first_values_are_kept():
    assert [is_audited(parameter) for parameter in some("abc", 2)] == [False, False, True]
