from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedretain.data import parquet
from fedretain.data.dataset import array_digest
from fedretain.data.parquet import load_parquet
from fedretain.errors import DataError

Small = tuple[Path, np.ndarray, np.ndarray]
Write = Callable[..., Path]
Png = Callable[..., bytes]
Pictures = Callable[..., np.ndarray]


def test_pixels_labels_names_and_columns(small_parquet: Small) -> None:
    folder, train, test = small_parquet
    made = load_parquet(folder)
    assert made.name == "small"
    assert made.scale == 255
    assert np.array_equal(made.train.inputs, train[:, None])
    assert np.array_equal(made.test.inputs, test[:, None])
    assert made.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert made.class_names == ("ant", "bee", "cat")
    assert made.train.columns["source"].tolist() == ["", "s1", "s2", "", "s1", "s2"]
    assert list(made.train.columns) == ["source"]


def test_second_load_comes_from_the_cache_and_is_the_same(
    small_parquet: Small, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    folder, *_ = small_parquet
    first = load_parquet(folder)
    assert len(list(own_cache.iterdir())) == 2
    assert first.train.checksum == array_digest(first.train.inputs)
    monkeypatch.setattr(parquet, "decode_images", None)
    again = load_parquet(folder)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train.inputs, first.train.inputs)


def test_another_content_under_the_same_name_is_decoded_anew(
    small_parquet: Small, write_parquet: Write, png: Png, pictures: Pictures
) -> None:
    folder, *_ = small_parquet
    before = load_parquet(folder)
    other = pictures(6, seed=9)
    blobs = [png(p) for p in other]
    names = {"label": ["ant", "bee", "cat"]}
    write_parquet(folder / "train.parquet", blobs, names=names, label=[0, 1, 2, 0, 1, 2], source=["a"] * 6)
    after = load_parquet(folder)
    assert np.array_equal(after.train.inputs[:, 0], other)
    assert after.fingerprint != before.fingerprint


def test_own_column_names_plain_bytes_and_text_labels(tmp_path: Path, png: Png, pictures: Pictures) -> None:
    for name, labels in (("train", ["no", "yes", "no"]), ("test", ["yes", "no", "no"])):
        table = pa.table({"scan": [png(p) for p in pictures(3)], "verdict": labels, "ward": [1, 2, 3]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    made = load_parquet(tmp_path, image="scan", label="verdict")
    assert made.class_names == ("no", "yes")
    assert made.train.labels.tolist() == [0, 1, 0]
    assert made.train.columns["ward"].tolist() == [1, 2, 3]


def test_shards_and_the_data_folder_of_a_hub_clone(
    tmp_path: Path, write_parquet: Write, png: Png, pictures: Pictures
) -> None:
    pixels = pictures(5)
    blobs = [png(p) for p in pixels]
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", blobs[3:], label=[1, 0])
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", blobs[:3], label=[0, 1, 1])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", blobs[:1], label=[0])
    made = load_parquet(tmp_path)
    assert np.array_equal(made.train.inputs[:, 0], pixels)
    assert made.train.labels.tolist() == [0, 1, 1, 1, 0]


def test_validation_split_is_appended_on_request(
    small_parquet: Small, write_parquet: Write, png: Png, pictures: Pictures
) -> None:
    folder, *_ = small_parquet
    with pytest.raises(DataError, match=r"no val.parquet"):
        load_parquet(folder, include_val=True)
    write_parquet(
        folder / "val.parquet",
        [png(p) for p in pictures(2, seed=5)],
        names={"label": ["ant", "bee", "cat"]},
        label=[2, 2],
        source=["v", "v"],
    )
    assert len(load_parquet(folder).train) == 6
    with_val = load_parquet(folder, include_val=True)
    assert with_val.train.labels.tolist() == [0, 1, 2, 0, 1, 2, 2, 2]
    assert np.array_equal(with_val.train.inputs[6:, 0], pictures(2, seed=5))


def test_size_resizes_and_is_cached_apart(small_parquet: Small) -> None:
    folder, *_ = small_parquet
    assert load_parquet(folder).shape == (1, 4, 5)
    assert load_parquet(folder, size=8).shape == (1, 8, 8)
    assert load_parquet(folder).shape == (1, 4, 5)


def test_missing_files(tmp_path: Path, small_parquet: Small) -> None:
    with pytest.raises(DataError, match=r"nowhere: no train.parquet"):
        load_parquet(tmp_path / "nowhere")
    folder, *_ = small_parquet
    (folder / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"no test.parquet"):
        load_parquet(folder)


@pytest.mark.parametrize("kept", [0, 3, 100, -4])
def test_truncated_parquet(small_parquet: Small, kept: int) -> None:
    folder, *_ = small_parquet
    file = folder / "train.parquet"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"train.parquet: cannot read the parquet file .*fetch it again"):
        load_parquet(folder)


def test_damaged_pages(tmp_path: Path, write_parquet: Write, png: Png, pictures: Pictures) -> None:
    """The footer is whole, so that only reading the rows finds the damage, in the pages or in an image."""
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [png(p) for p in pictures(20)], label=[0, 1] * 10)
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[4:400] = b"\xff" * 396
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"train.parquet"):
        load_parquet(tmp_path)


def test_undecodable_image_names_the_row_of_the_file(
    tmp_path: Path, write_parquet: Write, png: Png, pictures: Pictures, own_cache: Path
) -> None:
    """Row 1,500 lies in the second batch of 1,024 rows."""
    blobs = [png(pictures(1)[0])] * 2000
    write_parquet(tmp_path / "test.parquet", blobs[:2], label=[0, 1])
    write_parquet(tmp_path / "train.parquet", [*blobs[:1500], b"?", *blobs[1501:]], label=[0, 1] * 1000)
    with pytest.raises(DataError, match=r"train.parquet, row 1500: cannot decode the image"):
        load_parquet(tmp_path)
    assert not own_cache.exists()
    write_parquet(tmp_path / "train.parquet", [*blobs[:1500], None, *blobs[1501:]], label=[0, 1] * 1000)
    with pytest.raises(DataError, match=r"train.parquet, row 1500: column 'image' holds no image bytes"):
        load_parquet(tmp_path)


def test_wrong_columns(small_parquet: Small) -> None:
    folder, *_ = small_parquet
    with pytest.raises(DataError, match=r"unknown column 'imag'; did you mean 'image'"):
        load_parquet(folder, image="imag")
    with pytest.raises(DataError, match=r"unknown label column 'labels'; did you mean 'label'"):
        load_parquet(folder, label="labels")
    with pytest.raises(DataError, match=r"column 'label' has type int64"):
        load_parquet(folder, image="label")


def test_label_out_of_range_for_the_named_classes(
    tmp_path: Path, write_parquet: Write, png: Png, pictures: Pictures
) -> None:
    for split, labels in (("train", [0, 1, 7]), ("test", [0, 1, 1])):
        write_parquet(
            tmp_path / f"{split}.parquet",
            [png(p) for p in pictures(3)],
            names={"label": ["a", "b"]},
            label=labels,
        )
    with pytest.raises(DataError, match=r"train: example 2 has label 7, but with 2 classes"):
        load_parquet(tmp_path)


def test_no_rows(tmp_path: Path, write_parquet: Write) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [], label=pa.array([], pa.int64()))
    with pytest.raises(DataError, match=r"train.parquet: the file has no rows"):
        load_parquet(tmp_path)


def test_unreadable_cache_folder_is_no_hindrance(
    small_parquet: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, train, _ = small_parquet
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"not kept"):
        made = load_parquet(folder)
    assert np.array_equal(made.train.inputs[:, 0], train)
