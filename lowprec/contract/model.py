"""What a contract needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class ModelTensor:
    """One logical tensor of a model: its HF weight name, what it is for, and where it stands.

    layer: decoder layer, MTP layers counting on from `num_layers`; None outside the layers. expert: None unless
    the tensor is one routed expert's.
    """

    name: str
    role: str
    layer: int | None = None
    expert: int | None = None

    @property
    def module(self) -> str:
        """Path of the module that holds the tensor: the name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a contract needs to know of a model; a family makes it from config.json and the tensor names."""

    family: str
    model_type: str
    num_layers: int
    num_mtp_layers: int
    tensors: tuple[ModelTensor, ...]
