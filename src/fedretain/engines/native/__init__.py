"""Kernels of our own for the CPU, written in C; everything works without them, only slower."""

from fedretain.engines.native.building import compiler
from fedretain.engines.native.kernels import available
from fedretain.engines.native.looking import pooling
from fedretain.engines.native.passes import (
    convolve_few_channels,
    few_channels,
    pool_in_one_pass,
    update_in_one_pass,
    uses_kernels,
)
from fedretain.engines.native.program import Program

__all__ = [
    "Program",
    "available",
    "compiler",
    "convolve_few_channels",
    "few_channels",
    "pool_in_one_pass",
    "pooling",
    "update_in_one_pass",
    "uses_kernels",
]
