"""The Hugging Face hub's way to write an image dataset as a table, however the table was obtained.

One column holds encoded images (``struct<bytes, path>``, or plain bytes), one the class numbers, and the
schema may carry the names of the classes. Parquet files and the hub both end in ``Split`` and share
``assemble``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedretain.data.dataset import Array, Dataset, Examples
from fedretain.data.labels import encode_labels
from fedretain.errors import DataError, unknown


@dataclass(frozen=True, eq=False)
class Split:
    """One split as read: decoded images, the other columns as they are, class names of labelled columns."""

    inputs: Array
    checksum: str
    columns: Mapping[str, Array]
    class_names: Mapping[str, tuple[str, ...]]


def assemble(name: str, splits: Mapping[str, Split], label: str | None, where: str) -> Dataset:
    """The dataset of the splits ``train``, ``test`` and, where present, ``val``, which is appended to train.

    Without ``label`` it is the column ``label``, or the only column with class names.
    """
    label = label or _label_column(splits["train"], where)
    names = _class_names(splits, label, where)
    encoded, class_names = encode_labels(
        {part: _column(split, label, f"{where}, {part}") for part, split in splits.items()}, names, where
    )
    examples = {
        part: Examples(
            split.inputs,
            encoded[part],
            {column: values for column, values in split.columns.items() if column != label},
            split.checksum,
        )
        for part, split in splits.items()
    }
    train = examples["train"]
    if "val" in examples:
        train = _joined(train, examples["val"], where)
    return Dataset(name, train, examples["test"], class_names, scale=255.0)


def concatenate(splits: list[Split], where: str) -> Split:
    """Several files of one split, in order."""
    first = splits[0]
    if len(splits) == 1:
        return first
    for split in splits[1:]:
        if (split.columns.keys(), split.class_names) != (first.columns.keys(), first.class_names):
            raise DataError(f"{where}: the files of one split have different columns or class names")
        if split.inputs.shape[1:] != first.inputs.shape[1:]:
            raise DataError(
                f"{where}: images have shape {first.inputs.shape[1:]} in one file and "
                f"{split.inputs.shape[1:]} in another; set data.size (size=) or convert all of them to "
                "the same number of channels"
            )
    return Split(
        np.concatenate([split.inputs for split in splits]),
        "",
        {column: np.concatenate([split.columns[column] for split in splits]) for column in first.columns},
        first.class_names,
    )


def image_column(schema: pa.Schema, image: str | None, where: str) -> str:
    """The column with the images: the given one, or the only one that holds encoded bytes."""
    holds_images = [field.name for field in schema if _is_image(field.type)]
    if image is None:
        if len(holds_images) != 1:
            raise DataError(
                f"{where}: {len(holds_images)} columns could be the images ({', '.join(schema.names)}); "
                "name the one to use with data.image (image=)"
            )
        return str(holds_images[0])
    if image not in schema.names:
        raise DataError(f"{where}: {unknown('column', image, schema.names)}; set data.image (image=)")
    if image not in holds_images:
        raise DataError(
            f"{where}: column {image!r} has type {schema.field(image).type}, but images must be encoded "
            "bytes (struct<bytes, path> as on the Hugging Face hub, or binary)"
        )
    return image


def image_bytes(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    """The encoded images of an image column; None where a row carries none."""
    values: list[bytes | None] = (
        pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
    ).to_pylist()
    return values


def column_values(table: pa.Table) -> dict[str, Array]:
    """The columns of text, numbers and truth values as arrays; other columns are left out.

    Missing text becomes the empty string, and a column of numbers with gaps becomes text, so that every
    value can be compared and stored.
    """
    values = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if numeric and column.null_count == 0:
            values[name] = column.to_numpy()
        elif numeric or pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
            values[name] = np.array(["" if v is None else str(v) for v in column.to_pylist()], dtype=np.str_)
    return values


def schema_class_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """The class names per column out of the ``datasets`` feature description, where there is one."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(feature["names"])
            for column, feature in features.items()
            if feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, AttributeError, ValueError):  # written by another tool: no names then
        return {}


def _is_image(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _label_column(train: Split, where: str) -> str:
    if "label" in train.columns:
        return "label"
    if len(train.class_names) == 1:
        return next(iter(train.class_names))
    raise DataError(
        f"{where}: which column holds the labels? ({', '.join(train.columns)}); name it with data.label (label=)"
    )


def _column(split: Split, label: str, where: str) -> Array:
    if label not in split.columns:
        raise DataError(f"{where}: {unknown('label column', label, split.columns)}; set data.label (label=)")
    values = split.columns[label]
    if values.dtype.kind == "U" and (values == "").any():
        row = int(np.argmax(values == ""))
        raise DataError(f"{where}, row {row}: the label {label!r} is missing; every example needs one")
    return values


def _class_names(splits: Mapping[str, Split], label: str, where: str) -> tuple[str, ...] | None:
    """The names that all splits agree on: two numberings of the classes must not be mixed up."""
    found = {part: split.class_names[label] for part, split in splits.items() if label in split.class_names}
    if len(set(found.values())) > 1:
        listed = "; ".join(f"{part}: {', '.join(names)}" for part, names in found.items())
        raise DataError(f"{where}: the splits name the classes of {label!r} differently ({listed})")
    return next(iter(found.values()), None)


def _joined(train: Examples, val: Examples, where: str) -> Examples:
    if train.inputs.shape[1:] != val.inputs.shape[1:]:
        raise DataError(
            f"{where}: train examples have shape {train.inputs.shape[1:]} but val examples have "
            f"{val.inputs.shape[1:]}; set data.size (size=) or convert them"
        )
    if train.columns.keys() != val.columns.keys():
        raise DataError(f"{where}: train has the columns {sorted(train.columns)} but val has {sorted(val.columns)}")
    return Examples(
        np.concatenate([train.inputs, val.inputs]),
        np.concatenate([train.labels, val.labels]),
        {column: np.concatenate([values, val.columns[column]]) for column, values in train.columns.items()},
    )
