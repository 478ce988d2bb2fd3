"""One recipe, written for one engine: where engines want the same bytes under other names, the dialect follows."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from ..errors import PlanError, RecipeError
from ..recipe import Recipe
from .engine_table import get_engine

# Engine, dialect of the recipe -> the dialect with the same bytes that the engine reads (spec/contract.md 4).
_SPELLINGS = MappingProxyType(
    {
        ("vllm", "sglang_mxfp8"): "vllm_mxfp8",
        ("sglang", "vllm_mxfp8"): "sglang_mxfp8",
        ("transformers", "vllm_mxfp8"): "sglang_mxfp8",
    }
)


def for_engine(recipe: Recipe, engine: str) -> Recipe:
    """The recipe for one engine alone, in that engine's spelling.

    Whether the engine can load the result is found out when the plan is made.

    Raises:
        RecipeError: an engine that lowprec does not know.
    """
    try:
        get_engine(engine)
    except PlanError as error:
        raise RecipeError(str(error)) from None
    dialect = _SPELLINGS.get((engine, recipe.dialect), recipe.dialect)
    return dataclasses.replace(recipe, engines=(engine,), dialect=dialect)
