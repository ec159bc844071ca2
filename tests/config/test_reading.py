"""Reading experiments: YAML as people write it, overrides, and grids of variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedretain.config import expand_variants, make_experiment, read_experiment
from fedretain.errors import ConfigError
from fedretain.methods import FedAvg


def file(folder: Path, content: str | bytes) -> Path:
    path = folder / "experiment.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    """YAML 1.1 would read 1e-4 as text; 5E-1 and 1e3 are numbers too, and epochs may be fractional."""
    path = file(tmp_path, "local: {lr: 1e-4, weight_decay: 5E-1, epochs: 0.5}\nseed: 1e3\n")
    given = read_experiment(path)
    assert given["local"] == {"lr": 0.0001, "weight_decay": 0.5, "epochs": 0.5}
    experiment = make_experiment(given)
    assert experiment.local.lr == 0.0001
    assert experiment.local.epochs == 0.5
    assert experiment.seed == 1000


def test_unicode_byte_order_mark_and_anchors(tmp_path: Path) -> None:
    path = file(tmp_path, "\ufeffname: Ünïcödé 学习\nlocal: &l {lr: 0.5}\nserver: {<<: *l, momentum: 0.5}\n")
    experiment = make_experiment(read_experiment(path))
    assert experiment.name == "Ünïcödé 学习"
    assert experiment.server.lr == 0.5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "holds a list"),
        ("hello", "holds a single value"),
        (bytes(range(256)), "is no text; an experiment file is YAML in UTF-8"),
        (b"\x00\x01", "not valid YAML"),
        ("rounds: 1\nrounds: 2\n", "the key 'rounds' stands twice"),
        ("local: {lr: 1, lr: 2}\n", "the key 'lr' stands twice"),
        ("local:\n\tlr: 1\n", "line 2, column 1"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("? [a]\n: 2\n", "not valid YAML"),
        ("[" * 600, "not valid YAML"),
    ],
)
def test_files_that_are_no_experiment(content: str | bytes, words: str, tmp_path: Path) -> None:
    path = file(tmp_path, content)
    with pytest.raises(ConfigError) as error:
        read_experiment(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such experiment file"):
        read_experiment(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is a folder; give the experiment file itself"):
        read_experiment(tmp_path)


def test_overrides() -> None:
    base = {"partition": "dirichlet", "local": {"epochs": 3}, "model": "mlp", "method": FedAvg()}
    given = read_experiment(
        base,
        ["partition.alpha=5", "local.steps=7", "model.hidden=[4, 4]", "local.lr=1e-3", "server.lr=2", "name=a=b"],
    )
    experiment = make_experiment(given)
    assert experiment.partition.parameters["alpha"] == 5
    assert (experiment.local.epochs, experiment.local.steps) == (None, 7)
    assert experiment.model.parameters == {"hidden": (4, 4)}
    assert experiment.local.lr == 0.001
    assert experiment.server.lr == 2
    assert experiment.name == "a=b"
    assert base["local"] == {"epochs": 3}, "what was given is not changed"
    back = make_experiment(read_experiment(experiment, ["local.epochs=2"]))
    assert (back.local.epochs, back.local.steps) == (2, None)


def test_a_list_of_methods_is_a_chain() -> None:
    experiment = make_experiment(read_experiment({}, ["method=[fedavg, {name: fedavg}]"]))
    assert [member.name for member in experiment.method] == ["fedavg", "fedavg"]
    with pytest.raises(ConfigError, match="method is a chain; set the whole of it"):
        read_experiment({"method": ["fedavg"]}, ["method.mu=1"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("foo", "'foo': an override is written key=value"),
        ("=3", "'' is no key"),
        (".lr=3", "'.lr' is no key"),
        ("local.=3", "'local.' is no key"),
        ("local.lr.x=3", "local.lr.x: local.lr has no keys of its own"),
        ("rounds.x=3", "rounds.x: rounds is no mapping with keys of its own (given: 5)"),
        ("local.lr=[", "local.lr=[: not valid YAML"),
    ],
)
def test_overrides_that_are_none(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_experiment({"rounds": 5}, [override])
    assert words in str(error.value)


def test_variants_run_through_the_grid_with_the_last_key_fastest() -> None:
    variants = expand_variants(
        {
            "local": {"epochs": 2},
            "variants": {"loss": ["ce", {"name": "wsm"}], "model": [{"name": "mlp", "hidden": [4, 5]}], "seed": [0, 1]},
        }
    )
    assert [v.name for v in variants] == [
        f"loss={loss},model=mlp(hidden=4+5),seed={seed}" for loss in ("ce", "wsm") for seed in (0, 1)
    ]
    assert [v.experiment.loss.name for v in variants] == ["ce", "ce", "wsm", "wsm"]
    assert [v.experiment.seed for v in variants] == [0, 1, 0, 1]
    assert all(v.experiment.model.parameters == {"hidden": (4, 5)} for v in variants)
    assert variants[0].settings == {"loss": "ce", "model": {"name": "mlp", "hidden": [4, 5]}, "seed": 0}


def test_no_variants_is_a_grid_of_one() -> None:
    for given in ({}, {"variants": None}, {"variants": {}}):
        assert [v.name for v in expand_variants(given)] == ["only"]
        assert make_experiment(given) == make_experiment({})


def test_variants_replace_epochs_by_steps() -> None:
    (variant,) = expand_variants({"local": {"epochs": 2, "lr": 0.5}, "variants": {"local.steps": [3]}})
    assert (variant.experiment.local.epochs, variant.experiment.local.steps) == (None, 3)
    assert variant.experiment.local.lr == 0.5


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (["ce"], "variants: must be a mapping from keys to lists"),
        ({"loss": "ce"}, "variants.loss: must be a list with at least one value (given: 'ce')"),
        ({"loss": []}, "variants.loss: must be a list with at least one value"),
        ({"los": ["ce"]}, "variant los=ce: unknown key 'los'; did you mean 'loss'?"),
        ({"local.lr": [0.1, -1]}, "variant local.lr=-1: local.lr: must be greater than 0"),
        ({"loss": ["ce", "ce"]}, "variants: 'loss=ce' appears twice"),
        ({"method": [["fedavg"], FedAvg()]}, "variants: 'method=fedavg' appears twice"),
        ({1: [1]}, "variants: 1 is no key"),
    ],
)
def test_variants_that_are_none(grid: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand_variants({"variants": grid})
    assert words in str(error.value)


def test_a_grid_is_not_one_experiment() -> None:
    with pytest.raises(ConfigError, match="this experiment is a grid; run it with 'fedretain compare'"):
        make_experiment({"variants": {"seed": [0]}})
