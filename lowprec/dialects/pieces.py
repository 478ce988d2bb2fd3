"""The part that dialects share: a weight is stored as a few pieces, each one array of its QTensor.

A strict table of dtype and shape decides on both sides. Engines do not check: SGLang converts a tensor of the wrong
dtype by value, so E8M0-typed scales become zeros and uint8-typed FP8 weights become integers (spec/serving.md 0).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from ..errors import CheckpointError, FormatError, PlanError
from ..formats import get_format
from ..formats.base import Array, ArraySpec, Options, Shape
from ..plan import Action, Plan, SourceTensor, TensorInfo
from ..qtensor import QTensor
from .base import Dialect, Json
from .settings import quantization_section

# numpy name (ml_dtypes included) -> safetensors name, for all that a piece can be.
STORED_DTYPES = MappingProxyType(
    {
        "float8_e4m3fn": "F8_E4M3",
        "bfloat16": "BF16",
        "float32": "F32",
        "int32": "I32",
        "int64": "I64",
        "uint8": "U8",
    }
)

# What a tensor that is not quantized may be stored as.
PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "I64", "BOOL"})

# Last word of every name under which some serving checkpoint stores a piece of quantized data.
COMPANION_WORDS = frozenset(
    {
        "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_packed", "weight_shape", "weight_global_scale",
        "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "activation_scale", "k_scale",
        "v_scale", "gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales",
        "gate_up_proj_scale_inv", "down_proj_scale_inv", "qweight", "qzeros", "scales", "g_idx",
    }
)  # fmt: skip


def stored_dtype(array: Array) -> str:
    """The safetensors name of the dtype of a numpy array or torch tensor; its own name where no piece has it."""
    name = str(array.dtype).removeprefix("torch.")
    return STORED_DTYPES.get(name, name)


def plain_source(info: TensorInfo, dialect: str) -> SourceTensor:
    """A stored tensor that is not quantized. Raises CheckpointError if it looks like a piece of quantized data."""
    word = info.name.rpartition(".")[2]
    if word in COMPANION_WORDS:
        raise CheckpointError(
            f"tensor '{info.name}' belongs to quantized data that the dialect {dialect} does not have"
        )
    if info.dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"tensor '{info.name}' is {info.dtype}, which the dialect {dialect} of the source's config does not have; "
            "the quantization config or the scale is missing"
        )
    return SourceTensor(name=info.name, dtype=info.dtype, shape=info.shape, parts=MappingProxyType({"weight": info}))


def one_format(plan: Plan, dialect: str) -> Options:
    """The format, options included, that all quantized weights of a plan have.

    Raises PlanError if there are none, or several: these dialects state one format for the whole checkpoint.
    """
    first: tuple[str, Options] | None = None
    for step in plan.steps:
        if step.action is not Action.QUANTIZE or step.weight is None:
            continue
        if first is None:
            first = (step.tensor.name, step.weight)
        elif step.weight != first[1]:
            raise PlanError(
                f"'{first[0]}' and '{step.tensor.name}' have different formats or options; a {dialect} checkpoint "
                "states one for all; make the rules' weight tables equal"
            )
    if first is None:
        raise PlanError(f"nothing is quantized; a {dialect} checkpoint needs at least one quantized tensor")
    return first[1]


class PieceDialect(Dialect):
    """A dialect whose pieces are arrays of the QTensor, stored as they are.

    A subclass says which piece is which array (`words`) and what the config states (`read_options`, `config`).

    formats: format name -> codes in one element of the main piece. main_word: the piece that holds the codes.
    spare: words that we write and that other writers may leave out; decoding does not need them.
    """

    formats: ClassVar[Mapping[str, int]]
    main_word: ClassVar[str] = "weight"
    spare: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def words(self, options: Options) -> Mapping[str, str]:
        """Word -> field of `Quantized`. Raises PlanError if the dialect cannot spell these options."""

    def constants(self, tensor: QTensor) -> Mapping[str, Array]:
        """Further pieces to store that are not arrays of the QTensor; none unless a subclass has some."""
        del tensor
        return {}

    def pieces(self, options: Options) -> frozenset[str]:
        """Every word that `parts` has for these options."""
        return frozenset(self.words(options))

    @abc.abstractmethod
    def read_options(self, section: Json) -> Options:
        """Format and options that a source's quantization section states. Raises CheckpointError."""

    def require_format(self, options: Options) -> None:
        """Raises PlanError unless the dialect holds this format."""
        if options.format not in self.formats:
            raise PlanError(f"{self.name} has no spelling for {options.format}; it holds {', '.join(self.formats)}")

    def read_dtypes(self, word: str, dtype: str) -> tuple[str, ...]:
        """The dtypes under which a piece that we write as `dtype` can be read; the same one unless a subclass knows."""
        del word
        return (dtype,)

    def parts(self, options: Options, shape: Shape) -> Mapping[str, tuple[str, Shape]]:
        """See `Dialect.parts`. Shapes are those of `Format.layout`; only matrices have a spelling."""
        if len(shape) != 2:
            raise PlanError(f"{self.name} stores matrices; a weight of shape {list(shape)} has no spelling in it")
        self.require_format(options)
        words = self.words(options)
        try:
            layout = get_format(options.format).layout(shape, options)
        except FormatError as error:
            raise PlanError(f"{self.name}: {error}") from None
        pieces: dict[str, tuple[str, Shape]] = {}
        for word, field in words.items():
            spec: ArraySpec = getattr(layout, field)
            pieces[word] = (STORED_DTYPES[spec.dtype.name], spec.shape)
        return pieces

    def encode(self, tensor: QTensor) -> Mapping[str, Array]:
        """See `Dialect.encode`. Raises CheckpointError if the tensor's arrays are not those of its format."""
        arrays = {word: getattr(tensor, field) for word, field in self.words(tensor.options).items()}
        self._check_arrays(tensor.options, tensor.shape, {**arrays, **self.constants(tensor)})
        return {**arrays, **self.constants(tensor)}

    def row_pieces(self, options: Options) -> Mapping[str, str]:
        """See `Dialect.row_pieces`. A subclass that encodes otherwise must say so here as well."""
        return {word: field for word, field in self.words(options).items() if field in ("qdata", "scale")}

    def decode(self, options: Options, shape: Shape, arrays: Mapping[str, Array]) -> QTensor:
        """See `Dialect.decode`."""
        self._check_arrays(options, shape, arrays)
        fields = {field: arrays[word] for word, field in self.words(options).items()}
        return QTensor(
            qdata=fields["qdata"],
            scale=fields["scale"],
            global_scale=fields.get("global_scale"),
            options=options,
            shape=shape,
        )

    def _check_arrays(self, options: Options, shape: Shape, arrays: Mapping[str, Array]) -> None:
        infos = {word: TensorInfo(name=word, dtype=stored_dtype(a), shape=tuple(a.shape)) for word, a in arrays.items()}
        self._check(options, shape, infos, "a weight")

    def logical(self, config: Json, stored: Mapping[str, TensorInfo]) -> tuple[SourceTensor, ...]:
        """See `Dialect.logical`."""
        options = self.read_options(quantization_section(config) or {})
        pieces = {*self.pieces(options), "weight"}
        modules: dict[str, dict[str, TensorInfo]] = {}
        found: list[SourceTensor] = []
        for name, info in stored.items():
            module, dot, word = name.rpartition(".")
            if dot and word in pieces:
                modules.setdefault(module, {})[word] = info
            else:
                found.append(plain_source(info, self.name))
        found += [self._source(module, options, parts) for module, parts in modules.items()]
        return tuple(sorted(found, key=lambda source: source.name))

    def _source(self, module: str, options: Options, parts: Mapping[str, TensorInfo]) -> SourceTensor:
        """The logical weight of one module: plain, or quantized with all of its pieces."""
        weight = f"{module}.weight"
        if set(parts) == {"weight"} and (self.main_word != "weight" or parts["weight"].dtype in PLAIN_DTYPES):
            return plain_source(parts["weight"], self.name)
        main = parts.get(self.main_word)
        if main is None:
            raise CheckpointError(
                f"'{next(iter(parts.values())).name}' is there, but '{module}.{self.main_word}' is not"
            )
        shape = (*main.shape[:-1], self.formats[options.format] * main.shape[-1]) if main.shape else ()
        self._check(options, shape, parts, f"'{weight}'")
        return SourceTensor(
            name=weight, dtype=main.dtype, shape=shape, stored=options, parts=MappingProxyType(dict(parts))
        )

    def _check(self, options: Options, shape: Shape, parts: Mapping[str, TensorInfo], what: str) -> None:
        """Raises CheckpointError unless `parts` are the pieces of a weight of `shape`, in dtype and shape."""
        try:
            expected = self.parts(options, shape)
        except PlanError as error:
            raise CheckpointError(f"{what}: {error}") from None
        for word in expected:
            if word not in parts and word not in self.spare:
                raise CheckpointError(f"{what} is {options.format} in {self.name}, but its {word} is missing")
        for word, info in parts.items():
            if word not in expected:
                raise CheckpointError(
                    f"{what}: '{info.name}' is not a piece of a {options.format} weight in {self.name}"
                )
            dtype, stored = expected[word]
            if info.dtype not in self.read_dtypes(word, dtype) or info.shape != stored:
                raise CheckpointError(
                    f"{what}: '{info.name}' is {info.dtype} {list(info.shape)}; {self.name} stores a weight of shape "
                    f"{list(shape)} with {word} {dtype} {list(stored)}"
                )
