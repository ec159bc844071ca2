"""The client-state store: bounded memory, versions that never change, nothing written twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedretain.errors import RunError
from fedretain.runs.clients import ClientStore, worst_case_bytes
from fedretain.tensors import Tensors

LIKE = torch.zeros(())


def state(number: float, size: int = 250) -> Tensors:
    """1,000 bytes of one number, and a count."""
    return {"c": torch.full((size,), number), "seen": torch.tensor([True])}


def test_memory_stays_under_the_bound_for_thousands_of_clients(tmp_path: Path) -> None:
    """3,000 clients × 1,001 bytes with room for 20 of them; every one of them is read back exactly."""
    store = ClientStore(tmp_path / "clients", memory=20 * 1001)
    for client in range(3000):
        store.write((client, 1), state(client))
        assert store.in_memory <= 20 * 1001
    for client in range(0, 3000, 7):
        assert torch.equal(store.read((client, 1), LIKE)["c"], state(client)["c"])
        assert store.in_memory <= 20 * 1001


def test_a_state_larger_than_the_bound_goes_to_disk_at_once(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, memory=100)
    store.write((1, 1), state(5))
    assert store.in_memory == 0
    assert store.read((1, 1), LIKE)["c"][0] == 5


def test_saving_writes_only_what_is_not_there_yet(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for client in range(4):
        store.write((client, 1), state(client))
    store.save({0: 1, 1: 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000-000001.safetensors",
        "0000001-000001.safetensors",
    ]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    store.write((1, 2), state(11))
    store.save({0: 1, 1: 2})
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (tmp_path / "0000001-000002.safetensors").exists()


def test_another_process_goes_on_from_the_files(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.write((7, 3), state(0.1))
    store.save({7: 3})
    again = ClientStore(tmp_path)
    assert torch.equal(again.read((7, 3), LIKE)["c"], state(0.1)["c"])
    assert again.read((7, 3), LIKE)["seen"].dtype == torch.bool


def test_versions_nobody_needs_are_removed(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for number in (1, 2, 3):
        store.write((5, number), state(number))
        store.save({5: number})
    store.forget_all_but({(5, 2), (5, 3)})
    assert not store.has((5, 1))
    assert store.has((5, 2))
    assert store.read((5, 3), LIKE)["c"][0] == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_read_can_be_changed_without_harm(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    given = state(1)
    store.write((1, 1), given)
    given["c"].zero_()
    store.read((1, 1), LIKE)["c"].zero_()
    assert store.read((1, 1), LIKE)["c"][0] == 1


def test_half_precision_rounds_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    """1 + 2⁻⁹ lies between the bfloat16 numbers 1 and 1 + 2⁻⁷ and becomes 1; half the bytes, read back in float32."""
    held, spilled = ClientStore(tmp_path / "a", half=True), ClientStore(tmp_path / "b", memory=0, half=True)
    for store in (held, spilled):
        store.write((1, 1), state(1 + 2**-9))
        read = store.read((1, 1), LIKE)
        assert read["c"].dtype == torch.float32
        assert torch.equal(read["c"], torch.ones(250))
    assert held.in_memory == 250 * 2 + 1


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "0000003-000002.safetensors").write_bytes(b"broken")
    with pytest.raises(RunError, match=r"0000003-000002.safetensors: the state of client 3 cannot be read"):
        ClientStore(tmp_path).read((3, 2), LIKE)


def test_without_a_folder_everything_stays_in_memory() -> None:
    store = ClientStore(memory=1)
    store.write((1, 1), state(1))
    store.save({1: 1})
    assert store.has((1, 1))
    with pytest.raises(RunError, match="client 2 after round 1 is not held"):
        store.read((2, 1), LIKE)


def test_worst_case() -> None:
    """SCAFFOLD on 50,000 clients with a 26.3 MB ResNet-9, 100 a round, 1,200 rounds: 120,000 versions, under 3 each.

    Ten rounds of 5 write 50 versions. Ten clients that take part by fives: three versions each, five under way.
    """
    assert worst_case_bytes(26_300_000, 50_000, 100, 1200) == 26_300_000 * 120_000
    assert worst_case_bytes(1000, 50_000, 5, 10) == 1000 * 50
    assert worst_case_bytes(1000, 10, 5, 100) == 1000 * 35
