"""Image datasets from the Hugging Face hub, through the optional package ``datasets``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedretain.data.dataset import Dataset
from fedretain.data.images import Size, decode_once
from fedretain.data.schema import Split, assemble, column_values, image_column
from fedretain.errors import DataError, MissingExtraError

_BATCH = 1024
# How datasets on the hub call the split that fedretain calls ``val``.
_VALIDATION = ("val", "validation", "valid")


def hub_installed() -> bool:
    """Whether the package ``datasets`` can be imported."""
    return importlib.util.find_spec("datasets") is not None


def download(
    repository: str,
    *,
    name: str,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    include_val: bool = False,
) -> Dataset:
    """The dataset ``repository`` of the hub, from the network or from what ``datasets`` has kept."""
    try:
        splits = _datasets().load_dataset(repository)
    except MissingExtraError:
        raise
    except Exception as error:  # the libraries below raise their own errors, and change them
        raise DataError(
            f"dataset {name!r} could not be fetched from the Hugging Face hub as {repository!r} "
            f"({type(error).__name__}: {error}). Either connect to the network and try again, or put the "
            f"parquet files in a folder {name}/ (train.parquet, test.parquet) and set FEDRETAIN_DATA or "
            "data.root to the folder above it"
        ) from error
    return from_hub(splits, name=name, image=image, label=label, size=size, include_val=include_val)


def from_hub(
    splits: Mapping[str, Any],
    *,
    name: str = "hub",
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    include_val: bool = False,
) -> Dataset:
    """The dataset of a ``datasets.DatasetDict``, or any mapping of ``train`` and ``test`` to such datasets.

    Also takes selected, shuffled or filtered splits. ``image`` and ``label`` name the columns; by default
    they are found by their types.
    """
    where = f"dataset {name!r} from the hub"
    datasets = _datasets()
    if not isinstance(splits, Mapping):
        raise DataError(f"{where}: expected a mapping of splits, such as a DatasetDict, not {type(splits).__name__}")
    present = {"train": "train", "test": "test"}
    if include_val:
        present["val"] = next((split for split in _VALIDATION if split in splits), "val")
    read = {}
    for part, split in present.items():
        if split not in splits:
            raise DataError(f"{where}: there is no split {split!r} (there are: {', '.join(map(str, splits))})")
        if not isinstance(splits[split], datasets.Dataset):
            raise DataError(
                f"{where}: split {split!r} is a {type(splits[split]).__name__}; load it as a "
                "datasets.Dataset (without streaming)"
            )
        read[part] = _read_split(splits[split], image, size, f"{where}, {split}")
    return assemble(name, read, label, where)


def _read_split(split: Any, image: str | None, size: Size | None, where: str) -> Split:
    datasets = _datasets()
    column = image_column(split.features.arrow_schema, image, where)
    if len(split) == 0:
        raise DataError(f"{where}: the split has no rows; at least one example is needed")
    as_tables = split.with_format("arrow")  # the encoded bytes, where other formats hand out Pillow images
    encoded = [
        _row_bytes(value, f"{where}, row {start + offset}")
        for start, table in zip(range(0, len(split), _BATCH), as_tables.iter(_BATCH), strict=True)
        for offset, value in enumerate(table.column(column).to_pylist())
    ]
    inputs, checksum = decode_once(encoded, where=lambda row: f"{where}, row {row}", size=size)
    names = {
        other: tuple(feature.names)
        for other, feature in split.features.items()
        if isinstance(feature, datasets.ClassLabel) and feature.names
    }
    others = [other for other in split.column_names if other != column]
    return Split(inputs, checksum, column_values(as_tables.select_columns(others)[:]), names)


def _row_bytes(value: bytes | Mapping[str, Any] | None, where: str) -> bytes:
    """The encoded image of one row, which may lie in a file of its own beside the table."""
    if isinstance(value, bytes):
        return value
    row: Mapping[str, Any] = value or {}
    if isinstance(blob := row.get("bytes"), bytes):
        return blob
    if not (path := row.get("path")):
        raise DataError(f"{where}: there is no image; remove the row")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{where}: cannot read the image file {path} ({error.strerror})") from error


def _datasets() -> Any:
    """The package ``datasets``, imported only here: it is optional and slow to import."""
    if not hub_installed():
        raise MissingExtraError("datasets", "hub", "reading a dataset from the Hugging Face hub")
    return importlib.import_module("datasets")
