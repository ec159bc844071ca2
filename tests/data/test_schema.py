from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from fedretain.data.schema import (
    Split,
    assemble,
    column_values,
    concatenate,
    image_column,
    schema_class_names,
)
from fedretain.errors import DataError


def split(labels: list[int], names: tuple[str, ...] = ("x", "y"), **columns: np.ndarray) -> Split:
    inputs = np.arange(len(labels), dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 2), np.uint8)
    return Split(inputs, "", {"label": np.array(labels), **columns}, {"label": names} if names else {})


def test_columns_of_every_simple_kind() -> None:
    table = pa.table(
        {
            "number": [1, 2],
            "gaps": pa.array([7, None]),
            "ratio": [0.5, 1.5],
            "truth": [True, False],
            "text": pa.array(["a", None]),
            "coded": pa.array(["b", "b"]).dictionary_encode(),
            "nothing": pa.nulls(2),
            "list": [[1], [2]],
        }
    )
    values = column_values(table)
    assert {name: array.tolist() for name, array in values.items()} == {
        "number": [1, 2],
        "gaps": ["7", ""],
        "ratio": [0.5, 1.5],
        "truth": [True, False],
        "text": ["a", ""],
        "coded": ["b", "b"],
        "nothing": ["", ""],
    }
    assert all(array.dtype.kind != "O" for array in values.values())


@pytest.mark.parametrize("metadata", [None, {}, {"huggingface": "{"}, {"huggingface": "[]"}, {"huggingface": "{}"}])
def test_schemas_without_a_description_have_no_class_names(metadata: dict[str, str] | None) -> None:
    assert schema_class_names(pa.schema([("label", pa.int64())], metadata=metadata)) == {}


def test_image_column_is_found_or_asked_for() -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    one = pa.schema([("picture", struct), ("label", pa.int64())])
    assert image_column(one, None, "f") == "picture"
    assert image_column(one, "picture", "f") == "picture"
    with pytest.raises(DataError, match=r"f: unknown column 'pictures'; did you mean 'picture'"):
        image_column(one, "pictures", "f")
    with pytest.raises(DataError, match=r"column 'label' has type int64"):
        image_column(one, "label", "f")
    two = pa.schema([("left", struct), ("right", pa.binary())])
    assert image_column(two, "right", "f") == "right"
    with pytest.raises(DataError, match=r"2 columns could be the images \(left, right\)"):
        image_column(two, None, "f")
    with pytest.raises(DataError, match=r"0 columns could be the images"):
        image_column(pa.schema([("label", pa.int64())]), None, "f")


def test_validation_examples_come_after_the_training_examples() -> None:
    parts = {
        "train": split([0, 1], who=np.array(["a", "b"])),
        "test": split([1], who=np.array(["t"])),
        "val": split([1, 1, 0], who=np.array(["c", "d", "longer"])),
    }
    made = assemble("toy", parts, None, "here")
    assert made.train.labels.tolist() == [0, 1, 1, 1, 0]
    assert made.train.inputs[:, 0, 0, 0].tolist() == [0, 1, 0, 1, 2]
    assert made.train.columns["who"].tolist() == ["a", "b", "c", "d", "longer"]
    assert len(made.test) == 1


def test_splits_that_number_the_classes_differently_are_refused() -> None:
    with pytest.raises(DataError, match=r"name the classes of 'label' differently \(train: x, y; test: y, x\)"):
        assemble("toy", {"train": split([0]), "test": split([0], ("y", "x"))}, None, "here")


def test_label_column_is_found_or_asked_for() -> None:
    def named(*columns: str) -> dict[str, Split]:
        pixels = np.zeros((1, 1, 2, 2), np.uint8)
        values = {column: np.array([0]) for column in ("fine", "coarse")}
        part = Split(pixels, "", values, dict.fromkeys(columns, ("x",)))
        return {"train": part, "test": part}

    assert assemble("toy", named("fine"), None, "here").class_names == ("x",)
    assert list(assemble("toy", named("fine"), None, "here").train.columns) == ["coarse"]
    with pytest.raises(DataError, match=r"which column holds the labels\? \(fine, coarse\)"):
        assemble("toy", named("fine", "coarse"), None, "here")
    assert list(assemble("toy", named(), "coarse", "here").train.columns) == ["fine"]
    with pytest.raises(DataError, match=r"here, train: unknown label column 'coarser'; did you mean 'coarse'"):
        assemble("toy", named(), "coarser", "here")


def test_missing_label_names_the_row() -> None:
    gap = Split(np.zeros((2, 1, 2, 2), np.uint8), "", {"label": np.array(["1", ""])}, {})
    with pytest.raises(DataError, match=r"train, row 1: the label 'label' is missing"):
        assemble("toy", {"train": gap, "test": gap}, None, "here")


def test_files_of_one_split_are_joined_in_order() -> None:
    both = concatenate([split([0, 1]), split([1])], "here")
    assert both.columns["label"].tolist() == [0, 1, 1]
    assert both.inputs[:, 0, 0, 0].tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"different columns or class names"):
        concatenate([split([0]), split([0], ("x", "z"))], "here")
    wide = Split(np.zeros((1, 3, 2, 2), np.uint8), "", {"label": np.array([0])}, {"label": ("x", "y")})
    with pytest.raises(DataError, match=r"shape \(1, 2, 2\) in one file and \(3, 2, 2\) in another"):
        concatenate([split([0]), wide], "here")


def test_validation_set_must_match_the_training_set() -> None:
    wide = Split(np.zeros((1, 3, 2, 2), np.uint8), "", {"label": np.array([0])}, {})
    with pytest.raises(DataError, match=r"train examples have shape \(1, 2, 2\) but val examples have \(3, 2, 2\)"):
        assemble("toy", {"train": split([0]), "test": split([0]), "val": wide}, None, "here")
    with pytest.raises(DataError, match=r"train has the columns \[\] but val has \['who'\]"):
        assemble(
            "toy",
            {"train": split([0]), "test": split([0]), "val": split([0], who=np.array(["a"]))},
            None,
            "here",
        )
