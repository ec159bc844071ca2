"""Engines run a method on the participants of a round; all of them give the same numbers."""

from fedretain.engines.engine import Engine, Uploads, World
from fedretain.engines.loop import LoopEngine

__all__ = ["Engine", "LoopEngine", "Uploads", "World"]
