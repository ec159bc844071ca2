"""Image datasets as folders: ``train/<class>/*.png`` and ``test/<class>/*.png``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedretain.data.dataset import Dataset, Examples
from fedretain.data.images import Size, decode_once
from fedretain.errors import DataError, unknown

SUFFIXES = (".png", ".jpg", ".jpeg")


def load_folder(path: str | Path, *, name: str | None = None, size: Size | None = None) -> Dataset:
    """The dataset of a folder with one sub-folder per split and in it one per class.

    The classes are the sub-folders of ``train`` in alphabetical order; the examples come in the order of
    class and file name, and the column ``file`` keeps where each came from. Files that are not PNG or
    JPEG are left out.
    """
    root = Path(path).expanduser()
    classes = [folder.name for folder in _class_folders(root / "train")]
    train = _load_split(root / "train", classes, size)
    test = _load_split(root / "test", classes, size)
    return Dataset(name or root.resolve().name, train, test, tuple(classes), scale=255.0)


def _load_split(folder: Path, classes: list[str], size: Size | None) -> Examples:
    files: list[Path] = []
    labels: list[int] = []
    for class_folder in _class_folders(folder):
        if class_folder.name not in classes:
            raise DataError(f"{class_folder}: {unknown('class', class_folder.name, classes)} in the train folder")
        images = sorted(
            file for file in class_folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != "."
        )
        if not images:
            raise DataError(f"{class_folder}: no images ({', '.join(SUFFIXES)}); add some or remove the folder")
        files += images
        labels += [classes.index(class_folder.name)] * len(images)
    try:
        encoded = [file.read_bytes() for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read the image ({error.strerror})") from error
    inputs, checksum = decode_once(encoded, where=lambda i: str(files[i]), size=size)
    names = np.array([file.relative_to(folder).as_posix() for file in files], dtype=np.str_)
    return Examples(inputs, np.array(labels, dtype=np.int64), {"file": names}, checksum)


def _class_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder; data.path (path=) must lead to a folder with train/<class>/ and "
            "test/<class>/ that hold the images"
        )
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not found:
        raise DataError(f"{folder}: no class folders; put the images of each class in a folder of its own")
    return found
