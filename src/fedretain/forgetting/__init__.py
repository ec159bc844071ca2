"""Measures of forgetting: pure functions of plain arrays, usable without the rest of fedretain."""

from fedretain.forgetting.client import ClientForgetting, client_forgetting
from fedretain.forgetting.examples import forgettable_examples

__all__ = ["ClientForgetting", "client_forgetting", "forgettable_examples"]
