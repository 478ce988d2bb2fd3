"""One recipe, one quantization contract: convert, train, serve and update checkpoints, byte for byte.

    recipe -> Contract -> Plan -> quantize -> files, Megatron or a live engine

The names below are the public surface. Each is loaded when it is first used: `import lowprec` imports
neither numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import dequantize, fake_quantize, quantize
    from .contract import Contract, resolve
    from .converters.api import convert, explain, inspect, verify
    from .qtensor import QTensor
    from .recipe import Recipe, load_recipe

__version__ = "0.1.0"

__all__ = [
    "Contract",
    "QTensor",
    "Recipe",
    "convert",
    "dequantize",
    "explain",
    "fake_quantize",
    "inspect",
    "load_recipe",
    "quantize",
    "resolve",
    "verify",
]

_HOME = {
    "Contract": "contract",
    "QTensor": "qtensor",
    "Recipe": "recipe",
    "convert": "converters.api",
    "dequantize": "backends",
    "explain": "converters.api",
    "fake_quantize": "backends",
    "inspect": "converters.api",
    "load_recipe": "recipe",
    "quantize": "backends",
    "resolve": "contract",
    "verify": "converters.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
