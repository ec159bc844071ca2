"""Empty modules in the place of torchvision, for peers whose built-in datasets, not used here, import it."""

import sys
from types import ModuleType

for name in ("torchvision", "torchvision.transforms"):
    sys.modules[name] = ModuleType(name)
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
