"""Peaks agree with llm.c's table where it has the card, and with the card's name as drivers really spell it."""

import pytest
import torch

from llmc.backend import Backend, measure_matmul_tflops
from llmc.cards import PEAKS
from llmc.mfu import flops_per_token, model_flops_utilization, promised_tflops

# llm.c's 38 entries as its get_flops_promised computes them: bf16, fp32 (TF32). One card is there twice, and its two V100 are left out:
# it gives their fp16 rate as TF32, which they do not have
LLMC = {
    "NVIDIA A100-PCIE-40GB": (312.0, 156.0), "NVIDIA A100-PCIE-80GB": (312.0, 156.0), "NVIDIA A100-SXM4-40GB": (312.0, 156.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 156.0),
    "NVIDIA RTX A2000": (16.0, 8.0), "NVIDIA RTX A4000": (38.3, 19.2), "NVIDIA RTX A4500": (47.3, 23.7), "NVIDIA RTX A5000": (55.5, 27.8),
    "NVIDIA RTX A5500": (72.5, 36.3), "NVIDIA RTX A6000": (77.4, 38.7), "NVIDIA GeForce RTX 3090 Ti": (80.0, 40.0),
    "NVIDIA GeForce RTX 3090": (71.2, 35.6), "NVIDIA GeForce RTX 3080 Ti": (68.2, 34.1), "NVIDIA GeForce RTX 3080": (59.5, 29.8),
    "NVIDIA GeForce RTX 3070 Ti": (43.5, 21.8), "NVIDIA GeForce RTX 3070": (40.6, 20.3), "NVIDIA GeForce RTX 3060 Ti": (32.4, 16.2),
    "NVIDIA GeForce RTX 3060": (25.5, 12.7), "NVIDIA RTX A2000 ADA": (24.0, 12.0), "NVIDIA RTX A4000 ADA": (53.5, 26.7),
    "NVIDIA RTX A4500 ADA": (74.0, 37.0), "NVIDIA RTX A5000 ADA": (130.6, 65.3), "NVIDIA RTX A5880 ADA": (138.6, 69.3),
    "NVIDIA RTX A6000 ADA": (182.2, 91.1), "NVIDIA GeForce RTX 4090": (165.2, 82.6), "NVIDIA GeForce RTX 4080 SUPER": (104.5, 52.2),
    "NVIDIA GeForce RTX 4080": (97.5, 48.8), "NVIDIA GeForce RTX 4070 Ti SUPER": (88.2, 44.1), "NVIDIA GeForce RTX 4070 Ti": (80.2, 40.1),
    "NVIDIA GeForce RTX 4070 SUPER": (71.0, 35.5), "NVIDIA GeForce RTX 4070": (58.3, 29.2), "NVIDIA GeForce RTX 4060 Ti": (44.1, 22.1),
    "NVIDIA GeForce RTX 4060": (30.2, 15.1), "NVIDIA H100 PCIe": (756.0, 378.0), "NVIDIA H100 80GB HBM3": (988.8, 494.4),
}  # fmt: skip

# names that nvidia-smi prints -> bf16, fp32
REAL = {
    "NVIDIA H100 80GB HBM3": (989, 495), "NVIDIA H100 PCIe": (756, 378), "NVIDIA H100 NVL": (835, 418), "NVIDIA H200": (989, 495),
    "NVIDIA H200 NVL": (835, 418), "NVIDIA GH200 480GB": (989, 495), "NVIDIA H20": (148, 74), "NVIDIA H800": (989, 495),
    "NVIDIA A800-SXM4-80GB": (312, 156), "NVIDIA A100 80GB PCIe": (312, 156), "NVIDIA A30": (165, 82), "NVIDIA A10": (125, 62.5),
    "NVIDIA A10G": (70, 35), "NVIDIA A16": (17.9, 9), "NVIDIA A40": (149.7, 74.8), "NVIDIA L4": (121, 60.5), "NVIDIA L40": (181, 90.5),
    "NVIDIA L40S": (362, 183), "NVIDIA B200": (2250, 1125), "NVIDIA GB200": (2500, 1250), "NVIDIA B300 SXM6 AC": (2250, 1125),
    "NVIDIA GB300": (2500, 1250), "NVIDIA GeForce RTX 5090": (209.5, 104.8), "NVIDIA GeForce RTX 5080": (112.6, 56.3),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6), "NVIDIA GeForce RTX 4090 D": (147, 73.5), "NVIDIA GeForce RTX 3090": (71, 35.6),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 182.1), "NVIDIA RTX 4000 SFF Ada Generation": (76.7, 38.3),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 251.9),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (438.9, 219.5),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (480, 240),
    "Tesla T4": (None, 8.1), "Tesla V100-SXM2-16GB": (None, 15.7), "Tesla V100-PCIE-32GB": (None, 14.0),
    "NVIDIA GeForce RTX 2080 Ti": (None, 13.45), "NVIDIA TITAN RTX": (None, 16.3), "Quadro RTX 8000": (None, 16.3),
}  # fmt: skip

UNKNOWN = (
    "cpu", "", "NVIDIA GeForce GTX 1080", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 2080 with Max-Q Design",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 5090 D", "NVIDIA RTX 4090X",
)  # fmt: skip


@pytest.mark.parametrize("name", LLMC)
def test_peaks_agree_with_llmc_s_table(name):
    # but for the RTX A workstation cards, where llm.c takes the GeForce rate, half of the datasheet's (A6000: 154.8 TFLOP/s dense)
    factor = 2 if name.startswith("NVIDIA RTX A") else 1
    expected = [factor * tflops for tflops in LLMC[name]]
    assert [promised_tflops(name, "bf16"), promised_tflops(name, "fp32")] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", REAL)
def test_a_card_is_found_under_its_driver_s_name(name):
    bf16, fp32 = REAL[name]
    assert promised_tflops(name, "fp32") == pytest.approx(fp32, rel=0.01)
    assert promised_tflops(name, "bf16") == (bf16 and pytest.approx(bf16, rel=0.01))


def test_without_tf32_only_cards_that_lack_it_promise_anything_in_fp32():
    assert [promised_tflops("NVIDIA H200", precision, tf32=False) for precision in ("bf16", "fp32")] == [989.4, None]
    assert promised_tflops("Tesla V100-SXM2-16GB", "fp32", tf32=False) == promised_tflops("Tesla V100-SXM2-16GB", "fp32") > 15


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_card_a_laptop_s_or_a_slice_promises_nothing(name):
    assert promised_tflops(name, "bf16") is None and promised_tflops(name, "fp32") is None


@pytest.mark.parametrize("name", PEAKS)
def test_every_row_is_found_by_its_own_name(name):
    assert (promised_tflops(f"NVIDIA {name}", "bf16"), promised_tflops(name.upper(), "fp32")) == PEAKS[name]


def test_flops_of_gpt2_124m():
    """Six for each parameter, and attention's: 746,855,424 and 56,623,104."""
    assert flops_per_token(124_475_904, 12, 768, 1024) == 803_478_528


def test_utilization_is_a_share_of_the_peak():
    assert model_flops_utilization(10**9, tokens=500_000, dt_s=2.0, peak_tflops=1000.0) == pytest.approx(0.25)


def test_the_matmul_of_which_mfu_is_a_share_multiplies_random_numbers():
    """A GPU takes less power for others, and runs faster."""
    seen = []
    measure_matmul_tflops(Backend(torch.device("cpu"), "cpu", "a CPU"), "fp32", (lambda out, *factors: seen.extend(factors),), seconds=0.01)
    assert all(len(x.unique()) > 0.9 * 2**19 for x in seen[:2]) and not torch.equal(*seen[:2])
