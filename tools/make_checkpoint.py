"""Write a small, real Hugging Face checkpoint with random weights, for tests, benchmarks and the demo.

    python tools/make_checkpoint.py qwen3_moe DIR [--layers 4] [--ragged] [--shards 3] ...

Names, shapes and config.json are what transformers itself saves for the model; only the MTP layers, which it leaves
out, are added here. Every value comes from the seed and the tensor's name alone, so the same call gives the same
bytes anywhere, and a tensor keeps its bytes when the sharding changes. transformers loads every kind but kimi_k2,
which it reads as soon as model_type in config.json says deepseek_v3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
Array = npt.NDArray[Any]
Shape = tuple[int, ...]

# Pieces that an engine fuses with a neighbour; --split-partners moves them to the next file.
_SECOND_PARTNERS = ("up_proj.weight", "k_proj.weight", "kv_a_proj_with_mqa.weight")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths of a model. `aligned`: every tensor, and every shard that an engine merges, is a multiple of 128."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    expert_intermediate: int
    vocab: int
    q_lora: int
    kv_lora: int
    rope: int
    nope: int
    v_head: int


ALIGNED = Sizes(
    hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, expert_intermediate=128, vocab=512,
    q_lora=128, kv_lora=128, rope=128, nope=64, v_head=64,
)  # fmt: skip
# Rows and columns that are multiples of 32, as the one-dimensional formats need, but not of 128.
RAGGED = Sizes(
    hidden=288, heads=4, kv_heads=2, head_dim=72, intermediate=416, expert_intermediate=96, vocab=500,
    q_lora=96, kv_lora=160, rope=24, nope=40, v_head=40,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to write; the defaults give a few megabytes.

    dense_layers: how many layers at the start have no experts; None: one for DeepSeek-V3 and Kimi-K2, none for
    Qwen3-MoE. mtp: MTP layers; None: one for DeepSeek-V3, none for Kimi-K2, as published. q_lora: MLA with a query
    latent, else a plain q_proj. tie: no lm_head. biases: q, k, v (and o) with biases where the model can have them.
    hidden, vocab: instead of the size's own. split_partners: gate and up, q and k, q_a and kv_a lie in different files.
    """

    kind: str
    layers: int = 4
    experts: int = 8
    dense_layers: int | None = None
    mtp: int | None = None
    seed: int = 0
    ragged: bool = False
    hidden: int | None = None
    vocab: int | None = None
    q_lora: bool = True
    tie: bool = False
    biases: bool = False
    dtype: str = "bfloat16"
    shards: int = 2
    split_partners: bool = False
    tokenizer: bool = True


def make_checkpoint(kind: str, target: str | Path, **options: Any) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        kind: one of KINDS.
        target: a folder that does not exist or is empty.
        options: the other fields of `Spec`.

    Raises:
        ValueError: unknown kind or dtype, or a target with files in it.
        TypeError: an unknown option.
    """
    spec = Spec(kind=kind, **options)
    if kind not in KINDS or spec.dtype not in DTYPES:
        raise ValueError(f"kind must be one of {KINDS} and dtype one of {tuple(DTYPES)}")
    target = Path(target)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    shapes = _save_skeleton(spec, target)
    shapes |= _mtp_shapes(spec, shapes)
    _write_shards(spec, target, shapes)
    if spec.tokenizer:
        _write_tokenizer(target)
    return target


def tensor(spec: Spec, name: str, shape: Shape) -> Array:
    """The values of one tensor: [..] in the spec's dtype, or float32 for the bias of a router.

    Matrices have the spread that real weights have: normal * 0.02, rows times exp(0.25 N), one column in 256 times 4,
    one element in 5000 times 15.
    """
    rng = np.random.default_rng([spec.seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("e_score_correction_bias"):
        return values * np.float32(0.1)
    if len(shape) == 1:
        values = values * np.float32(0.1) + np.float32(0 if name.endswith("bias") else 1)
    else:
        rows, columns = shape
        values *= np.float32(0.02) * np.exp(np.float32(0.25) * rng.standard_normal((rows, 1), dtype=np.float32))
        values[:, rng.choice(columns, math.ceil(columns / 256), replace=False)] *= np.float32(4)
        values.reshape(-1)[rng.choice(values.size, math.ceil(values.size / 5000), replace=False)] *= np.float32(15)
    return values.astype(DTYPES[spec.dtype])


def config_of(spec: Spec) -> dict[str, Any]:
    """Arguments of the transformers config class."""
    sizes = RAGGED if spec.ragged else ALIGNED
    return {
        "hidden_size": spec.hidden or sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": sizes.heads,
        "vocab_size": spec.vocab or sizes.vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": spec.tie,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": spec.dtype,
        **(_latent_attention(spec, sizes) if _is_deepseek(spec) else _grouped_attention(spec, sizes)),
        **(_deepseek_experts(spec, sizes) if _is_deepseek(spec) else {}),
        **(_qwen_experts(spec, sizes) if spec.kind == "qwen3_moe" else {}),
    }


def _is_deepseek(spec: Spec) -> bool:
    return spec.kind in ("deepseek_v3", "kimi_k2")


def _grouped_attention(spec: Spec, sizes: Sizes) -> dict[str, Any]:
    biases = {} if spec.kind == "qwen2" else {"attention_bias": spec.biases}  # Qwen2 always has them
    mlp = {"mlp_bias": spec.biases} if spec.kind == "llama" else {}
    return {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, **biases, **mlp}


def _latent_attention(spec: Spec, sizes: Sizes) -> dict[str, Any]:
    return {
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora if spec.q_lora else None,
        "kv_lora_rank": sizes.kv_lora,
        "qk_rope_head_dim": sizes.rope,
        "qk_nope_head_dim": sizes.nope,
        "v_head_dim": sizes.v_head,
        "attention_bias": spec.biases,
    }


def _deepseek_experts(spec: Spec, sizes: Sizes) -> dict[str, Any]:
    default_mtp = 1 if spec.kind == "deepseek_v3" else 0
    return {
        "moe_intermediate_size": sizes.expert_intermediate,
        "n_routed_experts": spec.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1 if spec.dense_layers is None else spec.dense_layers,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": default_mtp if spec.mtp is None else spec.mtp,
    }


def _qwen_experts(spec: Spec, sizes: Sizes) -> dict[str, Any]:
    return {
        "moe_intermediate_size": sizes.expert_intermediate,
        "num_experts": spec.experts,
        "num_experts_per_tok": 2,
        "mlp_only_layers": list(range(spec.dense_layers or 0)),
    }


def _save_skeleton(spec: Spec, target: Path) -> dict[str, Shape]:
    """Let transformers save the model; keep its configs in `target` and return its names and shapes."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING["deepseek_v3" if _is_deepseek(spec) else spec.kind](**config_of(spec))
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in ("config.json", "generation_config.json"):
            content = json.loads(Path(folder, name).read_text(encoding="utf-8"))
            if name == "config.json":
                content["model_type"] = spec.kind
            _write_json(target / name, content)
        with safe_open(str(Path(folder, "model.safetensors")), "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _mtp_shapes(spec: Spec, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """MTP layers as DeepSeek-V3 publishes them: a copy of the last decoder layer's names and the glue around it."""
    config = config_of(spec)
    hidden, vocab, last = config["hidden_size"], config["vocab_size"], f"model.layers.{spec.layers - 1}."
    found: dict[str, Shape] = {}
    for layer in range(spec.layers, spec.layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}."
        found |= {prefix + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
        found |= {
            f"{prefix}embed_tokens.weight": (vocab, hidden),
            f"{prefix}enorm.weight": (hidden,),
            f"{prefix}hnorm.weight": (hidden,),
            f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
            f"{prefix}shared_head.norm.weight": (hidden,),
            f"{prefix}shared_head.head.weight": (vocab, hidden),
        }
    return found


def _write_shards(spec: Spec, target: Path, shapes: Mapping[str, Shape]) -> None:
    """model.safetensors, or numbered files of about equal size with an index."""
    tensors = {name: tensor(spec, name, shape) for name, shape in sorted(shapes.items())}
    if spec.shards == 1:
        _write_safetensors(target / "model.safetensors", tensors)
        return
    total, before = sum(array.nbytes for array in tensors.values()), 0
    place: dict[str, int] = {}
    for name, array in tensors.items():
        moved = spec.split_partners and name.endswith(_SECOND_PARTNERS)
        place[name] = (before * spec.shards // total + moved) % spec.shards
        before += array.nbytes
    files = [f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors" for shard in range(spec.shards)]
    for shard, file in enumerate(files):
        _write_safetensors(target / file, {name: tensors[name] for name in tensors if place[name] == shard})
    weight_map = {name: files[shard] for name, shard in place.items()}
    _write_json(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    import torch
    from safetensors.torch import save_file

    content = {
        name: torch.from_numpy(array.view(np.uint8).reshape(-1))
        .view(getattr(torch, array.dtype.name))
        .view(array.shape)
        for name, array in tensors.items()
    }
    save_file(content, str(path), {"format": "pt"})


def _write_tokenizer(target: Path) -> None:
    """One token a byte, after begin and end: the smallest tokenizer that reads any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(target))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser(description="Write a small Hugging Face checkpoint with random weights.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("target", type=Path, help="folder that does not exist or is empty")
    for field in dataclasses.fields(Spec):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "kind":
            continue
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.name == "dtype":
            parser.add_argument(flag, choices=tuple(DTYPES), default=field.default)
        else:
            parser.add_argument(flag, type=int, default=field.default)
    options = vars(parser.parse_args(arguments))
    disable_progress_bar()
    try:
        make_checkpoint(options.pop("kind"), options.pop("target"), **options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
