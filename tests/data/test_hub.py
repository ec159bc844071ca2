from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain.data import hub
from fedretain.data.hub import download, from_hub
from fedretain.data.parquet import load_parquet
from fedretain.errors import DataError, MissingExtraError

datasets = pytest.importorskip("datasets", reason="pip install 'fedretain[hub]' to test the way from the hub")

Png = Callable[..., bytes]
Pictures = Callable[..., np.ndarray]


def split(blobs: list[Any], labels: list[int], image: str = "image", **columns: list[Any]) -> Any:
    features = {image: datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])}
    features |= {column: datasets.Value("string") for column in columns}
    rows = {image: [b and {"bytes": b, "path": None} for b in blobs], "label": labels, **columns}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.fixture
def both(png: Png, pictures: Pictures) -> Any:
    blobs = [png(p) for p in pictures(5)]
    return datasets.DatasetDict(
        train=split(blobs[:3], [0, 1, 0], who=["a", None, "c"]), test=split(blobs[3:], [1, 0], who=["d", "e"])
    )


def test_conversion(both: Any, pictures: Pictures) -> None:
    made = from_hub(both, name="toy")
    assert np.array_equal(made.train.inputs[:, 0], pictures(5)[:3])
    assert np.array_equal(made.test.inputs[:, 0], pictures(5)[3:])
    assert made.train.labels.tolist() == [0, 1, 0]
    assert made.class_names == ("ant", "bee")
    assert made.train.columns["who"].tolist() == ["a", "", "c"]
    assert made.scale == 255


def test_same_fingerprint_as_from_parquet_files(both: Any, tmp_path: Path) -> None:
    """What ``datasets`` writes, the parquet reader understands: class names, columns and pixels."""
    for part in ("train", "test"):
        both[part].to_parquet(str(tmp_path / f"{part}.parquet"))
    read = load_parquet(tmp_path, name="toy")
    assert read.fingerprint == from_hub(both, name="toy").fingerprint
    assert read.class_names == ("ant", "bee")
    assert read.train.columns["who"].tolist() == ["a", "", "c"]


def test_selected_rows_keep_their_order_over_many_batches(png: Png) -> None:
    """2,500 rows are three batches; the pixel of row i is i // 10, and the rows are taken backwards."""
    blobs = [png(np.full((1, 1), i // 10, np.uint8)) for i in range(2500)]
    whole = split(blobs, [i % 2 for i in range(2500)])
    backwards = whole.select(range(2499, -1, -1))
    made = from_hub({"train": backwards, "test": whole})
    assert made.train.inputs.ravel().tolist() == [i // 10 for i in range(2499, -1, -1)]
    assert made.train.labels.tolist() == [i % 2 for i in range(2499, -1, -1)]


def test_images_in_files_of_their_own(png: Png, pictures: Pictures, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path, pixels in zip(paths, pictures(2), strict=True):
        path.write_bytes(png(pixels))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x"])})
    rows = {"image": [str(path) for path in paths], "label": [0, 0]}
    made = datasets.Dataset.from_dict(rows, features=features)
    assert np.array_equal(from_hub({"train": made, "test": made}).train.inputs[:, 0], pictures(2))
    paths[1].unlink()
    with pytest.raises(DataError, match=r"train, row 1: cannot read the image file .*1.png"):
        from_hub({"train": made, "test": made})


def test_validation_split_under_the_hubs_name(both: Any) -> None:
    parts = {"train": both["train"], "test": both["test"], "validation": both["test"]}
    assert from_hub(parts, include_val=True).train.labels.tolist() == [0, 1, 0, 1, 0]
    assert len(from_hub(parts).train) == 3
    with pytest.raises(DataError, match=r"no split 'val' \(there are: train, test\)"):
        from_hub(both, include_val=True)


def test_bad_splits(both: Any, png: Png) -> None:
    with pytest.raises(DataError, match=r"no split 'test' \(there are: train\)"):
        from_hub({"train": both["train"]})
    with pytest.raises(DataError, match=r"expected a mapping of splits.*not Dataset"):
        from_hub(both["train"])
    with pytest.raises(DataError, match=r"split 'train' is a IterableDataset.*without streaming"):
        from_hub({"train": both["train"].to_iterable_dataset(), "test": both["test"]})
    with pytest.raises(DataError, match=r"train, row 1: cannot decode"):
        from_hub({"train": split([png(np.zeros((2, 2), np.uint8)), b"?"], [0, 1]), "test": both["test"]})
    with pytest.raises(DataError, match=r"train, row 0: there is no image"):
        from_hub({"train": split([None], [0]), "test": both["test"]})
    with pytest.raises(DataError, match=r"train: the split has no rows"):
        from_hub({"train": both["train"].select([]), "test": both["test"]})


def test_download_passes_the_repository_on(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(repository: str) -> Any:
        asked.append(repository)
        return both

    monkeypatch.setattr(datasets, "load_dataset", load)
    made = download("someone/toy", name="toy", image="image", label="label")
    assert asked == ["someone/toy"]
    assert made.name == "toy"


def test_no_network_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_: str) -> Any:
        raise ConnectionError("Couldn't reach 'ylecun/mnist' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"'ylecun/mnist'.*ConnectionError.*connect to the network.*FEDRETAIN_DATA"):
        download("ylecun/mnist", name="mnist")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_installed", lambda: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedretain\[hub\]'"):
        download("ylecun/mnist", name="mnist")


def test_importing_the_module_does_not_import_the_package() -> None:
    """The extra is slow to import and optional: a process of its own has a clean list of modules."""
    code = "import sys, fedretain.data.sources; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
