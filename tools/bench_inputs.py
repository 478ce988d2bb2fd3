"""The checkpoints that benchmarks convert: Qwen3-0.6B's shape, and a mixture of experts. Deterministic, numpy only.

Values are those of make_checkpoint.py: each tensor's come from its name. Sizes are those of spec/performance.md 1:
1.192 GB in 3 files and 1.628 GB in 4.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_checkpoint import Spec, tensor

Shape = tuple[int, ...]
_BYTES = 2  # of one BF16 value


@dataclass(frozen=True, kw_only=True)
class Model:
    """Widths of a Qwen3 model. experts: 0 for a dense one. tied: no lm_head. shards: files."""

    layers: int
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocab: int = 151_936
    experts: int = 0
    tied: bool = True
    shards: int = 3

    def config(self) -> dict[str, Any]:
        """config.json."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "attention_bias": False,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 40_960,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }
        if self.experts:
            config |= {"num_experts": self.experts, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
            config |= {"moe_intermediate_size": self.intermediate, "mlp_only_layers": [], "norm_topk_prob": True}
        return config

    def shapes(self) -> dict[str, Shape]:
        """Every tensor by its HF name, layer by layer."""
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer()}
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.tied else {**shapes, "lm_head.weight": (self.vocab, self.hidden)}

    def _layer(self) -> Iterator[tuple[str, Shape]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "input_layernorm.weight", (self.hidden,)
        yield "self_attn.q_proj.weight", (queries, self.hidden)
        yield "self_attn.k_proj.weight", (keys, self.hidden)
        yield "self_attn.v_proj.weight", (keys, self.hidden)
        yield "self_attn.o_proj.weight", (self.hidden, queries)
        yield "self_attn.q_norm.weight", (self.head_dim,)
        yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        if self.experts:
            yield "mlp.gate.weight", (self.experts, self.hidden)
        for prefix in [f"mlp.experts.{number}" for number in range(self.experts)] or ["mlp"]:
            yield f"{prefix}.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.down_proj.weight", (self.hidden, self.intermediate)


DENSE = Model(layers=28)
MOE = Model(
    layers=4, hidden=2048, heads=32, kv_heads=4, intermediate=768, vocab=32_768, experts=32, tied=False, shards=4
)


def dense_of(gigabytes: float) -> Model:
    """A dense model of about so many 1e9 bytes: more layers, everything else the same."""
    empty, one = (sum(map(_size, Model(layers=n, vocab=32_768).shapes().values())) for n in (0, 1))
    layers = round((gigabytes * 1e9 - empty) / (one - empty))
    return Model(layers=layers, vocab=32_768, shards=max(1, round(2 * gigabytes)))


def make_input(model: Model, folder: Path) -> int:
    """Write a model unless it is there already, and return the bytes of its tensors."""
    shapes = model.shapes()
    total = sum(map(_size, shapes.values()))
    text = json.dumps(model.config(), indent=2) + "\n"
    if (folder / "config.json").exists() and (folder / "config.json").read_text(encoding="utf-8") == text:
        return total
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    done = 0
    for name, shape in shapes.items():
        weight_map[name] = f"model-{done * model.shards // total + 1:05d}-of-{model.shards:05d}.safetensors"
        done += _size(shape)
    for file in sorted(set(weight_map.values())):
        _write_shard(folder / file, {name: shapes[name] for name in shapes if weight_map[name] == file})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")  # last: it says that the rest is there
    return total


def _size(shape: Shape) -> int:
    size = _BYTES
    for length in shape:
        size *= length
    return size


def _write_shard(path: Path, shapes: dict[str, Shape]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + _size(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    spec = Spec(kind="qwen3")

    def values(item: tuple[str, Shape]) -> bytes:
        return bytes(tensor(spec, *item).tobytes())

    with path.open("wb") as file, ThreadPoolExecutor(2) as pool:
        file.write(struct.pack("<Q", len(text)) + text)
        items = list(shapes.items())
        for begin in range(0, len(items), 4):  # not all of them in memory at once
            for data in pool.map(values, items[begin : begin + 4]):
                file.write(data)
