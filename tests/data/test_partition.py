"""Every partition: exact sizes, nothing lost or repeated, always ends, same seed = same split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedretain.data import partition
from fedretain.data.partition import (
    PARTITIONS,
    Parts,
    by_column,
    classes_per_client,
    dirichlet,
    dirichlet_by_class,
    iid,
    label_clusters,
    label_mix,
    shards,
    split_validation,
    tiny,
)
from fedretain.errors import PartitionError
from fedretain.randomness import stream

several = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)
alphas = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
label_arrays = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)

TEN_CLASSES = np.arange(2000) % 10
FEW_OF_SOME = np.repeat(np.arange(4), [3, 40, 11, 90])


def check_parts(parts: Parts, examples: int, *, all_used: bool = False) -> list[int]:
    """Non-empty, int64, ascending, disjoint and within range; returns the sizes."""
    flat = np.concatenate(parts)
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()
    assert len(np.unique(flat)) == len(flat)
    assert flat.min() >= 0
    assert flat.max() < examples
    if all_used:
        assert len(flat) == examples
    return [len(part) for part in parts]


def same(one: Parts, other: Parts) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def class_counts(parts: Parts, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


SEEDED: dict[str, Callable[[int], Parts]] = {
    "dirichlet": lambda seed: dirichlet(TEN_CLASSES, clients=20, alpha=0.5, seed=seed),
    "dirichlet_by_class": lambda seed: dirichlet_by_class(TEN_CLASSES, clients=20, alpha=0.5, seed=seed),
    "label_clusters": lambda seed: label_clusters(TEN_CLASSES, sizes=(2, 8), seed=seed),
    "classes_per_client": lambda seed: classes_per_client(TEN_CLASSES, clients=20, power=2.0, seed=seed),
    "tiny": lambda seed: tiny(TEN_CLASSES, clients=200, examples=5, one_class=True, seed=seed),
    "shards": lambda seed: shards(TEN_CLASSES, clients=20, seed=seed),
    "iid": lambda seed: iid(TEN_CLASSES, clients=20, seed=seed),
    "by_column": lambda seed: by_column(["a", "b", "", ""] * 50, seed=seed),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides_the_split(name: str) -> None:
    split = SEEDED[name]
    np.random.default_rng(0).random(7)  # whatever else draws does not matter
    assert same(split(3), split(3))
    assert not same(split(3), split(4))


@pytest.mark.parametrize("name", PARTITIONS)
def test_hyper_parameters_can_be_read_from_the_signature(name: str) -> None:
    """What the experiment file needs: a one-line help, and types from which pydantic refuses bad values."""
    function = PARTITIONS[name]
    assert (function.__doc__ or "").splitlines()[0].endswith(".")
    hints = get_type_hints(function, include_extras=True)
    key = "sizes" if name == "label_clusters" else "clients"
    adapter: TypeAdapter[Any] = TypeAdapter(hints[key])
    assert adapter.validate_python([2, 8] if key == "sizes" else 5) == ([2, 8] if key == "sizes" else 5)
    with pytest.raises(ValidationError):
        adapter.validate_python([] if key == "sizes" else 0)


class TestDirichlet:
    @several
    @given(label_arrays, st.data(), alphas, seeds)
    def test_equal_sizes_for_every_alpha(
        self, labels: NDArray[np.int64], data: st.DataObject, alpha: float, seed: int
    ) -> None:
        clients = data.draw(st.integers(1, len(labels)))
        parts = dirichlet(labels, clients=clients, alpha=alpha, seed=seed)
        assert check_parts(parts, len(labels)) == [len(labels) // clients] * clients

    @pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1, 1e3, 1e300])
    def test_fifty_thousand_clients(self, alpha: float) -> None:
        labels = np.arange(50_000) % 10
        assert check_parts(dirichlet(labels, clients=50_000, alpha=alpha, seed=1), 50_000, all_used=True)

    @pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
    def test_class_mix_follows_the_theory(self, alpha: float) -> None:
        """E Σ_c (x_c/N)² for N draws from q ~ Dir(α·C·p), of total concentration a = C·α.

        E q_c² = p_c(ap_c + 1)/(a + 1), so S = E Σ q_c² = (1 + a·Σp²)/(1 + a), and the draws add (1 − S)/N.
        Here p = (0.5, 0.3, 0.2), Σp² = 0.38, N = 100. Only the first 1,000 of 3,000 clients are taken, since
        classes run out for the last. One client's Σ(x/N)² lies in [1/3, 1], so its deviation is at most 1/3,
        the mean's at most 0.0105, and 0.045 is four of them. The mean mix is p: deviation at most 0.016.
        """
        p = np.array([0.5, 0.3, 0.2])
        labels = np.repeat(np.arange(3), (p * 300_000).astype(int))
        parts = dirichlet(labels, clients=3_000, alpha=alpha, seed=5)[:1000]
        mix = class_counts(parts, labels) / 100
        share = (1 + 3 * alpha * 0.38) / (1 + 3 * alpha)
        assert (mix**2).sum(axis=1).mean() == pytest.approx(share + (1 - share) / 100, abs=0.045)
        np.testing.assert_allclose(mix.mean(axis=0), p, atol=0.065)

    def test_prior_sets_the_concentration(self) -> None:
        """Balanced classes give Dir(α, …, α): with ten classes and α = 0.1 the concentration is 1 in total.

        S = (1 + 1·0.1)/(1 + 1) = 0.55, against (1 + 0.1·0.1)/(1 + 0.1) = 0.918 for a prior that sums to one.
        """
        labels = np.arange(200_000) % 10

        def concentration(**prior: Any) -> float:
            parts = dirichlet(labels, clients=2_000, alpha=0.1, seed=2, **prior)[:600]
            return float(((class_counts(parts, labels) / 100) ** 2).sum(axis=1).mean())

        assert concentration() == pytest.approx(0.55, abs=0.05)
        assert concentration(prior=1) == concentration()
        assert concentration(prior=[1.0] * 10) == concentration()
        assert concentration(prior=0.1) == pytest.approx(0.918, abs=0.03)

    def test_exhaustion_by_hand(self) -> None:
        """Classes (0, 0, 0, 1), two clients of two. At α = 10⁻⁶ the first client's mix is one-hot.

        With probability 3/4 on class 0, it takes two zeros; with 1/4 on class 1, it takes the only one, the
        mix is renormalised to class 0, and it takes a zero. 1,600 seeds: deviation √(1600·3/16) ≈ 17, four
        allowed.
        """
        labels = np.array([0, 0, 0, 1])
        splits = [dirichlet(labels, clients=2, alpha=1e-6, seed=seed) for seed in range(1600)]
        first = [tuple(labels[split[0]]) for split in splits]
        assert set(first) == {(0, 0), (0, 1)}
        assert first.count((0, 0)) == pytest.approx(1200, abs=70)

    def test_a_class_without_prior_comes_last(self) -> None:
        """With prior (1, 0) the first client takes both zeros; the second finds only ones and takes them."""
        parts = dirichlet(np.array([1, 0, 1, 0]), clients=2, alpha=0.1, prior=[1, 0], seed=0)
        assert [part.tolist() for part in parts] == [[1, 3], [0, 2]]

    @pytest.mark.parametrize("block", [2, 1024])
    def test_agrees_with_drawing_one_example_at_a_time(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The block-wise counts have the law of the definition: mean and mean square per client and class.

        Class 0 runs out early, so later clients draw from what is left of their mixes. The two means, each
        of 1,000 independent runs, differ by a few of their standard errors; five are allowed, and 0.02 for
        counts that hardly vary.
        """
        monkeypatch.setattr(label_mix, "_BLOCK", block)
        stock, shapes, runs = np.array([3, 16, 7, 6]), np.array([2.0, 4.0, 0.2, 1.0]), 1000
        rng = stream(0, "oracle")

        def one_at_a_time() -> NDArray[np.int64]:
            left, counts = stock.copy(), np.zeros((5, 4), dtype=np.int64)
            for client in range(5):
                mix = rng.dirichlet(shapes)
                for _ in range(4):
                    rest = mix * (left > 0)
                    c = rng.choice(4, p=rest / rest.sum())
                    counts[client, c] += 1
                    left[c] -= 1
            return counts

        slow = np.array([one_at_a_time() for _ in range(runs)])
        fast = np.array([label_mix._equal_counts(rng, stock, shapes, 5, 4) for _ in range(runs)])
        for a, b in ((slow, fast), (slow**2, fast**2)):
            error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / runs)
            assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) <= 5 * error + 0.02).all()


class TestDirichletByClass:
    @several
    @given(label_arrays, st.data(), alphas, seeds)
    def test_uses_everything_or_says_what_to_change(
        self, labels: NDArray[np.int64], data: st.DataObject, alpha: float, seed: int
    ) -> None:
        clients = data.draw(st.integers(1, len(labels)))
        minimum = data.draw(st.integers(1, len(labels) // clients))
        try:
            parts = dirichlet_by_class(labels, clients=clients, alpha=alpha, minimum=minimum, seed=seed)
        except PartitionError as refusal:
            message = str(refusal)
        else:
            assert min(check_parts(parts, len(labels), all_used=True)) >= minimum
            assert len(parts) == clients
            return
        assert "raise alpha, lower minimum or clients" in message

    def test_large_alpha_splits_every_class_evenly(self) -> None:
        """α = 10⁶: shares 1/4 ± 0.0005 of 200 examples, so 50 ± 1 of each class for each of 4 clients."""
        parts = dirichlet_by_class(TEN_CLASSES, clients=4, alpha=1e6, seed=0)
        assert np.abs(class_counts(parts, TEN_CLASSES) - 50).max() <= 1

    def test_tiny_alpha_gives_a_class_to_one_client(self) -> None:
        counts = class_counts(dirichlet_by_class(TEN_CLASSES, clients=2, alpha=1e-6, seed=0), TEN_CLASSES)
        assert set(counts.ravel().tolist()) == {0, 200}


class TestLabelClusters:
    @several
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 2), seeds)
    def test_clusters_share_no_class(self, sizes: list[int], each: int, seed: int) -> None:
        labels = np.arange(400) % 8
        parts = label_clusters(labels, sizes=sizes, classes_per_cluster=each, seed=seed)
        size = min(each * 50 // clients for clients in sizes)
        assert check_parts(parts, 400) == [size] * sum(sizes)
        ends = np.cumsum(sizes)
        held = [set(labels[np.concatenate(parts[end - n : end])]) for n, end in zip(sizes, ends, strict=True)]
        assert all(len(classes) <= each for classes in held)
        assert sum(map(len, held)) == len(set().union(*held))

    def test_none_splits_all_classes_evenly(self) -> None:
        """Ten classes of 200 over three clusters: 4, 3, 3; the last has 4 clients for 600, so 150 each."""
        parts = label_clusters(TEN_CLASSES, sizes=(2, 3, 4), seed=0)
        assert check_parts(parts, 2000) == [150] * 9
        held = [set(TEN_CLASSES[np.concatenate(parts[a:b])]) for a, b in ((0, 2), (2, 5), (5, 9))]
        assert [len(classes) for classes in held] == [4, 3, 3]

    def test_the_papers_two_to_eight(self) -> None:
        labels = np.arange(50_000) % 10
        parts = label_clusters(labels, sizes=(2, 8), classes_per_cluster=2, examples_per_client=1200, seed=0)
        assert check_parts(parts, 50_000) == [1200] * 10
        assert len(set(labels[np.concatenate(parts[2:])])) == 2

    def test_a_number_of_classes_per_cluster(self) -> None:
        parts = label_clusters(TEN_CLASSES, sizes=[1, 1], classes_per_cluster=[1, 5], seed=0)
        assert [len(set(TEN_CLASSES[part])) for part in parts] == [1, 5]


class TestClassesPerClient:
    @several
    @given(
        st.lists(st.integers(1, 30), min_size=1, max_size=6),
        st.data(),
        st.none() | st.floats(0.01, 50),
        st.integers(1, 5),
        seeds,
    )
    def test_exactly_k_classes_and_feasible_sizes(
        self, stock: list[int], data: st.DataObject, power: float | None, minimum: int, seed: int
    ) -> None:
        """Feasible exactly when Σ_c min(K, ⌊n_c/least⌋) ≥ K·k; then equal sizes are the largest possible."""
        labels = np.repeat(np.arange(len(stock)), stock)
        classes = data.draw(st.integers(1, len(stock)))
        clients = data.draw(st.integers(1, len(labels)))
        least = -(-minimum // classes)

        def room(places: int, size: int) -> bool:
            return sum(min(places, n // size) for n in stock) >= places * classes

        def split() -> Parts:
            return classes_per_client(labels, clients=clients, classes=classes, power=power, minimum=minimum, seed=seed)

        if not room(clients, least):
            most = max(k for k in range(clients) if room(k, least))
            with pytest.raises(PartitionError, match=f"at most {most} such clients"):
                split()
            return
        parts = split()
        sizes = check_parts(parts, len(labels))
        counts = class_counts(parts, labels)
        assert ((counts > 0).sum(axis=1) == classes).all()
        assert counts[counts > 0].min() >= least
        if power is None:
            largest = max(size for size in range(1, 31) if room(clients, size))
            assert sizes == [classes * largest] * clients
        else:
            used = counts.sum(axis=0)
            assert all(n in (0, have) for n, have in zip(used, stock, strict=True))

    def test_places_by_hand(self) -> None:
        """Classes of 10 and 4, four clients of one class: 3 + 1 places leave 10 // 3 = 3 examples each.

        Jefferson's quotients are 10, 5, 3.3, 2.5, … and 4, 2, …: the four largest are 10, 5, 4 and 3.3.
        2 + 2 places would leave 2 each, 4 + 0 as well.
        """
        labels = np.repeat([0, 1], [10, 4])
        parts = classes_per_client(labels, clients=4, classes=1, seed=0)
        assert sorted(class_counts(parts, labels).tolist()) == [[0, 3], [3, 0], [3, 0], [3, 0]]

    def test_one_client_holds_almost_all_when_the_tail_is_heavy(self) -> None:
        """power = 1000: all weights but the largest vanish: 19 clients hold the minimum 2, one 200 − 38."""
        labels = np.zeros(200, dtype=np.int64)
        parts = classes_per_client(labels, clients=20, classes=1, power=1000.0, seed=0)
        assert sorted(map(len, parts)) == [2] * 19 + [162]

    def test_log_normal_sizes(self) -> None:
        """Far above the minimum, log sizes are N(·, σ²): 2,000 clients, σ = 0.5, deviation ± 4·0.5/√4000."""
        labels = np.zeros(2_000_000, dtype=np.int64)
        parts = classes_per_client(labels, clients=2000, classes=1, power=0.5, seed=1)
        logs = np.log([len(part) for part in parts])
        assert logs.std() == pytest.approx(0.5, abs=0.032)
        assert ((logs - logs.mean()) ** 3).mean() == pytest.approx(0, abs=0.5**3 * 4 * (6 / 2000) ** 0.5)

    def test_pairs_of_classes_are_random(self) -> None:
        """5,000 clients, two of ten classes: each of the 45 pairs 111 times, deviation ≤ √111 = 10.5."""
        labels = np.arange(20_000) % 10
        holds = class_counts(classes_per_client(labels, clients=5000, classes=2, seed=0), labels) > 0
        together = (holds.T.astype(int) @ holds)[np.triu_indices(10, 1)]
        assert np.abs(together - 5000 / 45).max() < 5 * 10.5

    @pytest.mark.kit
    @pytest.mark.parametrize("classes", [1, 2])
    def test_mnist_as_in_fedreg(self, kit: Path, classes: int) -> None:
        table = parquet.read_table(kit / "mnist" / "train.parquet", columns=["label"])
        labels = np.array(table["label"])
        parts = classes_per_client(labels, clients=5000, classes=classes, power=2.0, seed=0)
        sizes = check_parts(parts, 60_000, all_used=True)
        assert len(sizes) == 5000
        assert min(sizes) == 2
        assert max(sizes) > 300
        assert {len(set(labels[part])) for part in parts} == {classes}


class TestEven:
    @several
    @given(label_arrays, st.data(), seeds)
    def test_iid_sizes_differ_by_at_most_one(self, labels: NDArray[np.int64], data: st.DataObject, seed: int) -> None:
        clients = data.draw(st.integers(1, len(labels)))
        sizes = check_parts(iid(labels, clients=clients, seed=seed), len(labels), all_used=True)
        assert len(sizes) == clients
        assert max(sizes) - min(sizes) <= 1

    @several
    @given(label_arrays, st.data(), st.integers(1, 4), seeds)
    def test_shards_are_runs_of_the_sorted_examples(
        self, labels: NDArray[np.int64], data: st.DataObject, each: int, seed: int
    ) -> None:
        each = min(each, len(labels))
        clients = data.draw(st.integers(1, len(labels) // each))
        parts = shards(labels, clients=clients, shards_per_client=each, seed=seed)
        sizes = check_parts(parts, len(labels), all_used=True)
        assert len(sizes) == clients
        assert max(sizes) - min(sizes) <= each
        place = np.empty(len(labels), dtype=np.int64)
        place[np.argsort(labels, kind="stable")] = np.arange(len(labels))
        for part in parts:
            runs = 1 + int((np.diff(np.sort(place[part])) > 1).sum())
            assert runs <= each

    def test_shards_as_in_mcmahan(self) -> None:
        """2,000 sorted examples, 10 clients × 2 shards of 100: one class has two whole shards."""
        parts = shards(TEN_CLASSES, clients=10, seed=0)
        assert check_parts(parts, 2000, all_used=True) == [200] * 10
        assert set(class_counts(parts, TEN_CLASSES).ravel().tolist()) <= {0, 100, 200}

    @several
    @given(label_arrays, st.data(), st.integers(1, 4), st.booleans(), seeds)
    def test_tiny_gives_exactly_that_many(
        self, labels: NDArray[np.int64], data: st.DataObject, each: int, one_class: bool, seed: int
    ) -> None:
        most = int((np.bincount(labels) // each).sum()) if one_class else len(labels) // each
        clients = data.draw(st.integers(1, max(most, 1)))
        if most == 0:
            with pytest.raises(PartitionError, match="at most 0"):
                tiny(labels, clients=clients, examples=each, one_class=one_class, seed=seed)
            return
        parts = tiny(labels, clients=clients, examples=each, one_class=one_class, seed=seed)
        assert check_parts(parts, len(labels)) == [each] * clients
        if one_class:
            assert all(len(set(labels[part])) == 1 for part in parts)

    def test_tiny_one_class_follows_the_class_sizes(self) -> None:
        """Classes of 3, 40, 11, 90 hold 1, 20, 5, 45 pairs: 71 in all, so 71 clients take them all."""
        parts = tiny(FEW_OF_SOME, clients=71, examples=2, one_class=True, seed=0)
        assert (class_counts(parts, FEW_OF_SOME) > 0).sum(axis=0).tolist() == [1, 20, 5, 45]
        assert len({int(FEW_OF_SOME[part[0]]) for part in parts[1:20]}) > 1  # not ordered by class
        with pytest.raises(PartitionError, match="at most 71"):
            tiny(FEW_OF_SOME, clients=72, examples=2, one_class=True, seed=0)

    @pytest.mark.parametrize("one_class", [False, True])
    def test_the_papers_populations(self, one_class: bool) -> None:
        ten, hundred = np.arange(50_000) % 10, np.arange(50_000) % 100
        assert len(tiny(ten, clients=10_000, examples=5, one_class=one_class, seed=0)) == 10_000
        singles = tiny(hundred, clients=50_000, examples=1, one_class=one_class, seed=0)
        check_parts(singles, 50_000, all_used=True)


class TestByColumn:
    def test_one_client_per_value_in_order(self) -> None:
        assert [part.tolist() for part in by_column(["b", "a", "b", "c"])] == [[1], [0, 2], [3]]
        assert [part.tolist() for part in by_column(np.array([10, 9, 10]))] == [[1], [0, 2]]

    def test_missing_values(self) -> None:
        """x holds 3, y holds 1; four are missing (None, "", twice NaN), so spreading gives 3 and 1 more."""
        column: list[Any] = ["x", None, "y", "", "x", float("nan"), "x", float("nan")]
        assert [part.tolist() for part in by_column(column, missing="drop")] == [[0, 4, 6], [2]]
        assert by_column(column, missing="own")[-1].tolist() == [1, 3, 5, 7]
        assert check_parts(by_column(column), 8, all_used=True) == [6, 2]

    def test_spreading_keeps_the_labels_even(self) -> None:
        """u and v hold 30 each; of 400 missing, 200 are of class 1: each gets 200, 100 ± 1 of class 1."""
        column = ["u"] * 30 + ["v"] * 30 + [""] * 400
        labels = np.array([0] * 60 + [0, 1] * 200)
        for seed in range(5):
            parts = by_column(column, labels=labels, seed=seed)
            assert check_parts(parts, 460, all_used=True) == [230, 230]
            assert all(abs(labels[part].sum() - 100) <= 1 for part in parts)

    @several
    @given(st.lists(st.sampled_from("abcdefg") | st.none(), min_size=1, max_size=60), st.data(), seeds)
    def test_merging_keeps_groups_whole(self, column: list[str | None], data: st.DataObject, seed: int) -> None:
        groups = sorted({value for value in column if value is not None})
        if not groups:
            with pytest.raises(PartitionError, match="choose another column"):
                by_column(column, seed=seed)
            return
        clients = data.draw(st.integers(1, len(groups)))
        parts = by_column(column, clients=clients, seed=seed)
        check_parts(parts, len(column), all_used=True)
        assert len(parts) == clients
        owners = [{column[i] for i in part} - {None} for part in parts]
        assert sum(map(len, owners)) == len(groups)

    def test_merging_balances(self) -> None:
        """Groups 5, 4, 3, 3, 3 into two, the largest first to the lighter: {5, 3} and {4, 3, 3}."""
        column = np.repeat([4, 3, 2, 1, 0], [5, 4, 3, 3, 3])
        assert [len(part) for part in by_column(column, clients=2)] == [8, 10]

    @pytest.mark.kit
    def test_ct_images_by_source(self, kit: Path) -> None:
        """FedReg §4.1: 191 COVID images of 32 sources make 32 clients, 234 others follow in proportion."""
        table = parquet.read_table(kit / "covid_ct" / "train.parquet", columns=["label", "source"])
        labels = np.array(table["label"])
        parts = by_column(table["source"].to_pylist(), labels=labels, seed=0)
        sizes = check_parts(parts, 425, all_used=True)
        assert len(sizes) == 32
        covid = np.array([labels[part].sum() for part in parts])
        assert np.abs(np.array(sizes) - covid - covid * 234 / 191).max() < 1


class TestSplitValidation:
    @several
    @given(label_arrays, st.data(), st.floats(0, 0.999), st.booleans(), seeds)
    def test_exact_sizes_and_nobody_untrained(
        self, labels: NDArray[np.int64], data: st.DataObject, fraction: float, stratify: bool, seed: int
    ) -> None:
        parts = iid(labels, clients=data.draw(st.integers(1, len(labels))), seed=seed)
        given_labels = labels if stratify else None
        train, held = split_validation(parts, fraction=fraction, labels=given_labels, seed=seed)
        check_parts(train, len(labels))
        for part, one, other in zip(parts, train, held, strict=True):
            assert np.array_equal(np.sort(np.concatenate([one, other])), part)
            assert (np.diff(other) > 0).all()
            assert len(other) <= fraction * len(part) + 1e-9
            assert len(other) > fraction * len(part) - 1 or len(one) == 1

    def test_the_papers_sizes(self) -> None:
        """500 examples at 0.1: 450 and 50. 100 at 0.29: 29, although 0.29 × 100 < 29 in floats."""
        assert 0.29 * 100 < 29
        for size, fraction, expected in ((500, 0.1, 50), (100, 0.29, 29)):
            train, held = split_validation([np.arange(size)], fraction=fraction, seed=0)
            assert (len(train[0]), len(held[0])) == (size - expected, expected)

    def test_a_client_does_not_depend_on_the_others(self) -> None:
        parts = iid(TEN_CLASSES, clients=20, seed=0)
        _, together = split_validation(parts, fraction=0.2, labels=TEN_CLASSES, seed=1)
        _, alone = split_validation([parts[7]], fraction=0.2, labels=TEN_CLASSES, seed=1)
        assert np.array_equal(together[7], alone[0])
        assert not same(together, split_validation(parts, fraction=0.2, labels=TEN_CLASSES, seed=2)[1])

    def test_classes_keep_their_share(self) -> None:
        """Classes of 3, 40, 11, 90 at 0.25: 0.75, 10, 2.75, 22.5, each within one."""
        _, held = split_validation([np.arange(144)], fraction=0.25, labels=FEW_OF_SOME, seed=0)
        assert np.abs(class_counts(held, FEW_OF_SOME)[0] - [0.75, 10, 2.75, 22.5]).max() < 1

    def test_every_example_is_equally_likely(self) -> None:
        """Two of seven for 3,500 seeds: 1000 each, deviation √(3500·2/7·5/7) = 26.7, five allowed."""
        labels = np.array([0, 0, 0, 0, 1, 1, 2])
        chosen = np.zeros(7)
        for seed in range(3500):
            chosen[split_validation([np.arange(7)], fraction=0.3, labels=labels, seed=seed)[1][0]] += 1
        assert np.abs(chosen - 1000).max() < 5 * 26.7

    def test_a_million_clients(self) -> None:
        labels = np.arange(1_000_000) % 10
        parts = tiny(labels, clients=1_000_000, examples=1, seed=0)
        train, held = split_validation(parts, fraction=0.1, seed=0)
        assert len(train) == 1_000_000
        assert not any(map(len, held))


ABC = np.array([0, 1, 2, 0, 1, 2])
REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: iid([], clients=1, seed=0), "labels are empty"),
    (lambda: iid([0, -1], clients=1, seed=0), "label -1 of example 1 is negative"),
    (lambda: iid([0.5, 1.0], clients=1, seed=0), "convert them to whole class numbers"),
    (lambda: iid([[0, 1]], clients=1, seed=0), "in one dimension"),
    (lambda: iid(ABC, clients=0, seed=0), "clients = 0: must be a whole number of at least 1"),
    (lambda: iid(ABC, clients=2.0, seed=0), "clients = 2.0"),  # type: ignore[arg-type]
    (lambda: iid(ABC, clients=True, seed=0), "clients = True"),
    (lambda: iid(ABC, clients=7, seed=0), "more than the 6 examples.*at most 6 clients"),
    (lambda: shards(ABC, clients=4, seed=0), "8 shards.*at most 3 clients"),
    (lambda: tiny(ABC, clients=4, examples=2, seed=0), "need 8 examples.*at most 3 clients"),
    (lambda: dirichlet(ABC, clients=2, alpha=float("nan"), seed=0), "alpha = nan: must be a finite number"),
    (lambda: dirichlet(ABC, clients=2, alpha=-1.0, seed=0), "alpha = -1.0"),
    (lambda: dirichlet(ABC, clients=2, alpha=1.0, prior=[1, 1], seed=0), "classes 0 to 2"),
    (lambda: dirichlet(ABC, clients=2, alpha=1.0, prior=[1, 1, -1], seed=0), "not negative"),
    (lambda: dirichlet(ABC, clients=2, alpha=1.0, prior=[0, 0, 0], seed=0), "above 0"),
    (lambda: dirichlet(ABC, clients=2, alpha=1.0, prior="x", seed=0), "list of numbers"),  # type: ignore[arg-type]
    (lambda: dirichlet(ABC, clients=2, alpha=1e300, prior=1e300, seed=0), "too large"),
    (
        lambda: dirichlet_by_class(ABC, clients=2, alpha=1.0, minimum=4, seed=0),
        "needs 8 examples.*minimum = 3",
    ),
    (lambda: dirichlet_by_class(ABC, clients=6, alpha=1e-3, seed=0), "none of 100 draws"),
    (lambda: label_clusters(ABC, sizes=[], seed=0), r"sizes = \[\]"),
    (lambda: label_clusters(ABC, sizes=[1, 0], seed=0), r"sizes\[1\] = 0"),
    (lambda: label_clusters(ABC, sizes=[1] * 4, seed=0), "at most 3 clusters"),
    (lambda: label_clusters(ABC, sizes=[1, 1], classes_per_cluster=2, seed=0), "asks for 4 classes"),
    (lambda: label_clusters(ABC, sizes=[1, 1], classes_per_cluster=[1], seed=0), "one number per cluster"),
    (lambda: label_clusters(ABC, sizes=[1, 3], classes_per_cluster=1, seed=0), "would get no data"),
    (lambda: label_clusters(ABC, sizes=[1, 1], examples_per_client=3, seed=0), "so at most 2"),
    (lambda: classes_per_client(ABC, clients=1, classes=4, seed=0), "use at most 3 per client"),
    (lambda: classes_per_client(ABC, clients=2, power=0.0, seed=0), "power = 0.0"),
    (lambda: by_column([]), "column is empty"),
    (lambda: by_column(["a", 1]), "cannot be ordered"),
    (lambda: by_column(["", None]), "choose another column"),
    (lambda: by_column(["a", "b"], clients=3), "use 1 to 2, or leave it out"),
    (lambda: by_column(["a", ""], clients=1, missing="own"), "use 2 to 2"),
    (lambda: by_column(["a"], missing="sprad"), "did you mean 'spread'"),  # type: ignore[arg-type]
    (lambda: by_column(["a", "b"], labels=[0]), "2 values but there are 1 labels"),
    (lambda: split_validation([np.arange(3)], fraction=1.0, seed=0), "fraction = 1.0"),
    (lambda: split_validation([], fraction=0.1, seed=0), "there are no clients"),
    (
        lambda: split_validation([np.arange(3), np.arange(0)], fraction=0.1, seed=0),
        "client 1 has no examples",
    ),
    (lambda: split_validation([np.arange(9)], fraction=0.1, labels=ABC, seed=0), "holds example 8"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_say_what_to_change(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        call()


def test_every_partition_is_listed() -> None:
    functions = {name for name in partition.__all__ if callable(getattr(partition, name))}
    assert set(PARTITIONS) == functions - {"Parts", "split_validation"}
