"""Every key of the experiment file: defaults written out, the way back, and what is refused in which words."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import yaml

from fedretain.config import Experiment, make_experiment
from fedretain.errors import ConfigError
from fedretain.methods import FedAvg, Method

WHOLE: dict[str, Any] = {
    "name": "größe 1",
    "seed": 3,
    "rounds": 7,
    "participation": 0.5,
    "data": {"name": "mnist", "root": "there", "normalise": "per_pixel"},
    "partition": {"kind": "dirichlet", "clients": 5, "alpha": 2.0, "validation": 0.2, "seed": 9},
    "model": {"name": "resnet18", "norm": "group"},
    "loss": {"name": "wsm"},
    "method": ["fedavg"],
    "local": {
        "optimizer": "sgd",
        "lr": 0.3,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "epochs": 2.5,
        "batch_size": 8,
        "drop_last": True,
        "lr_decay": 0.99,
        "augment": "crop_flip",
    },
    "server": {"lr": 0.5, "optimizer": "adam", "weights": "uniform"},
    "evaluate": {"every": 2, "batch_size": 50},
    "forgetting": {"every": 3, "clients": "all", "examples": False},
    "checkpoint": {"every": 4},
    "engine": {"name": "loop", "state_memory": 1000, "state_precision": "half"},
    "device": "cpu",
    "precision": "float64",
}


def test_defaults_are_written_out() -> None:
    written = yaml.safe_load(make_experiment({}).as_yaml())
    assert written["rounds"] == 10
    assert written["participation"] == 1.0
    assert {k: written["partition"][k] for k in ("kind", "clients", "alpha", "validation")} == {
        "kind": "dirichlet",
        "clients": 10,
        "alpha": 0.1,
        "validation": 0.1,
    }
    assert written["model"] == {"name": "mlp", "hidden": [64]}
    assert written["loss"] == {"name": "ce"}
    assert written["method"] == {"name": "fedavg"}
    assert written["local"]["epochs"] == 1.0
    assert written["local"]["steps"] is None
    assert written["data"]["normalise"] == "mean_std"
    assert written["evaluate"] == {
        "every": 1,
        "batch_size": 500,
        "personalised": False,
        "targets": [0.5, 0.9],
        "reference": None,
    }
    assert written["forgetting"] == {"every": 10, "clients": "cohort", "examples": True, "measures": []}
    assert written["engine"] == {
        "name": "auto",
        "workers": None,
        "inner": "loop",
        "stack": True,
        "state_memory": 2**30,
        "state_precision": "full",
    }
    assert (written["device"], written["precision"]) == ("auto", "float32")
    assert written.keys() == Experiment.model_fields.keys()


@pytest.mark.parametrize("given", [{}, WHOLE, {"local": {"steps": 3}}, {"method": FedAvg()}])
def test_config_file_reads_back_to_an_equal_experiment(given: dict[str, Any]) -> None:
    experiment = make_experiment(given)
    again = make_experiment(yaml.safe_load(experiment.as_yaml()))
    assert again == experiment
    assert again.key == experiment.key
    assert make_experiment(experiment.as_dict()) == experiment


def test_every_given_value_arrives() -> None:
    plain = make_experiment(WHOLE).as_dict()
    for key, value in WHOLE.items():
        if key == "method":
            assert plain[key] == {"name": "fedavg"}
        elif isinstance(value, dict):
            assert {k: plain[key][k] for k in value} == value
        else:
            assert plain[key] == value


def test_key_ignores_what_does_not_decide_the_numbers() -> None:
    base = make_experiment({})
    for same in ({"rounds": 99}, {"name": "other"}, {"checkpoint": {"every": 1}}, {"data": {"root": "elsewhere"}}):
        assert make_experiment(same).key == base.key
    for other in ({"seed": 1}, {"local": {"lr": 0.2}}, {"loss": "wsm"}, {"partition": {"alpha": 0.2}}):
        assert make_experiment(other).key != base.key


@pytest.mark.parametrize(
    ("text", "count"), [("512MB", 512_000_000), ("2 GiB", 2**31), ("1.5k", 1500), ("0", 0), (7, 7), ("3TB", 3 * 10**12)]
)
def test_memory_in_words(text: str | int, count: int) -> None:
    experiment = make_experiment({"engine": {"state_memory": text}})
    assert experiment.engine.state_memory == count
    assert experiment.key == make_experiment({"engine": "auto"}).key


def test_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.state_memory: must be a number of bytes, or a text such as 512MB"):
        make_experiment({"engine": {"state_memory": "plenty"}})


def test_nothing_can_be_changed() -> None:
    experiment = make_experiment({"model": {"name": "mlp", "hidden": [8]}})
    for section, field in ((experiment, "seed"), (experiment.local, "lr"), (experiment.model, "name")):
        with pytest.raises(pydantic.ValidationError):
            setattr(section, field, 1)
    experiment.model.parameters["hidden"] = ()
    assert experiment.model.parameters == {"hidden": (8,)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"round": 3}, "unknown key 'round'; did you mean 'rounds'?"),
        ({"lr": 0.1}, "unknown key 'lr'; did you mean 'local.lr' or 'server.lr'?"),
        ({"clients": 10}, "unknown key 'clients'; did you mean 'partition.clients'?"),
        ({"local": {"rounds": 3}}, "unknown key 'local.rounds'; did you mean 'rounds'?"),
        ({"forgetting": {"batch_size": 3}}, "did you mean 'local.batch_size' or 'evaluate.batch_size'?"),
        ({"local": {"epoch": 1}}, "unknown key 'local.epoch'; did you mean 'local.epochs'?"),
        ({"data": {"nam": "x"}}, "unknown key 'data.nam'; did you mean 'data.name'?"),
        ({"server": {"wieghts": "x"}}, "unknown key 'server.wieghts'; did you mean 'server.weights'?"),
        ({"evaluate": {"evry": 1}}, "unknown key 'evaluate.evry'; did you mean 'evaluate.every'?"),
        ({"forgetting": {"client": "all"}}, "did you mean 'forgetting.clients'?"),
        ({"checkpoint": {"evry": 1}}, "did you mean 'checkpoint.every'?"),
        ({"partition": {"alhpa": 1}}, "unknown key 'partition.alhpa'; did you mean 'partition.alpha'?"),
        ({"partition": {"valdation": 0.1}}, "did you mean 'partition.validation'?"),
        ({"model": {"hiden": [3]}}, "unknown key 'model.hiden'; did you mean 'model.hidden'?"),
        ({"loss": {"name": "ce", "tau": 1}}, "unknown key 'loss.tau': loss takes no parameters"),
        ({"method": {"name": "fedavg", "mu": 1}}, "unknown key 'method.mu': method takes no parameters"),
        ({1: 2}, "a key must be text"),
    ],
)
def test_unknown_keys_name_the_nearest_valid_one(given: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_experiment(given)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'?"),
        ({"loss": "wms"}, "unknown loss 'wms'; did you mean 'wsm'?"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"partition": "dirichlett"}, "unknown partition 'dirichlett'; did you mean 'dirichlet'?"),
        ({"local": {"optimizer": "sdg"}}, "must be 'sgd', 'adam' or 'adamw'; did you mean 'sgd'? (given: 'sdg')"),
        ({"server": {"weights": "unifrom"}}, "did you mean 'uniform'?"),
        ({"precision": "float16"}, "did you mean 'bfloat16'?"),
        ({"model": "no.such.module:Net"}, "model 'no.such.module:Net' cannot be imported"),
        ({"model": "os:path"}, "model 'os:path' is no function or class but module"),
        ({"model": {"name": 5}}, "model.name: must be text (given: 5)"),
        ({"loss": 5}, "loss: must be a name, or a mapping with the key 'name' (given: 5)"),
    ],
)
def test_unknown_names_and_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_experiment(given)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": -1}, "rounds: must be greater than or equal to 0 (given: -1)"),
        ({"rounds": 2.5}, "rounds: must be a valid integer"),
        ({"rounds": True}, "rounds: a number or text is expected here, not true/false (given: True)"),
        ({"seed": -1}, "seed: must be greater than or equal to 0 (given: -1)"),
        ({"participation": 0}, "a fraction in (0, 1] (given: 0)"),
        ({"participation": 1.5}, "a fraction in (0, 1] (given: 1.5)"),
        ({"participation": None}, "participation: must be a valid integer or a valid number (given: None)"),
        ({"participation": float("nan")}, "participation: must be"),
        ({"name": "a/b"}, "name: must begin with a letter or digit"),
        ({"name": ""}, "name: must begin with a letter or digit"),
        ({"name": "x" * 61}, "name: String should have at most 60 characters"),
        ({"local": 5}, "local: must be a mapping of keys to values (given: 5)"),
        ({"data": None}, "data: must be a mapping of keys to values (given: None)"),
        ({"local": {"lr": 0}}, "local.lr: must be greater than 0 (given: 0)"),
        ({"local": {"lr": float("inf")}}, "local.lr: must be a finite number (given: inf)"),
        ({"local": {"lr": {"x": 1}}}, "local.lr: must be a valid number (given: {'x': 1})"),
        ({"local": {"momentum": 1}}, "local.momentum: must be less than 1 (given: 1)"),
        ({"local": {"epochs": 1, "steps": 2}}, "local: give either epochs or steps, not both"),
        ({"local": {"epochs": 0}}, "local.epochs: must be greater than 0"),
        ({"local": {"steps": 1.5}}, "local.steps: must be a valid integer"),
        ({"local": {"batch_size": 0}}, "local.batch_size: must be greater than or equal to 1 (given: 0)"),
        ({"local": {"optimizer": "adam", "momentum": 0.9}}, "momentum and nesterov belong to sgd, not to adam"),
        ({"local": {"nesterov": True}}, "nesterov needs a momentum above 0"),
        ({"local": {"lr_decay": 2}}, "local.lr_decay: must be less than or equal to 1 (given: 2)"),
        ({"local": {"augment": "flip"}}, "local.augment: must be 'none' or 'crop_flip'"),
        ({"data": {"mean": 0.5}}, "data.mean: must be a list, such as [a, b] (given: 0.5)"),
        ({"model": {"name": "mlp", "hidden": [0]}}, "model.hidden.0: must be greater than 0 (given: 0)"),
        ({"partition": {"clients": 0}}, "partition.clients: must be greater than or equal to 1 (given: 0)"),
        ({"partition": {"validation": 1}}, "partition.validation: must be less than 1 (given: 1)"),
        ({"partition": {"prior": "x"}}, "partition.prior: must be a list, such as [a, b] or a valid number"),
        ({"partition": {"kind": "shards"}}, "partition.clients: missing, and it has no default"),
        ({"partition": "by_column"}, "partition.column: missing; name the column"),
        ({"partition": {"column": "source"}}, "partition.column: only the kind by_column splits by a column"),
        ({"device": "gpu"}, "device: must be auto, cpu, cuda, cuda:N or mps (given: 'gpu')"),
        ({"rounds": -1, "seed": -1}, "seed: must be greater than or equal to 0"),
    ],
)
def test_wrong_types_and_ranges_say_key_value_and_what_is_allowed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_experiment(given)
    assert words in str(error.value)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        make_experiment({"rounds": -1, "lokal": {}, "local": {"lr": 0}})
    assert len(str(error.value).splitlines()) == 3


def test_names_stand_for_components_with_defaults() -> None:
    """A name alone, a mapping with it, and a mapping that leaves the default name out are the same."""
    assert make_experiment({"data": "mnist"}) == make_experiment({"data": {"name": "mnist"}})
    assert make_experiment({"partition": "dirichlet"}) == make_experiment({"partition": {"alpha": 0.1}})
    assert make_experiment({"model": {"hidden": [8]}}) == make_experiment({"model": {"name": "mlp", "hidden": [8]}})


def test_a_method_object_is_the_same_as_its_name() -> None:
    assert make_experiment({"method": FedAvg()}) == make_experiment({"method": "fedavg"})
    assert isinstance(make_experiment({}).build_method(), Method)


def test_what_makes_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'os:getcwd' makes no fedretain\.Method but a str"):
        make_experiment({"method": "os:getcwd"}).build_method()
    with pytest.raises(ConfigError, match="an empty chain"):
        make_experiment({"method": []}).build_method()
    with pytest.raises(ConfigError, match="the same method twice"):
        make_experiment({"method": ["fedavg", "fedavg"]}).build_method()


def test_cohort_size() -> None:
    """0.25 of 10 is 2.5, rounded half up to 3; 0.04 of 10 rounds to nobody; 1.0 is everybody, 1 is one client."""
    assert make_experiment({"participation": 0.25}).cohort_size(10) == 3
    assert make_experiment({"participation": 1.0}).cohort_size(10) == 10
    assert make_experiment({"participation": 1}).cohort_size(10) == 1
    with pytest.raises(ConfigError, match=r"0\.04 of 10 clients selects nobody; use at least 0\.1"):
        make_experiment({"participation": 0.04}).cohort_size(10)
    with pytest.raises(ConfigError, match="11 of only 10 clients; use 10 or fewer"):
        make_experiment({"participation": 11}).cohort_size(10)


def test_learning_rate_of_a_round() -> None:
    """0.4 · 0.5^(t − 1): 0.4, 0.2, 0.1."""
    local = make_experiment({"local": {"lr": 0.4, "lr_decay": 0.5}}).local
    assert [local.lr_of_round(t) for t in (1, 2, 3)] == pytest.approx([0.4, 0.2, 0.1])
