from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedretain.data.folder import load_folder
from fedretain.errors import DataError

Png = Callable[..., bytes]


@pytest.fixture
def folder(tmp_path: Path, png: Png) -> Path:
    """Two classes; the pixel value says which image it is."""
    values = {"train/cat/b.png": 2, "train/cat/a.PNG": 1, "train/ant/z.jpg": 3, "test/cat/a.png": 4}
    for name, value in values.items():
        file = tmp_path / "pets" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = "JPEG" if file.suffix == ".jpg" else "PNG"
        file.write_bytes(png(np.full((8, 8), 10 * value, np.uint8), kind))
    return tmp_path / "pets"


def test_classes_and_files_in_alphabetical_order(folder: Path) -> None:
    made = load_folder(folder)
    assert made.name == "pets"
    assert made.class_names == ("ant", "cat")
    assert made.train.labels.tolist() == [0, 1, 1]
    assert made.train.inputs[:, 0, 0, 0].tolist() == [30, 10, 20]
    assert made.train.columns["file"].tolist() == ["ant/z.jpg", "cat/a.PNG", "cat/b.png"]
    assert made.test.labels.tolist() == [1]


def test_other_files_and_hidden_ones_are_left_out(folder: Path) -> None:
    for name in ("train/cat/notes.txt", "train/cat/.hidden.png", "train/.git/x.png", "train/readme.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"?")
    assert len(load_folder(folder).train) == 3


def test_sizes(folder: Path, png: Png) -> None:
    (folder / "train/cat/c.png").write_bytes(png(np.zeros((9, 8), np.uint8)))
    with pytest.raises(DataError, match=r"c.png: the image is 9x8 .*set data.size"):
        load_folder(folder)
    assert load_folder(folder, size=(4, 6)).shape == (1, 4, 6)


def test_undecodable_image_is_named(folder: Path) -> None:
    (folder / "train/cat/c.png").write_bytes(b"?")
    with pytest.raises(DataError, match=r"train/cat/c.png: cannot decode"):
        load_folder(folder)


def test_missing_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/train: no such folder; data.path"):
        load_folder(tmp_path / "nowhere")
    (folder / "test").rename(folder / "tset")
    with pytest.raises(DataError, match=r"test: no such folder"):
        load_folder(folder)
    (folder / "test").mkdir()
    with pytest.raises(DataError, match=r"test: no class folders"):
        load_folder(folder)


def test_class_that_only_the_test_folder_has(folder: Path) -> None:
    (folder / "test" / "cat").rename(folder / "test" / "cats")
    with pytest.raises(DataError, match=r"unknown class 'cats'; did you mean 'cat'"):
        load_folder(folder)


def test_class_without_images(folder: Path) -> None:
    (folder / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=r"dog: no images"):
        load_folder(folder)


def test_file_that_cannot_be_read(folder: Path) -> None:
    (folder / "train" / "cat" / "c.png").mkdir()
    with pytest.raises(DataError, match=r"c.png: cannot read the image"):
        load_folder(folder)
