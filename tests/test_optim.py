"""Optimizer specs."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

import tritonemb as te
from tests.formulas import CUSTOM, adagrad, custom
from tritonemb.optim import OPTIMIZERS, Optimizer
from tritonemb.optimizers import Hyperparameters, customs

NAMES = {
    "sgd": "SGD",
    "row_wise_adagrad": "RowWiseAdagrad",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "partial_row_wise_adam": "PartialRowWiseAdam",
    "lamb": "LAMB",
    "partial_row_wise_lamb": "PartialRowWiseLAMB",
    "lars_sgd": "LARSSGD",
    "ftrl": "FTRL",
}


def test_there_are_nine():
    assert {name: kind.__name__ for name, kind in OPTIMIZERS.items()} == NAMES
    assert all(getattr(te.optim, NAMES[name]) is kind for name, kind in OPTIMIZERS.items())


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_each_is_a_frozen_value(kind):
    spec = kind(lr=0.1, weight_decay=0.01, max_norm=3)
    assert isinstance(spec, Optimizer)
    assert spec == kind(0.1, weight_decay=0.01, max_norm=3)
    assert spec != kind(0.2)
    assert hash(spec) == hash(kind(lr=0.1, weight_decay=0.01, max_norm=3))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.lr = 1.0


def test_states():
    result = {name: [tuple(state) for state in kind.states] for name, kind in OPTIMIZERS.items()}
    assert result == {
        "sgd": [],
        "row_wise_adagrad": [("sum", False)],
        "adagrad": [("sum", True)],
        "adam": [("exp_avg", True), ("exp_avg_sq", True)],
        "partial_row_wise_adam": [("exp_avg", True), ("exp_avg_sq", False)],
        "lamb": [("exp_avg", True), ("exp_avg_sq", True)],
        "partial_row_wise_lamb": [("exp_avg", True), ("exp_avg_sq", False)],
        "lars_sgd": [("momentum_buffer", True)],
        "ftrl": [("linear", True), ("sum", True)],
    }


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_hyperparameters_are_flat_and_in_order(kind):
    plain = kind().hyperparameters
    assert isinstance(plain, Hyperparameters)
    assert all(type(value) is float for value in plain)
    assert (plain.max_gradient, plain.max_norm, plain.weight_decay) == (math.inf, math.inf, 0.0)
    assert plain.cow_clip == math.inf
    assert kind(cow_clip=2, cow_clip_floor=0.5).hyperparameters[-2:] == (2.0, 0.5)
    for part in ("eps", "beta1", "beta2", "momentum", "eta", "beta", "l1", "l2"):
        assert getattr(plain, part) == getattr(kind(), part, 0.0)
    options = {
        "weight_decay": 0.1,
        "max_gradient": 2,
        "max_norm": 3,
        "stochastic_rounding": False,
        "on_nonfinite": "skip",
    }
    inputs = kind(weight_decay_mode="decoupled", **options).hyperparameters
    in_ratio = {"lamb": "decoupled", "partial_row_wise_lamb": "decoupled", "lars_sgd": "l2"}.get(kind.name)
    assert inputs[:6] == (0.1, 3.0 if in_ratio == "decoupled" else 2.0, 2.0, 3.0, 0.0, 2.0)
    assert kind(weight_decay_mode="none", on_nonfinite="raise").hyperparameters[:6] == (0, 0, math.inf, math.inf, 1, 1)
    assert kind(weight_decay_mode="l2").hyperparameters.weight_decay_mode == (3.0 if in_ratio == "l2" else 1.0)


def test_decay_is_decoupled_by_default_for_adams_family_only():
    decoupled = {name for name, kind in OPTIMIZERS.items() if kind().weight_decay_mode == "decoupled"}
    assert decoupled == {"adam", "partial_row_wise_adam", "lamb", "partial_row_wise_lamb"}


NAN = float("nan")
BAD = [
    ({"lr": value}, r"lr must lie in \[0.0, inf\)") for value in (-0.1, math.inf, NAN)
] + [
    ({"weight_decay": -1.0}, r"weight_decay must lie in \[0.0, inf\)"),
    ({"max_gradient": 0.0}, r"max_gradient must lie in \(0.0, inf\)"),
    ({"max_gradient": -1}, r"max_gradient must lie in \(0.0, inf\)"),
    ({"max_norm": 0}, r"max_norm must lie in \(0.0, inf\)"),
    ({"cow_clip": 0.0}, r"cow_clip must lie in \(0.0, inf\)"),
    ({"cow_clip_floor": -1e-5}, r"cow_clip_floor must lie in \[0.0, inf\)"),
    ({"max_norm": NAN}, r"max_norm must lie in \(0.0, inf\)"),
    ({"weight_decay_mode": "L2"}, "weight_decay_mode must be one of .*, got 'L2'"),
    ({"on_nonfinite": "propagate"}, "on_nonfinite must be one of .*, got 'propagate'"),
    ({"weight_decay": 0.1, "weight_decay_mode": "none"}, "weight_decay is 0.1 but weight_decay_mode is 'none'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_bad_arguments_have_a_name(kind, options, message):
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
        kind(**options)


OWN = [
    (te.optim.Adam, {"beta1": 1.0}, r"Adam: beta1 must lie in \[0.0, 1.0\), got 1.0"),
    (te.optim.LAMB, {"beta2": -0.1}, r"LAMB: beta2 must lie in \[0.0, 1.0\), got -0.1"),
    (te.optim.PartialRowWiseLAMB, {"beta2": 1.5}, "PartialRowWiseLAMB: beta2 must lie in"),
    (te.optim.Adagrad, {"eps": -1e-8}, "Adagrad: eps must lie in"),
    (te.optim.LARSSGD, {"momentum": -0.5}, "LARSSGD: momentum must lie in"),
    (te.optim.LARSSGD, {"eta": NAN}, "LARSSGD: eta must lie in"),
    (te.optim.FTRL, {"l1": -1.0}, "FTRL: l1 must lie in"),
    (te.optim.FTRL, {"l2": math.inf}, "FTRL: l2 must lie in"),
    (te.optim.FTRL, {"beta": -1.0}, "FTRL: beta must lie in"),
]


@pytest.mark.parametrize(("kind", "options", "message"), OWN, ids=str)
def test_bad_arguments_of_single_optimizers(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="SGD: lr must be a number"):
        te.optim.SGD(lr=value)


@pytest.mark.parametrize("value", [None, 1, "yes", NAN])
def test_rounding_is_a_bool(value):
    with pytest.raises(TypeError, match="SGD: stochastic_rounding must be a bool, got"):
        te.optim.SGD(stochastic_rounding=value)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_parameters_of_a_model_are_refused_with_the_right_call(kind):
    for parameters in (iter(()), [0.5]):
        for options in ({}, {"lr": 0.1}):
            with pytest.raises(TypeError, match=r"takes no parameters.*te.optim.fused\(model, te.optim.*lr=0.01"):
                kind(parameters, **options)
    assert pickle.loads(pickle.dumps(kind(0.5))) == copy.deepcopy(kind(0.5)) == dataclasses.replace(kind(), lr=0.5)


@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_one_is_a_frozen_value_with_a_name_of_its_own(name):
    spec = custom(name, lr=0.1, max_norm=2.0)
    built_in = OPTIMIZERS[name]
    assert spec.states == built_in.states
    assert spec.hyperparameters[:6] == built_in(lr=0.1, max_norm=2.0).hyperparameters[:6]
    assert spec.reads_whole_rows == spec.whole_row
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.lr = 1.0
    for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), dataclasses.replace(spec, lr=0.1)):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.name.isidentifier()
        assert other.name != spec.name
        assert customs[other.name] is other
    gone = other.name
    del other
    assert gone not in customs
    assert customs[spec.name] is spec


BAD_CUSTOM = [
    ({"step": None}, TypeError, "step must be a function .* got None"),
    ({"states": ["sum"]}, TypeError, r"states a dict like .* and \['sum'\]"),
    ({"states": {"a b": "row"}}, ValueError, "names that are identifiers.*got 'a b': 'row'"),
    ({"states": {3: "row"}}, ValueError, "names that are identifiers.*got 3: 'row'"),
    ({"states": {"weight": "row"}}, ValueError, "got 'weight': 'row'"),
    ({"states": {"step": "element"}}, ValueError, "got 'step': 'element'"),
    ({"states": {"sum": "rows"}}, ValueError, "states must be \"row\" or \"element\".*got 'sum': 'rows'"),
    ({"states": {"sum": "row"}, "whole_row": False}, ValueError, "state 'sum' has one value per row"),
    ({"lr": -1.0}, ValueError, "lr must lie in"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_CUSTOM, ids=str)
def test_bad_arguments_of_a_custom_one(options, kind, message):
    with pytest.raises(kind, match=f"^Custom: .*{message}"):
        te.optim.Custom(**{"step": adagrad, **options})
