"""Convert one checkpoint with another tool, on a CPU, and print how long it took without imports, as JSON.

    PYTHON tools/bench_peers.py PEER RECIPE SOURCE TARGET

Runs in an environment that has the peer and not lowprec: bench_convert.py --peers starts it. Versions that work
together on Python 3.11: torch 2.13.0 installed first, then llmcompressor 0.14.0.1, nvidia-modelopt 0.47.0, torchao
0.18.0, ml-dtypes 0.6.0. What is timed is all from the folder to the finished folder, loading included where a tool
loads a model.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = [
    *(("model_free_ptq", recipe) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")),
    *(("oneshot", recipe) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")),
    *(("modelopt", recipe) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")),
    *(("torchao", recipe) for recipe in ("mxfp8", "nvfp4", "mxfp4_dense")),
]
PACKAGES = {
    "model_free_ptq": "llmcompressor",
    "oneshot": "llmcompressor",
    "modelopt": "nvidia-modelopt",
    "torchao": "torchao",
}
# compressed-tensors' names of schemes, weights alone where lowprec's result states nothing calibrated.
SCHEMES = {"fp8_block": "FP8_BLOCK", "mxfp8": "MXFP8A16", "nvfp4": "NVFP4A16", "mxfp4_dense": "MXFP4A16"}
MODELOPT = {
    "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_W4A16_CFG",
    "mxfp4_dense": "MXFP4_DEFAULT_CFG",
}
IGNORE = ["lm_head", "re:.*embed_tokens.*"]

Work = Callable[[], None]


def model_free_ptq(recipe: str, source: Path, target: Path) -> Work:
    """llm-compressor, file by file."""
    from llmcompressor import model_free_ptq

    return lambda: model_free_ptq(
        model_stub=str(source), save_directory=str(target), scheme=SCHEMES[recipe], ignore=IGNORE, device="cpu"
    )


def load(source: Path) -> Any:
    """The model as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


def oneshot(recipe: str, source: Path, target: Path) -> Work:
    """llm-compressor on a loaded model, without data."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    def work() -> None:
        model = load(source)
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=SCHEMES[recipe], ignore=["lm_head"]))
        model.save_pretrained(target, save_compressed=True)

    return work


def modelopt(recipe: str, source: Path, target: Path) -> Work:
    """ModelOpt: quantize without calibration, then export."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = getattr(mtq, MODELOPT[recipe])

    def work() -> None:
        model = mtq.quantize(load(source), config, forward_loop=None)
        export_hf_checkpoint(model, export_dir=str(target))

    return work


def torchao(recipe: str, source: Path, target: Path) -> Work:
    """torchao's quantize_, flattened into a safetensors file."""
    import torch
    from safetensors.torch import save_file
    from torchao.prototype import mx_formats
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    if recipe == "nvfp4":
        config = mx_formats.NVFP4WeightOnlyConfig()
    else:
        dtype = torch.float8_e4m3fn if recipe == "mxfp8" else torch.float4_e2m1fn_x2
        config = mx_formats.MXDynamicActivationMXWeightConfig(
            activation_dtype=dtype, weight_dtype=dtype, kernel_preference=mx_formats.KernelPreference.EMULATED
        )

    def work() -> None:
        model = load(source)
        quantize_(model, config)
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        target.mkdir(parents=True)
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if name != "lm_head.weight"}
        save_file(kept, target / "model.safetensors", metadata=metadata)

    return work


def main() -> None:
    """Import, then time."""
    peer, recipe, source, target = sys.argv[1:]
    work = {"model_free_ptq": model_free_ptq, "oneshot": oneshot, "modelopt": modelopt, "torchao": torchao}[peer](
        recipe, Path(source), Path(target)
    )
    begin = time.perf_counter()
    work()
    record = {
        "seconds": time.perf_counter() - begin,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": importlib.metadata.version(PACKAGES[peer]),
    }
    print(f"\n{json.dumps(record)}")


if __name__ == "__main__":
    main()
