"""What the two spellings of MXFP8 share: `weight` F8_E4M3 and one E8M0 byte for each 32 columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from ..formats.base import Options
from ..formats.mxfp8 import Mxfp8Options
from ..plan import Plan
from .base import Json
from .pieces import PieceDialect, one_format
from .settings import names, optional, positive_ints, quantization_section, require

_WHERE = "quantization_config"
_BLOCK = (1, 32)


class Mxfp8Pieces(PieceDialect):
    """`<m>.weight` F8_E4M3 [N, K] and `<m>.<scale_word>` U8 [N, K/32], row-major, never F8_E8M0 and never swizzled.

    scale_word: last word of the scale's name. ignore_keys: where the engine looks for the ignore list. scale_fmt: what
    the config says of the scales; None: nothing.
    """

    quant_methods = ("mxfp8",)
    formats = MappingProxyType({"mxfp8": 1})
    scale_word: ClassVar[str]
    ignore_keys: ClassVar[tuple[str, ...]]
    scale_fmt: ClassVar[str | None] = None

    def words(self, options: Options) -> Mapping[str, str]:
        """See `PieceDialect.words`."""
        del options
        return {"weight": "qdata", self.scale_word: "scale"}

    def recognizes(self, config: Json) -> bool:
        """quant_method "mxfp8" and this spelling's ignore key."""
        section = quantization_section(config)
        if section is None or section.get("quant_method") != "mxfp8":
            return False
        return ("ignored_layers" in section) == ("ignored_layers" in self.ignore_keys)

    def read_options(self, section: Json) -> Options:
        """MXFP8 has no options; the settings must say the same."""
        optional(section, "activation_scheme", ("dynamic",), _WHERE)
        optional(section, "scale_fmt", ("ue8m0",), _WHERE)
        for key in ("ignored_layers", "modules_to_not_convert"):
            names(section, key, _WHERE)
        if positive_ints(section, "weight_block_size", 2, _WHERE) != _BLOCK:
            require(section, "weight_block_size", (list(_BLOCK),), _WHERE)
        return Mxfp8Options()

    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """See `Dialect.config`."""
        self.require_format(one_format(plan, self.name))
        section: Json = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_BLOCK),
        }
        if self.scale_fmt is not None:
            section["scale_fmt"] = self.scale_fmt
        section.update((key, list(ignore)) for key in self.ignore_keys)
        return section, {}
