"""What a command line asks of a GPU: whose kernels, whose attention, GELU in matmuls; honoured, said, or refused in a sentence."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import llmc.kernels
from llmc.config import config_from_descriptor
from llmc.errors import UserError
from llmc.flags import parse
from llmc.memory.plan import Plan
from llmc.request import check_attention, check_gelu_fusion, plan_options, settle_kernels

D12 = config_from_descriptor("d12")
CPU = SimpleNamespace(kind="cpu", capability=lambda: (0, 0))


def card(*capability):
    return SimpleNamespace(kind="cuda", capability=lambda: capability)


def asked(text=""):
    return parse(text.split())


def options(text="", precision="bf16", kind="cuda", config=D12):
    return plan_options(asked(text), config, precision, kind)


@pytest.fixture
def triton(monkeypatch):
    """Say whether triton is installed."""

    def installed(yes):
        monkeypatch.setattr(llmc.kernels, "find_spec", lambda name: object() if yes else None)

    installed(True)
    return installed


@pytest.mark.parametrize("backend, flags, kernels", [
    (CPU, "", "auto"), (CPU, "--kernels torch", "torch"), (card(9, 0), "", "triton"), (card(8, 0), "", "triton"),
    (card(9, 0), "--kernels triton", "triton"), (card(9, 0), "--kernels torch", "torch"), (card(7, 5), "--kernels torch", "torch"),
])  # fmt: skip
def test_kernels_are_triton_s_on_a_card_that_can_unless_torch_is_asked_for(triton, backend, flags, kernels):
    settings, notes = settle_kernels(asked(flags), backend)
    assert settings.kernels == kernels and notes == []


@pytest.mark.parametrize("backend, installed, why", [
    (card(9, 0), False, "triton is not installed (pip install triton)"), (card(7, 5), True, "they need a card of SM80 or later"),
])  # fmt: skip
def test_a_card_without_triton_trains_with_torch_and_says_so_but_not_if_triton_was_asked_for(triton, backend, installed, why):
    triton(installed)
    settings, notes = settle_kernels(asked(), backend)
    assert settings.kernels == "torch" and notes == [f"note: torch's operators run what Triton's kernels would do faster: {why}"]
    with pytest.raises(UserError, match="--kernels triton: .*leave it out") as refusal:
        settle_kernels(asked("--kernels triton"), backend)
    assert why in str(refusal.value)


def test_the_plan_is_of_the_kernels_that_will_run(triton):
    """What --plan assumes of a card is what a run on it decides; the torch form needs other working room."""
    settings, _ = settle_kernels(asked(), card(9, 0))
    decided = plan_options(settings, D12, "bf16", "cuda")
    assert decided.fused and Plan(decided).arenas == Plan(options()).arenas
    assert not options("--kernels torch").fused and not options(kind="cpu").fused
    assert Plan(options("--kernels torch")).tensors.keys() != Plan(options()).tensors.keys()


@pytest.mark.parametrize("precision, flags, kind", [
    ("bf16", "", "flash"), ("fp32", "", "efficient"), ("bf16", "--attention cudnn", "cudnn"),
    ("bf16", "--attention efficient", "efficient"), ("fp32", "--attention efficient", "efficient"),
])  # fmt: skip
def test_attention_is_the_one_asked_for_and_by_default_one_that_repeats_its_bits(precision, flags, kind):
    o = options(flags, precision)
    check_attention(o)
    assert o.attention_kind == kind


@pytest.mark.parametrize("precision, flags, head_size, sentence", [
    ("fp32", "--attention flash", 64, "--attention flash has no fp32 form; leave it out, or train in bf16"),
    ("fp32", "--attention cudnn", 64, "--attention cudnn has no fp32 form"),
    ("bf16", "", 36, "heads of size 36: flash attention takes multiples of 8 up to 256 in bf16; use --attention efficient"),
    ("bf16", "", 264, "heads of size 264: flash attention takes multiples of 8 up to 256"),
    ("bf16", "--attention cudnn", 136, "heads of size 136: cudnn attention takes multiples of 8 up to 128"),
])  # fmt: skip
def test_attention_that_does_not_take_the_model_is_refused_with_what_to_do(precision, flags, head_size, sentence):
    config = replace(D12, channels=2 * head_size, num_heads=2)
    with pytest.raises(UserError) as refusal:
        check_attention(options(flags, precision, config=config))
    assert str(refusal.value).startswith(sentence)


def test_gelu_fusion_without_the_library_is_refused(monkeypatch):
    import llmc.kernels.cublaslt as cublaslt

    monkeypatch.setattr(cublaslt, "available", lambda: "libcublasLt was not found")
    check_gelu_fusion(options())  # -ge 0 asks for nothing
    with pytest.raises(UserError, match="-ge 1: libcublasLt was not found; use -ge 0, which computes the same function"):
        check_gelu_fusion(options("-ge 1"))
    monkeypatch.setattr(cublaslt, "available", lambda: "")
    check_gelu_fusion(options("-ge 2 -r 1"))
