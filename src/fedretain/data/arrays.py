"""Datasets from arrays: in memory, or in an ``.npz`` file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from fedretain.data.dataset import Array, Dataset, Examples
from fedretain.data.labels import encode_labels
from fedretain.errors import DataError

_KEYS = ("x_train", "y_train", "x_test", "y_test")


def from_arrays(
    x_train: ArrayLike | torch.Tensor,
    y_train: ArrayLike | torch.Tensor,
    x_test: ArrayLike | torch.Tensor,
    y_test: ArrayLike | torch.Tensor,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    columns: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    scale: float | None = None,
) -> Dataset:
    """The dataset of four NumPy arrays or torch tensors, which are copied.

    Inputs may be vectors [N, D] (kept as [N, D, 1, 1]), grey images [N, H, W] or images [N, C, H, W] or
    [N, H, W, C]; the last layout is assumed when the last dimension is 1 or 3 and the second is not.
    Whole numbers within 0 .. 255 become uint8 (scale 255), everything else float32 (scale 1); ``scale``
    overrides the largest value. Labels are class numbers or text. ``columns`` maps a name to its values
    for train and for test.
    """
    where = f"dataset {name!r}"
    inputs = [_inputs(x, f"{where}, {split}") for x, split in ((x_train, "train"), (x_test, "test"))]
    if any(x.dtype == np.float32 for x in inputs):
        inputs = [x.astype(np.float32) for x in inputs]
    labels, names = encode_labels({"train": _numpy(y_train), "test": _numpy(y_test)}, class_names, where)
    extra: dict[str, dict[str, Array]] = {"train": {}, "test": {}}
    for column, pair in (columns or {}).items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"{where}: column {column!r} must be a pair (values for train, values for test)")
        extra["train"][column], extra["test"][column] = (np.array(values) for values in pair)
    return Dataset(
        name,
        Examples(inputs[0], labels["train"], extra["train"]),
        Examples(inputs[1], labels["test"], extra["test"]),
        names,
        scale=scale if scale is not None else (255.0 if inputs[0].dtype == np.uint8 else 1.0),
    )


def load_npz(path: str | Path, *, name: str | None = None) -> Dataset:
    """The dataset of an ``.npz`` file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    Further pairs ``NAME_train`` and ``NAME_test`` become the column NAME, and ``class_names`` names the
    classes.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{file}: no such file; data.path (path=) must lead to an .npz file with {', '.join(_KEYS)}")
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is not an archive of arrays")
        with np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: cannot read the .npz file ({error}); write it with np.savez, without objects"
        ) from error
    missing = [key for key in _KEYS if key not in arrays]
    if missing:
        raise DataError(
            f"{file}: {', '.join(missing)} missing (there are: {', '.join(arrays) or 'none'}); "
            f"an .npz dataset holds {', '.join(_KEYS)}"
        )
    columns = {
        key.removesuffix("_train")
        for key in arrays
        if key not in _KEYS and key.endswith("_train") and f"{key.removesuffix('_train')}_test" in arrays
    }
    return from_arrays(
        *(arrays[key] for key in _KEYS),
        name=name or file.stem,
        class_names=[str(c) for c in arrays["class_names"]] if "class_names" in arrays else None,
        columns={column: (arrays[f"{column}_train"], arrays[f"{column}_test"]) for column in sorted(columns)},
    )


def _numpy(values: ArrayLike | torch.Tensor) -> Array:
    """A copy as a NumPy array, so that the dataset does not change when its source does."""
    if isinstance(values, torch.Tensor):
        plain = values.detach().cpu()
        return np.array((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
    array: Array = np.array(values)
    if array.dtype == np.object_ and all(isinstance(value, str) for value in array.reshape(-1)):
        return array.astype(np.str_)
    return array


def _inputs(values: ArrayLike | torch.Tensor, where: str) -> Array:
    array = _numpy(values)
    if array.dtype.kind not in "uifb":
        raise DataError(f"{where}: inputs of type {array.dtype} cannot be used; give numbers")
    return np.ascontiguousarray(_channels_first(_pixel_type(array), where))


def _pixel_type(array: Array) -> Array:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind in "ui" and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused with its index
        return array.astype(np.float32)


def _channels_first(array: Array, where: str) -> Array:
    shape: tuple[Any, ...] = array.shape
    match array.ndim:
        case 2:
            return array[:, :, None, None]
        case 3:
            return array[:, None]
        case 4 if shape[3] in (1, 3) and shape[1] not in (1, 3):
            return array.transpose(0, 3, 1, 2)
        case 4:
            return array
    raise DataError(f"{where}: inputs have shape {shape}; give [N, D], [N, H, W], [N, C, H, W] or [N, H, W, C]")
