"""Every format with every option that changes its bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("fp8_block", {"rule": rule, "scale": scale, "block": block})
        for rule, scale, block in itertools.product(
            ("te", "deepgemm", "deepseek"), ("fp32", "pow2"), ((128, 128), (1, 128), (3, 5))
        )
    ),
    ("mxfp8", {}),
    *(("mxfp4", {"scale_rule": rule}) for rule in ("rceil", "floor", "even")),
    ("nvfp4", {}),
    ("nvfp4", {"outer": "row"}),
    ("nvfp4", {"block": (16, 16)}),
    *(
        ("nvfp4", {"four_over_six": error, "e4m3_max": largest, **more})
        for error, largest in itertools.product(("mae", "mse"), (256, 448))
        for more in ({}, {"outer": "row"}, {"block": (16, 16)})
    ),
    *(
        ("int4_group", {"group": group, "rule": rule})
        for group, rule in itertools.product((32, 128), ("amax7", "amax7.5"))
    ),
]


def name_of(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *(str(value).replace(", ", "x").strip("()") for value in variant[1].values())])


EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)


def some(*names: str, without: tuple[str, ...] = ()) -> Any:
    """The variants of these formats, but for those that have one of these options or values."""
    chosen = [
        (name, values)
        for name, values in VARIANTS
        if name in names and not any(word in values or word in values.values() for word in without)
    ]
    return pytest.mark.parametrize("variant", chosen, ids=name_of)
