"""What is imported costs time and memory in every process: only what training needs comes with the package."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from fedretain.importing import uncollected

HEAVY = (
    "PIL",
    "datasets",
    "matplotlib",
    "mlflow",
    "pandas",
    "plotly",
    "pyarrow",
    "rich",
    "scipy",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "typer",
    "wandb",
)


def test_importing_the_package_imports_nothing_heavy_but_torch() -> None:
    code = f"import sys, fedretain; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_rests_while_importing_and_then_goes_on_as_before(before: bool) -> None:
    def importing() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise ImportError("not there")

    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(ImportError, match="not there"):
            importing()
        assert gc.isenabled() is before
    finally:
        gc.enable()
