from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedretain.data.labels import encode_labels
from fedretain.errors import DataError


def encode(train: Any, test: Any, names: list[str] | None = None) -> Any:
    return encode_labels({"train": np.array(train), "test": np.array(test)}, names, "toy")


def test_numbers_without_names_are_numbered_up_to_the_largest_in_any_split() -> None:
    labels, names = encode([0, 1], [3])
    assert names == ("0", "1", "2", "3")
    assert labels["train"].dtype == np.int64
    assert labels["test"].tolist() == [3]


@pytest.mark.parametrize("values", [[[0], [2]], [0.0, 2.0], np.array([0, 2], np.uint8)])
def test_columns_whole_floats_and_small_types_are_numbers(values: Any) -> None:
    labels, _ = encode(values, [0])
    assert labels["train"].tolist() == [0, 2]


def test_truth_values() -> None:
    labels, names = encode([True, False], [True])
    assert labels["train"].tolist() == [1, 0]
    assert names == ("0", "1")


def test_text_is_numbered_in_alphabetical_order_of_all_splits() -> None:
    labels, names = encode(["dog", "ant", "dog"], ["cat"])
    assert names == ("ant", "cat", "dog")
    assert labels["train"].tolist() == [2, 0, 2]
    assert labels["test"].tolist() == [1]


def test_text_is_looked_up_in_given_names() -> None:
    labels, names = encode(["dog", "ant"], ["ant"], ["dog", "ant"])
    assert names == ("dog", "ant")
    assert labels["train"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"test, example 1: unknown class 'antt'; did you mean 'ant'"):
        encode(["dog"], ["dog", "antt"], ["dog", "ant"])


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, 1e30])
def test_floats_that_are_no_class_numbers(value: float) -> None:
    with pytest.raises(DataError, match=r"train: example 1 has label .* not a class number"):
        encode([0.0, value], [0])


def test_ids_are_not_classes() -> None:
    with pytest.raises(DataError, match=r"largest label is 4000000000"):
        encode([0, 4_000_000_000], [0])


def test_kinds_that_cannot_be_labels() -> None:
    with pytest.raises(DataError, match=r"some splits have text"):
        encode(["a"], [0])
    with pytest.raises(DataError, match=r"shape \(2, 3\)"):
        encode(np.eye(2, 3), [0])
    with pytest.raises(DataError, match=r"type complex128"):
        encode([1j], [0])
