"""Notes on results that load, and dialects of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from small_plans import SCHEMES, dialect_of, make_plan

import lowprec.dialects
from lowprec.dialects import detect, get_dialect, list_dialects
from lowprec.dialects.engine_notes import notes
from lowprec.errors import CheckpointError, PlanError
from lowprec.formats.base import Options
from lowprec.formats.fp8_block import Fp8BlockOptions, Scale
from lowprec.formats.nvfp4 import Nvfp4Options

O_PROJ = "model.layers.5.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "activation", "message"),
    [
        ("fp8_block", Fp8BlockOptions(block=(1, 128)), ""),
        ("fp8_block", None, "in blocks of [1, 128], whatever the recipe"),
        ("fp8_block", Fp8BlockOptions(), "in blocks of [1, 128], whatever the recipe"),
        ("fp8_block", Fp8BlockOptions(block=(1, 128), scale=Scale.POW2), "the config states one kind of scale"),
        ("fp8_block_mtp_kept", Fp8BlockOptions(block=(1, 128), scale=Scale.POW2), "vLLM does not read scale_fmt"),
        ("nvfp4", SCHEMES["nvfp4"].activation, "only with SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1"),
        ("nvfp4", Nvfp4Options(), ""),
        ("nvfp4", None, "to NVFP4, whatever the recipe"),
        ("mxfp8", SCHEMES["mxfp8"].activation, ""),
    ],
    ids=str,
)
def test_activations(name: str, activation: Options | None, message: str) -> None:
    scheme = type(SCHEMES[name])(**{**vars(SCHEMES[name]), "activation": activation})
    lines = notes(make_plan("qwen3", scheme), dialect_of(scheme))
    assert len(lines) == bool(message)
    assert not message or message in lines[0]


def test_nvfp4_weights_that_sglang_pads() -> None:
    scheme = SCHEMES["nvfp4"]
    lines = notes(make_plan("qwen3", scheme, sizes={O_PROJ: (256, 272)}), dialect_of(scheme))
    assert any(f"SGLang pads {O_PROJ} [256, 272] (1 such)" in line for line in lines)


@pytest.mark.parametrize(("experts", "expected"), [(256, True), (8, False)])
def test_shared_experts_that_sglang_fuses(experts: int, expected: bool) -> None:
    base = SCHEMES["fp8_block"]
    routed = type(base)(**{**vars(base), "roles": ("experts.gate", "experts.up", "experts.down")})
    plan = make_plan("deepseek_v3", routed, layers=3, experts=experts, first=0, last=0)
    assert any("--disable-shared-experts-fusion" in line for line in notes(plan, dialect_of(routed))) == expected
    both = make_plan("deepseek_v3", base, layers=3, experts=experts, first=0, last=0)
    assert not any("shared-experts" in line for line in notes(both, dialect_of(base)))


def test_dialects_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "lowprec.dialects"
    plugins = [
        EntryPoint(name="other_bf16", value="lowprec.dialects.bf16:DIALECT", group=group),
        EntryPoint(name="no_dialect", value="json:dumps", group=group),
    ]
    monkeypatch.setattr(lowprec.dialects, "entry_points", lambda **_: plugins)
    assert list_dialects()[-2:] == ("no_dialect", "other_bf16")
    assert get_dialect("other_bf16") is get_dialect("bf16")
    with pytest.raises(PlanError, match="'no_dialect' is a function"):
        get_dialect("no_dialect")
    assert detect({}).name == "bf16", "no other package is loaded where one of ours fits"
    with pytest.raises(PlanError, match="did you mean 'other_bf16'"):
        get_dialect("other_bf17")
    with pytest.raises(PlanError, match="'no_dialect' is a function"):
        detect({"quantization_config": {"quant_method": "x"}})
    monkeypatch.setattr(lowprec.dialects, "entry_points", lambda **_: [])
    with pytest.raises(CheckpointError, match="compressed-tensors, fp8, modelopt, modelopt_fp4, mxfp8"):
        detect({"quantization_config": {"quant_method": "x"}})
