from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedretain.data.arrays import from_arrays, load_npz
from fedretain.data.dataset import Dataset
from fedretain.errors import DataError


def make(x: Any, **options: Any) -> Dataset:
    labels = np.arange(len(x)) % 2
    return from_arrays(x, labels, x, labels, **options)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((6, 7), (7, 1, 1)),
        ((6, 4, 5), (1, 4, 5)),
        ((6, 3, 4, 5), (3, 4, 5)),
        ((6, 4, 5, 3), (3, 4, 5)),
        ((6, 4, 5, 1), (1, 4, 5)),
        ((6, 3, 4, 3), (3, 4, 3)),
        ((6, 1, 5, 1), (1, 5, 1)),
        ((6, 2, 4, 5), (2, 4, 5)),
    ],
)
def test_layouts(given: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert make(np.zeros(given, np.uint8)).shape == kept


def test_channels_last_moves_the_values() -> None:
    x = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    inputs = make(x).train.inputs
    assert np.array_equal(inputs[1, 2], x[1, :, :, 2])
    assert inputs.flags.c_contiguous


@pytest.mark.parametrize(
    ("dtype", "kept", "scale"),
    [
        (np.uint8, np.uint8, 255),
        (np.int64, np.uint8, 255),
        (np.float32, np.float32, 1),
        (np.float64, np.float32, 1),
        (np.float16, np.float32, 1),
        (np.bool_, np.float32, 1),
    ],
)
def test_types_and_scales(dtype: Any, kept: Any, scale: float) -> None:
    made = make(np.ones((4, 3), dtype))
    assert made.train.inputs.dtype == kept
    assert made.scale == scale
    assert make(np.ones((4, 3), dtype), scale=7).scale == 7


def test_whole_numbers_beyond_a_byte_become_floats_in_both_sets() -> None:
    made = from_arrays(np.array([[0, 255]]), [0], np.array([[-1, 300]]), [0])
    assert made.train.inputs.dtype == made.test.inputs.dtype == np.float32
    assert made.test.inputs.ravel().tolist() == [-1, 300]
    assert made.scale == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_tensors(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(4, 3).to(dtype)
    made = from_arrays(x.requires_grad_(dtype.is_floating_point), torch.tensor([0, 1, 2, 0]), x, torch.zeros(4).long())
    assert made.train.inputs.ravel().tolist() == list(range(12))
    assert made.classes == 3


def test_the_dataset_keeps_a_copy() -> None:
    x, y, who = np.zeros((2, 3), np.float32), np.array([0, 1]), np.array(["a", "b"])
    made = from_arrays(x, y, x, y, columns={"who": (who, who)})
    x[:], y[:], who[:] = 5, 0, "z"
    assert made.train.inputs.max() == 0
    assert made.train.labels.tolist() == [0, 1]
    assert made.train.columns["who"].tolist() == ["a", "b"]


def test_class_names_columns_and_text_labels() -> None:
    made = from_arrays(
        np.zeros((2, 3)),
        np.array(["dog", "ant"], dtype=object),
        np.zeros((1, 3)),
        ["ant"],
        name="pets",
        columns={"writer": (["p", "q"], ["r"])},
    )
    assert made.name == "pets"
    assert made.class_names == ("ant", "dog")
    assert made.train.columns["writer"].tolist() == ["p", "q"]
    assert made.test.columns["writer"].tolist() == ["r"]
    assert make(np.zeros((2, 3)), class_names=["x", "y", "z"]).classes == 3


def test_what_cannot_be_used() -> None:
    with pytest.raises(DataError, match=r"train: inputs have shape \(4,\)"):
        make(np.zeros(4))
    with pytest.raises(DataError, match=r"inputs of type <U1"):
        make(np.array([["a"]]))
    with pytest.raises(DataError, match=r"column 'writer' must be a pair"):
        make(np.zeros((2, 3)), columns={"writer": np.array([1, 2, 3])})
    with pytest.raises(DataError, match=r"example 0 has label 2, but with 2 classes"):
        from_arrays(np.zeros((1, 3)), [2], np.zeros((1, 3)), [0], class_names=["a", "b"])
    with pytest.raises(DataError, match=r"lengths differ"):
        from_arrays(np.zeros((2, 3)), [0], np.zeros((1, 3)), [0])
    with pytest.raises(DataError, match=r"example 1 holds NaN"):
        make(np.array([[0.0], [np.nan]]))
    with pytest.raises(DataError, match=r"at least one example"):
        make(np.zeros((0, 3)))


def test_doubles_too_large_for_float32_are_refused_with_their_index() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=r"example 1 holds NaN or infinity"):
            make(np.array([[0.0], [1e300]]))


def save(path: Path, **arrays: Any) -> Path:
    full = {
        "x_train": np.zeros((2, 3)),
        "y_train": [0, 1],
        "x_test": np.zeros((1, 3)),
        "y_test": [1],
    } | arrays
    np.savez(path, **{key: value for key, value in full.items() if value is not None})
    return path


def test_npz(tmp_path: Path) -> None:
    made = load_npz(
        save(
            tmp_path / "mine.npz",
            writer_train=["a", "b"],
            writer_test=["c"],
            class_names=["no", "yes"],
            other=[1],
        )
    )
    assert made.name == "mine"
    assert made.class_names == ("no", "yes")
    assert made.train.columns.keys() == {"writer"}
    assert made.test.labels.tolist() == [1]


def test_npz_problems(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.npz: no such file; data.path"):
        load_npz(tmp_path / "none.npz")
    with pytest.raises(DataError, match=r"y_test missing \(there are: x_train, y_train, x_test\)"):
        load_npz(save(tmp_path / "a.npz", y_test=None))
    whole = save(tmp_path / "b.npz").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:200] + b"\xff" * 8 + whole[208:]):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"b.npz: cannot read the .npz file"):
            load_npz(tmp_path / "b.npz")
    np.save(tmp_path / "c.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"c.npy: cannot read the .npz file"):
        load_npz(tmp_path / "c.npy")
    with pytest.raises(DataError, match=r"without objects"):
        load_npz(save(tmp_path / "d.npz", y_train=np.array([{}, {}], dtype=object)))
