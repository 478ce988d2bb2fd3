"""The contract: a recipe resolved for one model. Every rule that decides a bit is a named field of it.

Conversion, training, serving export and online update all ask `Contract.rule_for`, and prove that they asked
the same contract by its digest.

    model.py      Model, ModelTensor: what a contract needs to know of a model
    rules.py      TensorRule, Decision: one resolved rule and what it matches
    record.py     Contract: the record, its JSON and its digest
    canonical.py  canonical JSON, and where two of them differ
    resolve.py    resolve: recipe and model -> Contract
"""

from .canonical import canonical, first_difference
from .model import Model, ModelTensor
from .record import Contract
from .resolve import count_layers, resolve
from .rules import Decision, TensorRule, glob_to_regex

__all__ = [
    "Contract",
    "Decision",
    "Model",
    "ModelTensor",
    "TensorRule",
    "canonical",
    "count_layers",
    "first_difference",
    "glob_to_regex",
    "resolve",
]
