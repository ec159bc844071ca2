"""The datasets by name, and the one way in to all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from fedretain.data.arrays import load_npz
from fedretain.data.dataset import Dataset
from fedretain.data.digits import load_digits
from fedretain.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from fedretain.data.images import Size


@dataclass(frozen=True)
class Source:
    """What is known of a dataset before it is loaded: help, accepted options, hub repository and columns."""

    help: str
    options: tuple[str, ...] = ()
    hub: str | None = None
    image: str | None = None
    label: str | None = None
    columns: tuple[str, ...] = ()


_TABLE_OPTIONS = ("root", "image", "label", "size")

DATASETS: Mapping[str, Source] = MappingProxyType(
    {
        "digits": Source("UCI handwritten digits, 8x8 grey, 10 classes, 1,437 + 360 (inside the package)"),
        "mnist": Source(
            "handwritten digits, 28x28 grey, 10 classes, 60,000 + 10,000",
            _TABLE_OPTIONS,
            hub="ylecun/mnist",
            image="image",
            label="label",
        ),
        "fashion_mnist": Source(
            "clothes, 28x28 grey, 10 classes, 60,000 + 10,000",
            _TABLE_OPTIONS,
            hub="zalando-datasets/fashion_mnist",
            image="image",
            label="label",
        ),
        "cifar10": Source(
            "photographs, 32x32 RGB, 10 classes, 50,000 + 10,000",
            _TABLE_OPTIONS,
            hub="uoft-cs/cifar10",
            image="img",
            label="label",
        ),
        "cifar100": Source(
            "photographs, 32x32 RGB, 100 classes (label: coarse_label for 20), 50,000 + 10,000",
            _TABLE_OPTIONS,
            hub="uoft-cs/cifar100",
            image="img",
            label="fine_label",
            columns=("coarse_label",),
        ),
        "usps": Source(
            "handwritten digits, 16x16 grey, 10 classes, 7,291 + 2,007",
            _TABLE_OPTIONS,
            hub="flwrlabs/usps",
            image="image",
            label="label",
        ),
        "covid_ct": Source(
            "chest CT slices, 256x256 grey, 2 classes, 425 (+ 118 with include_val) + 203",
            (*_TABLE_OPTIONS, "include_val"),
            image="image",
            label="label",
            columns=("source", "file", "patient"),
        ),
        "parquet": Source(
            "your parquet files in the Hugging Face hub's schema: path/train.parquet, path/test.parquet",
            ("path", "image", "label", "size", "include_val"),
        ),
        "folder": Source(
            "your images in folders: path/train/<class>/*.png and path/test/<class>/*.png (or .jpg)",
            ("path", "size"),
        ),
        "npz": Source("your arrays in an .npz file: x_train, y_train, x_test, y_test", ("path",)),
    }
)


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    path: str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    include_val: bool = False,
) -> Dataset:
    """The dataset ``name`` of ``DATASETS``.

    The published ones are read from ``root/name`` (by default ``$FEDRETAIN_DATA/name``); where neither
    leads to the dataset and no ``root`` is given, from the Hugging Face hub if the package ``datasets``
    is installed. ``path`` leads to your own data for ``parquet``, ``folder`` and ``npz``. ``image`` and
    ``label`` choose columns, ``size`` resizes the images, ``include_val`` appends the validation split to
    the training set.
    """
    if name not in DATASETS:
        raise ConfigError(unknown("dataset", name, DATASETS))
    source = DATASETS[name]
    given = {"root": root, "path": path, "image": image, "label": label, "size": size}
    asked = [option for option, value in given.items() if value is not None] + ["include_val"] * include_val
    for option in asked:
        if option not in source.options:
            takes = ", ".join(source.options) or "no options"
            raise ConfigError(f"data.{option} has no meaning for dataset {name!r}, which takes {takes}; remove it")
    image, label = image or source.image, label or source.label
    if name == "digits":
        return load_digits()
    if "path" in source.options:
        if path is None:
            raise ConfigError(f"dataset {name!r} needs data.path (path=): {source.help}")
        if name == "npz":
            return load_npz(path)
        if name == "folder":
            from fedretain.data.folder import load_folder

            return load_folder(path, size=size)
    # What decodes images and tables is imported where there are some: it takes memory in every process.
    from fedretain.data.parquet import load_parquet

    if path is not None:
        return load_parquet(path, image=image, label=label, size=size, include_val=include_val)
    folder = locate(name, root)
    if folder is not None:
        return load_parquet(folder, name=name, image=image, label=label, size=size, include_val=include_val)
    from fedretain.data.hub import download, hub_installed

    if root is None and source.hub is not None and hub_installed():
        return download(source.hub, name=name, image=image, label=label, size=size, include_val=include_val)
    raise DataError(_not_found(name, root))


def locate(name: str, root: str | Path | None = None) -> Path | None:
    """The folder of a published dataset under ``root`` or ``$FEDRETAIN_DATA``; None where it is not there."""
    base = root if root is not None else os.environ.get("FEDRETAIN_DATA")
    if not base:
        return None
    folder = Path(base).expanduser() / name
    return folder if folder.is_dir() else None


def _not_found(name: str, root: str | Path | None) -> str:
    if root is not None:
        looked = f"there is no folder {Path(root).expanduser() / name} (data.root)"
    elif os.environ.get("FEDRETAIN_DATA"):
        looked = f"there is no folder {Path(os.environ['FEDRETAIN_DATA']).expanduser() / name} (FEDRETAIN_DATA)"
    else:
        looked = "neither data.root nor FEDRETAIN_DATA is set"
    here = (
        f"set FEDRETAIN_DATA or data.root (root=) to the folder that holds {name}/train.parquet and {name}/test.parquet"
    )
    from fedretain.data.hub import hub_installed

    hub = DATASETS[name].hub
    if hub is None:
        return f"dataset {name!r} not found: {looked}. Please {here}; it is not on the Hugging Face hub"
    elsewhere = (
        f"leave out data.root to download {hub} from the Hugging Face hub"
        if hub_installed()
        else f"pip install 'fedretain[hub]' and leave out data.root to download {hub} from the hub"
    )
    return f"dataset {name!r} not found: {looked}. Either {here}, or {elsewhere}"
