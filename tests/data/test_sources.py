from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedretain.data import hub
from fedretain.data.schema import column_values, schema_class_names
from fedretain.data.sources import DATASETS, load_dataset, locate
from fedretain.errors import ConfigError, DataError

Small = tuple[Path, np.ndarray, np.ndarray]
TABLES = ("mnist", "fashion_mnist", "cifar10", "cifar100", "usps", "covid_ct")


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing should be downloaded")


def test_every_dataset_has_one_line_of_help() -> None:
    assert set(DATASETS) == {*TABLES, "digits", "parquet", "folder", "npz"}
    assert all(source.help and "\n" not in source.help for source in DATASETS.values())


def test_digits_need_nothing() -> None:
    assert load_dataset("digits").name == "digits"


@pytest.mark.parametrize("way", ["root", "variable"])
def test_published_dataset_from_root_or_variable(
    small_parquet: Small, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder, train, _ = small_parquet
    shutil.copytree(folder, folder.parent / "mnist")
    monkeypatch.setattr(hub, "download", fail)
    if way == "variable":
        monkeypatch.setenv("FEDRETAIN_DATA", str(folder.parent))
    made = load_dataset("mnist", root=folder.parent if way == "root" else None)
    assert made.name == "mnist"
    assert np.array_equal(made.train.inputs[:, 0], train)


def test_root_wins_over_the_variable(small_parquet: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, *_ = small_parquet
    shutil.copytree(folder, tmp_path / "right" / "usps")
    (tmp_path / "wrong" / "usps").mkdir(parents=True)
    monkeypatch.setenv("FEDRETAIN_DATA", str(tmp_path / "wrong"))
    assert locate("usps") == tmp_path / "wrong" / "usps"
    assert locate("usps", tmp_path / "right") == tmp_path / "right" / "usps"
    assert len(load_dataset("usps", root=str(tmp_path / "right")).train) == 6


def test_columns_of_cifar100(tmp_path: Path, write_parquet: Callable[..., Path], png: Callable[..., bytes]) -> None:
    names = {"fine_label": ["ant", "bee", "cat"], "coarse_label": ["insect", "mammal"]}
    for split in ("train", "test"):
        write_parquet(
            tmp_path / "cifar100" / f"{split}.parquet",
            [png(np.zeros((2, 2, 3), np.uint8))] * 3,
            image="img",
            names=names,
            fine_label=[0, 1, 2],
            coarse_label=[0, 0, 1],
        )
    fine = load_dataset("cifar100", root=tmp_path)
    assert fine.class_names == ("ant", "bee", "cat")
    assert fine.train.columns["coarse_label"].tolist() == [0, 0, 1]
    coarse = load_dataset("cifar100", root=tmp_path, label="coarse_label")
    assert coarse.class_names == ("insect", "mammal")
    assert coarse.train.labels.tolist() == [0, 0, 1]
    assert coarse.train.columns["fine_label"].tolist() == [0, 1, 2]
    assert coarse.fingerprint != fine.fingerprint


def test_hub_when_there_is_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(hub, "hub_installed", lambda: True)
    monkeypatch.setattr(hub, "download", lambda repository, **options: asked.append((repository, options)))
    load_dataset("cifar10", size=16)
    assert asked == [
        (
            "uoft-cs/cifar10",
            {"name": "cifar10", "image": "img", "label": "label", "size": 16, "include_val": False},
        )
    ]


def test_hub_when_the_variable_leads_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setenv("FEDRETAIN_DATA", str(tmp_path))
    monkeypatch.setattr(hub, "hub_installed", lambda: True)
    monkeypatch.setattr(hub, "download", lambda repository, **_: asked.append(repository))
    load_dataset("usps")
    assert asked == ["flwrlabs/usps"]


def test_missing_under_a_given_root_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "hub_installed", lambda: True)
    monkeypatch.setattr(hub, "download", fail)
    with pytest.raises(DataError, match=r"no folder .*/mnist \(data.root\).*FEDRETAIN_DATA.*leave out data.root"):
        load_dataset("mnist", root=tmp_path)


def test_missing_without_the_extra_names_every_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "hub_installed", lambda: False)
    with pytest.raises(DataError) as caught:
        load_dataset("mnist")
    message = str(caught.value)
    assert "neither data.root nor FEDRETAIN_DATA is set" in message
    assert "mnist/train.parquet" in message
    assert "pip install 'fedretain[hub]'" in message
    monkeypatch.setenv("FEDRETAIN_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"no folder .*/gone/mnist \(FEDRETAIN_DATA\)"):
        load_dataset("mnist")


def test_what_the_hub_does_not_have_is_not_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_installed", lambda: True)
    monkeypatch.setattr(hub, "download", fail)
    with pytest.raises(DataError, match=r"'covid_ct' not found.*it is not on the Hugging Face hub"):
        load_dataset("covid_ct")


def test_own_data_by_path(small_parquet: Small, tmp_path: Path) -> None:
    folder, *_ = small_parquet
    assert load_dataset("parquet", path=folder, image="image", label="label").name == "small"
    np.savez(tmp_path / "mine.npz", x_train=[[1.0]], y_train=[0], x_test=[[1.0]], y_test=[0])
    assert load_dataset("npz", path=tmp_path / "mine.npz").name == "mine"
    with pytest.raises(DataError, match=r"train: no such folder"):
        load_dataset("folder", path=tmp_path / "none", size=4)


@pytest.mark.parametrize("name", ["parquet", "folder", "npz"])
def test_own_data_need_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset '{name}' needs data.path"):
        load_dataset(name)


def test_unknown_names_and_options() -> None:
    with pytest.raises(ConfigError, match=r"unknown dataset 'minst'; did you mean 'mnist'"):
        load_dataset("minst")
    with pytest.raises(ConfigError, match=r"data.path has no meaning for dataset 'mnist', which takes root, image"):
        load_dataset("mnist", path="x")
    with pytest.raises(ConfigError, match=r"data.root has no meaning for dataset 'digits', which takes no options"):
        load_dataset("digits", root="x")
    with pytest.raises(ConfigError, match=r"data.include_val has no meaning for dataset 'usps'"):
        load_dataset("usps", include_val=True)


KIT = {
    "usps": (7291, 2007, (1, 16, 16), 10),
    "mnist": (60000, 10000, (1, 28, 28), 10),
    "covid_ct": (425, 203, (1, 256, 256), 2),
}


@pytest.mark.kit
@pytest.mark.parametrize("name", KIT)
def test_real_datasets(kit_data: Path, name: str) -> None:
    made = load_dataset(name)
    assert (len(made.train), len(made.test), made.shape, made.classes) == KIT[name]
    assert made.train.inputs.dtype == np.uint8
    again = load_dataset(name)
    assert again.fingerprint == made.fingerprint


@pytest.mark.kit
def test_mnist_class_counts(kit_data: Path) -> None:
    """The counts of the original training labels, digit by digit."""
    counts = np.bincount(load_dataset("mnist").train.labels)
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.kit
def test_mnist_pixels_are_those_of_the_original_file(kit_data: Path) -> None:
    """md5 of the original train-images-idx3-ubyte: a header of four big-endian numbers, then the pixels."""
    pixels = load_dataset("mnist").train.inputs
    header = b"".join(n.to_bytes(4, "big") for n in (2051, 60000, 28, 28))
    assert hashlib.md5(header + pixels.tobytes()).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"


@pytest.mark.kit
def test_covid_ct_counts_columns_and_validation_split(kit_data: Path) -> None:
    """COVID / non-COVID: train 191 / 234, val 60 / 58, test 98 / 105; non-COVID has no source."""
    made = load_dataset("covid_ct")
    assert made.class_names == ("NonCOVID", "COVID")
    assert np.bincount(made.train.labels).tolist() == [234, 191]
    assert np.bincount(made.test.labels).tolist() == [105, 98]
    assert set(made.train.columns) == {"source", "file", "patient"}
    assert np.array_equal(made.train.columns["source"] == "", made.train.labels == 0)
    both = load_dataset("covid_ct", include_val=True)
    assert np.bincount(both.train.labels).tolist() == [234 + 58, 191 + 60]
    assert both.test.labels.tolist() == made.test.labels.tolist()


@pytest.mark.kit
def test_cifar100_coarse_labels(kit: Path) -> None:
    """500 training images of each of 100 classes, five classes to a superclass; only labels are read."""
    with pq.ParquetFile(kit / "cifar100" / "train.parquet") as file:
        values = column_values(file.read(columns=["fine_label", "coarse_label"]))
        names = schema_class_names(file.schema_arrow)
    assert np.bincount(values["fine_label"]).tolist() == [500] * 100
    assert np.bincount(values["coarse_label"]).tolist() == [2500] * 20
    assert {column: len(of) for column, of in names.items()} == {"fine_label": 100, "coarse_label": 20}
