"""Image datasets in parquet files with the hub's schema."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedretain.data.cache import cached_array
from fedretain.data.dataset import Array, Dataset
from fedretain.data.images import Size, cache_key, decode_images
from fedretain.data.schema import (
    Split,
    assemble,
    column_values,
    concatenate,
    image_bytes,
    image_column,
    schema_class_names,
)
from fedretain.errors import DataError

_BATCH = 1024


def load_parquet(
    path: str | Path,
    *,
    name: str | None = None,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    include_val: bool = False,
) -> Dataset:
    """The dataset of a folder with ``train.parquet`` and ``test.parquet`` (and ``val.parquet``).

    A split may also lie in shards ``train-*.parquet``, and the files in the sub-folder ``data``, as in a
    clone of a hub repository. ``image`` and ``label`` name the columns; by default they are found by
    their types.
    """
    folder = Path(path).expanduser()
    wanted = ("train", "test", "val") if include_val else ("train", "test")
    splits = {}
    for split in wanted:
        files = split_files(folder, split)
        if not files:
            raise DataError(
                f"{folder}: no {split}.parquet (nor {split}-*.parquet, here or in its folder data); "
                "data.path or data.root must lead to a folder that holds the parquet files of each split"
            )
        splits[split] = concatenate([_read_file(file, image, size) for file in files], f"{folder}, {split}")
    return assemble(name or folder.resolve().name, splits, label, str(folder))


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of one split in order; empty where there are none."""
    for place in (folder, folder / "data"):
        whole = place / f"{split}.parquet"
        files = [whole] if whole.is_file() else sorted(place.glob(f"{split}-*.parquet"))
        if files:
            return files
    return []


def _read_file(path: Path, image: str | None, size: Size | None) -> Split:
    with _readable(path):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with pq.ParquetFile(path) as parquet:
            schema = parquet.schema_arrow
            column = image_column(schema, image, str(path))
            if parquet.metadata.num_rows == 0:
                raise DataError(f"{path}: the file has no rows; at least one example is needed")
            inputs, checksum = cached_array(
                cache_key(digest, size, column), lambda: _decode_file(parquet, column, path, size)
            )
            others = parquet.read(columns=[name for name in schema.names if name != column])
    return Split(inputs, checksum, column_values(others), schema_class_names(schema))


def _decode_file(parquet: pq.ParquetFile, column: str, path: Path, size: Size | None) -> Array:
    return decode_images(
        _encoded(parquet, column, path),
        parquet.metadata.num_rows,
        where=lambda row: f"{path}, row {row}",
        size=size,
    )


def _encoded(parquet: pq.ParquetFile, column: str, path: Path) -> Iterator[list[bytes]]:
    row = 0
    for batch in parquet.iter_batches(_BATCH, columns=[column]):
        blobs = []
        for blob in image_bytes(batch.column(0)):
            if blob is None:
                raise DataError(f"{path}, row {row}: column {column!r} holds no image bytes; remove the row")
            blobs.append(blob)
            row += 1
        yield blobs


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what a damaged or unreadable file makes pyarrow raise into an error that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot read the parquet file ({error}); it may be damaged or cut short: fetch it again"
        ) from error
