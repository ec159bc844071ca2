"""Measures of forgetting: pure functions of plain arrays, usable without the rest of fedretain."""

from fedretain.forgetting.accuracy import accuracy_summaries, rounds_to_accuracy, rounds_to_relative_accuracy
from fedretain.forgetting.classes import (
    ClassForgetting,
    Vanishing,
    class_accuracy,
    class_forgetting,
    vanished,
    vanishings,
)
from fedretain.forgetting.client import ClientForgetting, client_forgetting
from fedretain.forgetting.drift import ClientDrift, client_drift, drift_of_products
from fedretain.forgetting.examples import ForgettingEvents, forgettable_examples, margin_error
from fedretain.forgetting.fisher import fisher_agreement
from fedretain.forgetting.loss import loss_increase

__all__ = [
    "ClassForgetting",
    "ClientDrift",
    "ClientForgetting",
    "ForgettingEvents",
    "Vanishing",
    "accuracy_summaries",
    "class_accuracy",
    "class_forgetting",
    "client_drift",
    "client_forgetting",
    "drift_of_products",
    "fisher_agreement",
    "forgettable_examples",
    "loss_increase",
    "margin_error",
    "rounds_to_accuracy",
    "rounds_to_relative_accuracy",
    "vanished",
    "vanishings",
]
