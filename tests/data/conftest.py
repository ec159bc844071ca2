"""Small datasets made on the spot, and a cache folder of their own for all data tests."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache, or finds the user's data."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDRETAIN_CACHE", str(folder))
    monkeypatch.delenv("FEDRETAIN_DATA", raising=False)
    return folder


@pytest.fixture(scope="session")
def kit_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kit-cache")


@pytest.fixture
def kit_data(kit: Path, kit_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real datasets, decoded once for all tests of the session."""
    monkeypatch.setenv("FEDRETAIN_DATA", str(kit))
    monkeypatch.setenv("FEDRETAIN_CACHE", str(kit_cache))
    return kit


def encode(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def grey(count: int, height: int = 4, width: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width), dtype=np.uint8)


@pytest.fixture
def png() -> Callable[..., bytes]:
    return encode


@pytest.fixture
def pictures() -> Callable[..., np.ndarray]:
    return grey


@pytest.fixture
def write_parquet() -> Callable[..., Path]:
    """Writes a parquet file in the hub's schema: ``blobs`` encoded images, other columns by name."""

    def write(
        path: Path,
        blobs: Sequence[bytes | None],
        *,
        image: str = "image",
        names: dict[str, list[str]] | None = None,
        **columns: Any,
    ) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({image: pa.array([{"bytes": b, "path": None} for b in blobs], kind), **columns})
        features: dict[str, Any] = {image: {"_type": "Image"}}
        features |= {c: {"names": n, "_type": "ClassLabel"} for c, n in (names or {}).items()}
        described = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(described), path)
        return path

    return write


@pytest.fixture
def small_parquet(tmp_path: Path, write_parquet: Callable[..., Path]) -> tuple[Path, np.ndarray, np.ndarray]:
    """A folder ``small`` with 6 training and 3 test images of 3 classes; and their pixels [N, H, W]."""
    train, test = grey(6, seed=1), grey(3, seed=2)
    names = {"label": ["ant", "bee", "cat"]}
    for split, images, labels in (("train", train, [0, 1, 2, 0, 1, 2]), ("test", test, [2, 1, 0])):
        write_parquet(
            tmp_path / "small" / f"{split}.parquet",
            [encode(p) for p in images],
            names=names,
            label=labels,
            source=[None if label == 0 else f"s{label}" for label in labels],
        )
    return tmp_path / "small", train, test
