"""What a command line asks of a GPU: whose kernels, whose attention, GELU in matmuls; honoured, said, or refused in a sentence."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import torch

import llmc.backend
import llmc.kernels
import llmc.processor
from llmc.cards import Device
from llmc.config import config_from_descriptor
from llmc.data.shards import write_shard
from llmc.distributed.world import World
from llmc.errors import NotEnoughMemory, UserError
from llmc.flags import parse
from llmc.memory.choose import choose_recompute, levels_of, ways_to_fit
from llmc.memory.plan import Plan
from llmc.plan_command import plan_text
from llmc.refusals import check_attention, check_gelu_fusion, check_sizes
from llmc.request import host_budget, plan_options, run_budget, settle_auto, settle_graphs, settle_kernels, shortest_shard
from llmc.source import Source, check_lengths, choose_precision
from llmc.units import MIB

D12 = config_from_descriptor("d12")


def asked(text=""):
    return parse(text.split())


def options(text="", precision="bf16", kind="cuda", config=D12):
    return plan_options(asked(text), config, precision, kind)


def cpuinfo(tmp_path, monkeypatch, vendor, flags, granted=True):
    """Say what processor this is, and whether Linux would grant the use of AMX."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: one\nflags\t\t: fpu {flags} sse\nbugs\t: none\n")
    monkeypatch.setattr(llmc.processor, "CPU_INFO", path)
    monkeypatch.setattr(llmc.processor, "linux_grants_amx", lambda: granted)


BULLDOZER, ZEN_3, ZEN_4 = ("AuthenticAMD", "avx"), ("AuthenticAMD", "avx2"), ("AuthenticAMD", "avx2 avx512f avx512_bf16")
SKYLAKE, COOPER_LAKE = ("GenuineIntel", "avx2 avx512f"), ("GenuineIntel", "avx512f avx512_bf16")
SAPPHIRE_RAPIDS = ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16 amx_bf16")
REFUSED = (*SAPPHIRE_RAPIDS, False)
WITHOUT_TILES = ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16")  # as virtual machines may show it


@pytest.mark.parametrize("processor, precision, kernels, taken", [
    (ZEN_4, "fp32", "numba", "numba"), (ZEN_4, "bf16", "numba", "numba"), (ZEN_4, "fp32", "torch", "native"),
    (ZEN_4, "bf16", "torch", "native"), (ZEN_3, "fp32", "numba", "numba"), (ZEN_3, "bf16", "numba", "numba"),
    (ZEN_3, "bf16", "torch", "widened"), (BULLDOZER, "fp32", "numba", "native"), (BULLDOZER, "bf16", "numba", "widened"),
    (SKYLAKE, "fp32", "numba", "native"), (SKYLAKE, "bf16", "torch", "widened"), (SAPPHIRE_RAPIDS, "fp32", "numba", "native"),
    (SAPPHIRE_RAPIDS, "bf16", "numba", "numba"), (SAPPHIRE_RAPIDS, "bf16", "torch", "native"), (REFUSED, "bf16", "torch", "widened"),
    (COOPER_LAKE, "bf16", "numba", "native"), (COOPER_LAKE, "bf16", "torch", "native"),
    (WITHOUT_TILES, "fp32", "numba", "native"), (WITHOUT_TILES, "bf16", "numba", "numba"), (WITHOUT_TILES, "bf16", "torch", "widened"),
])  # fmt: skip
def test_a_cpu_s_matmuls_are_whose_are_fastest_on_its_processor(monkeypatch, tmp_path, processor, precision, kernels, taken):
    """numba's only where its other kernels run too; and never on a GPU."""
    cpuinfo(tmp_path, monkeypatch, *processor)
    assert options(f"--kernels {kernels}", precision, "cpu").matmul == taken
    assert options("", precision, "cuda").matmul == "native"


@pytest.mark.parametrize("processor, multiplied", [
    (ZEN_4, "bf16"), (COOPER_LAKE, "bf16"), (SAPPHIRE_RAPIDS, "bf16"), (REFUSED, "fp32"), (ZEN_3, "fp32"),
    (SKYLAKE, "fp32"), (WITHOUT_TILES, "fp32"),
])  # fmt: skip
def test_numba_s_kernels_multiply_pairs_of_bf16_where_that_is_faster_than_fp32(monkeypatch, tmp_path, processor, multiplied):
    """And the peak that MFU is relative to is that of what is multiplied."""
    cpuinfo(tmp_path, monkeypatch, *processor)
    o = options("--kernels numba --matmul numba", "bf16", "cpu")
    assert (o.factors, o.multiplied_in) == (multiplied, multiplied)
    assert options("--kernels numba", "fp32", "cpu").factors == "fp32"
    assert options("", "bf16", "cuda").multiplied_in == "bf16"


@pytest.mark.parametrize("processor, rounds", [(ZEN_4, True), (SAPPHIRE_RAPIDS, True), (ZEN_3, False), (WITHOUT_TILES, False)])
def test_fp32_matmuls_are_of_bf16_products_only_where_those_are_faster(monkeypatch, tmp_path, processor, rounds):
    cpuinfo(tmp_path, monkeypatch, *processor)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with llmc.backend.bf16_products(True):
        assert matmul.fp32_precision == ("bf16" if rounds else before)
    assert matmul.fp32_precision == before != "bf16"


@pytest.mark.parametrize("processor", [ZEN_3, ZEN_4, SAPPHIRE_RAPIDS, WITHOUT_TILES])
@pytest.mark.parametrize("precision, words, taken", [
    ("bf16", "--matmul widened", "widened"), ("bf16", "--matmul native", "native"), ("fp32", "--matmul native", "native"),
    ("fp32", "--matmul numba --kernels numba", "numba"), ("bf16", "--matmul numba --kernels numba", "numba"),
])  # fmt: skip
def test_a_cpu_s_matmuls_are_those_that_are_asked_for(monkeypatch, tmp_path, processor, precision, words, taken):
    cpuinfo(tmp_path, monkeypatch, *processor)
    assert options(words, precision, "cpu").matmul == taken


def test_a_machine_that_says_nothing_of_its_processor_multiplies_by_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(llmc.processor, "CPU_INFO", tmp_path / "nothing")
    assert [options("--kernels numba", precision, "cpu").matmul for precision in ("fp32", "bf16")] == ["native", "widened"]


def on_arm(tmp_path, monkeypatch, *cores, features="fp asimd aes crc32 atomics asimddp ssbs"):
    """Say what cores this machine has, as Linux writes it on Arm: each one's (implementer, part)."""
    core = "processor\t: {}\nBogoMIPS\t: 50.00\nFeatures\t: {}\nCPU implementer\t: {}\nCPU architecture: 8\nCPU part\t: {}\n\n"
    path = tmp_path / "cpuinfo"
    path.write_text("".join(core.format(number, features, *one) for number, one in enumerate(cores)))
    monkeypatch.setattr(llmc.processor, "CPU_INFO", path)


@pytest.mark.parametrize("features, precision, matmul", [
    ("fp asimd aes crc32 atomics asimddp ssbs", "fp32", "widened"),  # Neoverse-N1 of Graviton 2
    ("fp asimd sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng", "bf16", "native"),  # Neoverse-V1 of Graviton 3
])  # fmt: skip
def test_arm_trains_in_bf16_where_it_multiplies_that(monkeypatch, tmp_path, features, precision, matmul):
    on_arm(tmp_path, monkeypatch, ("0x41", "0xd40"), features=features)
    assert llmc.processor.likely_precision("auto", "cpu") == precision
    for kernels in ("numba", "torch"):
        assert options(f"--kernels {kernels}", "fp32", "cpu").matmul == "native"
        assert options(f"--kernels {kernels}", "bf16", "cpu").matmul == matmul


@pytest.mark.parametrize("cores, name", [
    ([("0x41", "0xd0c")] * 4, "Arm Neoverse-N1"), ([("0x41", "0xd4f")], "Arm Neoverse-V2"),
    ([("0x41", "0xd87")] * 2 + [("0x41", "0xd85")] * 2, "Arm Cortex-A725 and Arm Cortex-X925"),  # of a DGX Spark
    ([("0x61", "0xd0c")], "CPU"), ([("0x41", "0xfff")], "CPU"),  # another maker's; one that came later
    ([("0x41", "0xd0c"), ("0x61", "0xd0c")], "CPU"), ([("0x41", "0xd0c"), ("0x41", "0xfff")], "CPU"),
])  # fmt: skip
def test_arm_s_processors_have_names(monkeypatch, tmp_path, cores, name):
    on_arm(tmp_path, monkeypatch, *cores)
    assert llmc.processor.cpu_name().rpartition(", ")[0] == name


def test_numba_s_matmuls_need_its_kernels():
    for precision in ("fp32", "bf16"):
        with pytest.raises(
            UserError, match="^--matmul numba goes with --kernels numba, and this run has --kernels torch; leave one of them out$"
        ):
            options("--matmul numba --kernels torch", precision, "cpu")


@pytest.mark.parametrize("way", ["native", "numba", "widened"])
def test_what_a_cpu_multiplies_is_nothing_that_a_gpu_can_be_asked_for(way):
    with pytest.raises(UserError, match=f"^--matmul {way} is a CPU's, and this run is on a GPU; leave it out$"):
        options(f"--matmul {way}")


@pytest.fixture
def triton(monkeypatch):
    """Say whether triton is installed."""

    def installed(yes, launches=""):
        monkeypatch.setattr(llmc.kernels, "find_spec", lambda name: object() if yes else None)
        monkeypatch.setattr(llmc.kernels, "launch_problem", lambda: launches)

    installed(True)
    return installed


def test_bf16_on_a_gpu_without_it_is_refused_with_advice_for_who_asked_and_for_who_has_a_file_of_it(monkeypatch):
    def chosen(flags, of_file=None, resume_step=None, capability=(7, 0), master=True):
        monkeypatch.setattr("llmc.checkpoint.state_file.has_master", lambda path: master)
        return choose_precision(asked(flags), Source(None, "m.bin", of_file, resume_step), Device("cuda", "V100", capability))

    assert [chosen("", of_file) for of_file in (None, "fp32")] == ["fp32", "fp32"]
    assert chosen("--precision fp32", "bf16", resume_step=4) == "fp32"
    with pytest.raises(UserError, match="^--precision bf16: V100 has no bf16 arithmetic .*; use --precision fp32$"):
        chosen("--precision bf16")
    with pytest.raises(UserError, match="^m.bin holds bf16 weights, and V100 has no bf16 arithmetic .*; start from an fp32 file$"):
        chosen("", "bf16")
    with pytest.raises(UserError, match="^m.bin holds .*; use --precision fp32, which goes on from the checkpoint's fp32 master weights$"):
        chosen("", "bf16", resume_step=4)
    with pytest.raises(UserError, match="^m.bin holds bf16 weights, .*; go on with --device cpu, or on a card that has$"):
        chosen("", "bf16", resume_step=4, master=False)
    with pytest.raises(UserError, match="^--precision bf16: V100 has no bf16 arithmetic .*; use --precision fp32$"):
        chosen("--precision bf16", "fp32", resume_step=4)
    for capability in ((8, 0), None):
        assert [chosen("", of_file, capability=capability) for of_file in (None, "fp32", "bf16")] == ["bf16", "fp32", "bf16"]


def settled(flags, *capability, numba=""):
    """What a run decides on a card; on a CPU without one, where `numba` speaks against numba."""
    kind = "cuda" if capability else "cpu"
    return settle_kernels(asked(flags), kind, llmc.kernels.why_no_kernels(capability) if capability else numba)


@pytest.mark.parametrize("capability, flags, kernels", [
    ((), "", "numba"), ((), "--kernels numba", "numba"), ((), "--kernels torch", "torch"), ((9, 0), "", "triton"), ((8, 0), "", "triton"),
    ((9, 0), "--kernels triton", "triton"), ((9, 0), "--kernels torch", "torch"), ((7, 5), "--kernels torch", "torch"),
])  # fmt: skip
def test_kernels_are_the_device_s_own_unless_torch_is_asked_for(triton, capability, flags, kernels):
    settings, notes = settled(flags, *capability)
    assert settings.kernels == kernels and notes == []


def test_a_cpu_without_numba_trains_with_torch_and_says_so_but_not_if_numba_was_asked_for():
    why = "numba is not installed (pip install numba)"
    settings, notes = settled("", numba=why)
    assert settings.kernels == "torch" and notes == [f"note: torch's operators run, not numba's faster kernels: {why}"]
    assert settled("--kernels torch", numba=why)[1] == []
    with pytest.raises(UserError, match="--kernels numba: numba is not installed .*; leave it out"):
        settled("--kernels numba", numba=why)


@pytest.mark.parametrize("flags, capability, sentence", [
    ("--attention triton", (7, 5), "--attention triton needs Triton's kernels, and they need a card of SM80 or later; leave it out"),
    ("--kernels triton", (), "--kernels triton: they are for a GPU, and this run is on a CPU; leave it out"),
    ("--kernels numba", (9, 0), "--kernels numba: they are for a CPU, and this run is on a GPU; leave it out"),
])  # fmt: skip
def test_the_other_device_s_kernels_are_refused(triton, flags, capability, sentence):
    with pytest.raises(UserError) as refusal:
        settled(flags, *capability)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("flags, kind, graphs", [
    ("", "cuda", True), ("--cuda-graph 1", "cuda", True), ("--cuda-graph 0", "cuda", False),
    ("--kernels torch", "cuda", False), ("--offload-residual", "cuda", False), ("--cuda-graph 0 --offload-residual", "cuda", False),
    ("--offload-optimizer", "cuda", True),
    ("-ge 2", "cuda", True), ("--attention cudnn", "cuda", True), ("--kernels numba", "cpu", True), ("--kernels torch", "cpu", False),
    ("--kernels numba --cuda-graph 0", "cpu", False), ("--kernels numba --matmul numba --cuda-graph 1", "cpu", True),
    ("--kernels numba --matmul widened", "cpu", False), ("--kernels numba --matmul native --grad-dtype fp32", "cpu", False),
    ("--kernels numba --matmul numba --grad-dtype fp32", "cpu", True),
])  # fmt: skip
def test_steps_are_graphs_wherever_they_can_be(monkeypatch, tmp_path, flags, kind, graphs):
    cpuinfo(tmp_path, monkeypatch, *ZEN_4)  # where nothing needs to be widened unless it is asked for
    assert settle_graphs(asked(flags), options(flags, kind=kind)) == graphs


@pytest.mark.parametrize("flags, kind, sentence", [
    ("--kernels torch", "cpu", "--cuda-graph 1: torch's operators ask the host for numbers in the middle of a step; use --kernels numba"),
    ("--kernels numba --matmul widened", "cpu",
     "--cuda-graph 1: torch's matmuls of widened factors take their precision from the host; use --matmul numba, or leave"),
    ("--kernels torch", "cuda", "--cuda-graph 1: torch's operators ask the host for numbers in the middle of a step; use --kernels triton"),
    ("--offload-residual", "cuda", "--cuda-graph 1: --offload-residual copies on a stream of its own, which is not captured"),
])  # fmt: skip
def test_graphs_that_cannot_be_are_refused_if_asked_for(flags, kind, sentence):
    with pytest.raises(UserError) as refusal:
        settle_graphs(asked(flags + " --cuda-graph 1"), options(flags, kind=kind))
    assert str(refusal.value).startswith(sentence)


def test_what_several_processes_tell_each_other_is_in_no_graph():
    for processes, flags in ((1, ""), (2, ""), (2, "--tensor-parallel 2")):
        o = plan_options(asked(flags), D12, "bf16", "cuda", World(num_processes=processes))
        assert settle_graphs(asked(flags), o) == (processes == 1)
    with pytest.raises(UserError, match="^--cuda-graph 1: what several processes tell each other is not captured; use one process"):
        settle_graphs(asked("--cuda-graph 1"), o)


@pytest.mark.parametrize("capability, installed, launches, why", [
    ((9, 0), False, "", "triton is not installed (pip install triton)"),
    ((7, 5), True, "", "they need a card of SM80 or later"),
    ((9, 0), True, "they cannot be launched here: Failed to find C compiler.", "they cannot be launched here: Failed to find C compiler."),
])  # fmt: skip
def test_a_card_without_triton_trains_with_torch_and_says_so_but_not_if_triton_was_asked_for(triton, capability, installed, launches, why):
    triton(installed, launches)
    settings, notes = settled("", *capability)
    assert settings.kernels == "torch" and notes == [f"note: torch's operators run, not Triton's faster kernels: {why}"]
    with pytest.raises(UserError, match="--kernels triton: .*leave it out") as refusal:
        settled("--kernels triton", *capability)
    assert why in str(refusal.value)


def test_a_launch_that_fails_is_a_reason_in_one_line(monkeypatch):
    """Here there is no card, which is reason enough."""
    assert torch.cuda.is_available() or llmc.kernels.launch_problem().startswith("they cannot be launched here: ")
    assert "\n" not in llmc.kernels.launch_problem()


@pytest.mark.parametrize("flags, sentence", [
    ("--device cpu --kernels triton", "--kernels triton: they are for a GPU, and this run is on a CPU"),
    ("--memory-budget t4 --precision fp32 --kernels triton", "--kernels triton: they need a card of SM80 or later"),
    ("--device cuda --precision fp32 --attention flash", "--attention flash has no fp32 form"),
    ("--memory-budget h100-80 --precision bf16 -ge 3 --matmul fp8", "--matmul fp8 -ge 3: GELU joins matmuls of bf16"),
    ("-e no.bin -i no.bin", "-e no.bin: no such file; train from random weights with -e d12"),  # a plan needs no data
])  # fmt: skip
def test_a_plan_refuses_what_a_run_would(flags, sentence):
    with pytest.raises(UserError) as refusal:
        plan_text(asked("-e d12 -b 4 --plan " + flags))
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize("flags, sentence", [
    ("-e d48 --ranks 1024 -z 3", "-z 3 shares every tensor out over 1024 processes, which do not divide C = 1600"),
    *((f"-e d48 --ranks {2 * n} --tensor-parallel 2 -z 1",
       f"-z 1 shares every tensor out over {n} processes, which do not divide both C / 2 = 800 and the 832 channels of a part's heads")
      for n in (5, 13)),  # each divides one of the two
    ("-e d48 --ranks 1024 --tensor-parallel 32", "--tensor-parallel 32 is more than there are heads, 25"),
    ("-e d12 --ranks 10 --tensor-parallel 4", "--tensor-parallel 4 does not divide the 10 processes of this run"),
    ("-e gpt3:c2048 --ranks 1024 -z 1 --tensor-parallel 16 -d 4096", "-d 4096 is not a multiple of B*T*groups = 4*1024*64"),
])  # fmt: skip
def test_ranks_that_could_not_run_are_not_planned_for_either(flags, sentence):
    with pytest.raises(UserError) as refusal:
        plan_text(asked("--plan --memory-budget h100-80 " + flags))
    assert str(refusal.value).startswith(sentence)


def test_a_plan_for_a_card_too_old_for_triton_is_that_of_torch_s_operators():
    text = plan_text(asked("-e d12 -b 4 --plan --memory-budget t4"))
    assert "torch's operators run, not Triton's faster kernels: they need a card of SM80" in text
    assert text.partition("\n")[2] == plan_text(asked("-e d12 -b 4 --plan --memory-budget t4 --kernels torch"))


@pytest.mark.parametrize("fusion, bits", [(0, "the same bits"), (2, "the same bits but for GELU's last"), (3, "the same bits")])
def test_levels_of_every_kind_of_gelu_are_proposed_with_what_becomes_of_its_bits(fusion, bits):
    o = options(f"-ge {fusion} -b 64 -r 0")
    ways = [way for way in ways_to_fit(o, Plan(replace(o, recompute=3)).total_bytes, 64, count=9) if "-r 3" in way.flags]
    assert ways and all(f"{bits};" in f"{way.price};" for way in ways)


def test_levels_that_do_not_go_with_offloaded_residuals_are_neither_taken_nor_proposed():
    o = options("--offload-residual -b 64 -r 0")
    assert levels_of(o) == (0, 1, 2, 3, 4, 5)
    budget = Plan(replace(o, recompute=5)).total_bytes - 1
    with pytest.raises(NotEnoughMemory, match="no recompute level fits .*: -r 5 still needs"):
        choose_recompute(o, budget)
    ways = ways_to_fit(o, budget, 64, count=9)
    assert ways and not any("-r 6" in way.flags for way in ways)


def test_levels_that_do_not_keep_what_is_gathered_are_neither_taken_nor_proposed():
    flags = "--tensor-parallel 2 --tp-recompute-allgather 0 --kernels numba -b 64 -t 256"
    o = plan_options(asked(f"{flags} -r auto"), D12, "bf16", "cpu", World(num_processes=2, num_local=2))
    assert o.keeps_all_rows and levels_of(o) == (0, 1)
    budget = Plan(replace(o, recompute=1)).total_bytes - 1
    with pytest.raises(NotEnoughMemory, match="no recompute level fits .*: -r 1 still needs"):
        choose_recompute(o, budget)
    ways = ways_to_fit(o, budget, 64, count=9)
    assert ways
    for way in ways:  # each can be asked for
        plan_options(asked(f"{flags} {way.flags}"), D12, "bf16", "cpu", World(num_processes=2, num_local=2))


def test_the_plan_is_of_the_kernels_that_will_run(triton):
    """What --plan assumes of a card is what a run on it decides; the torch form needs other working room."""
    settings, _ = settled("", 9, 0)
    decided = plan_options(settings, D12, "bf16", "cuda")
    assert decided.fused and Plan(decided).arenas == Plan(options()).arenas
    assert not options("--kernels torch").fused and not options(kind="cpu").fused
    assert Plan(options("--kernels torch")).tensors.keys() != Plan(options()).tensors.keys()


@pytest.mark.parametrize("precision, flags, kind", [
    ("bf16", "", "triton"), ("bf16", "--kernels torch", "flash"), ("fp32", "", "efficient"), ("bf16", "--attention cudnn", "cudnn"),
    ("bf16", "--attention efficient", "efficient"), ("fp32", "--attention efficient", "efficient"),
    ("bf16", "--attention triton", "triton"),
])  # fmt: skip
def test_attention_is_the_one_asked_for_and_by_default_one_that_repeats_its_bits(precision, flags, kind):
    o = options(flags, precision)
    check_attention(o)
    assert o.attention == kind


@pytest.mark.parametrize("head_size, kind", [(8, "triton"), (128, "triton"), (136, "flash"), (256, "flash")])
def test_attention_is_this_project_s_up_to_the_largest_heads_it_takes(head_size, kind):
    o = options(config=replace(D12, channels=2 * head_size, num_heads=2))
    check_attention(o)
    assert o.attention == kind


@pytest.mark.parametrize("precision, flags, head_size, sentence", [
    ("fp32", "--attention flash", 64, "--attention flash has no fp32 form; leave it out, or train in bf16"),
    ("fp32", "--attention cudnn", 64, "--attention cudnn has no fp32 form"),
    ("fp32", "--attention triton", 64, "--attention triton has no fp32 form"),
    ("bf16", "--attention flash", 36,
     "heads of size 36: flash attention takes multiples of 8 up to 256 in bf16; use --attention triton or efficient"),
    ("bf16", "", 264, "heads of size 264: flash attention takes multiples of 8 up to 256 in bf16; use --attention efficient"),
    ("bf16", "--attention triton", 136, "heads of size 136: triton attention takes sizes up to 128 in bf16; use --attention flash"),
    ("bf16", "--attention triton --kernels torch", 64, "--attention triton goes with --kernels triton, and this run has --kernels torch"),
    ("bf16", "--attention cudnn", 136, "heads of size 136: cudnn attention takes multiples of 8 up to 128 in bf16; use --attention flash"),
    ("bf16", "-t 2796203", 128, "-t 2796203: triton attention finds a sequence's numbers by 32 bits, and queries, keys and values of a "
     "layer are 2147483904; use --attention flash, or a smaller -t"),
    ("bf16", "-t 99999999", 20, "-t 99999999: triton attention finds a sequence's numbers by 32 bits, and queries, keys and values of a "
     "layer are 11999999880; use --attention efficient, or a smaller -t"),
])  # fmt: skip
def test_attention_that_does_not_take_the_model_is_refused_with_what_to_do(precision, flags, head_size, sentence):
    config = replace(D12, channels=2 * head_size, num_heads=2)
    with pytest.raises(UserError) as refusal:
        check_attention(options(flags, precision, config=config))
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize("T, taken", [(860370, True), (860371, False)])
def test_triton_s_attention_counts_the_numbers_of_a_rank_s_part_padding_included(T, taken):
    """A half of d48's 25 heads of 64 is 13: 832 channels."""
    o = replace(options(f"-t {T}", config=replace(D12, channels=1600, num_heads=25)), tensor_parallel=2, data_ranks=1)
    with nullcontext() if taken else pytest.raises(UserError, match="queries, keys and values of a layer are 2147486016; use --attention"):
        check_attention(o)


def test_a_sequence_of_which_triton_s_attention_counts_every_number_is_taken():
    check_attention(options("-t 2796202", config=replace(D12, channels=256, num_heads=2)))


def test_gelu_fusion_without_the_library_is_refused(monkeypatch):
    import llmc.kernels.cublaslt as cublaslt

    monkeypatch.setattr(cublaslt, "why_no_cublaslt", lambda: "libcublasLt was not found")
    check_gelu_fusion(options())  # -ge 0 asks for nothing
    with pytest.raises(UserError, match="-ge 1: libcublasLt was not found; use -ge 0, which computes the same function"):
        check_gelu_fusion(options("-ge 1"))
    monkeypatch.setattr(cublaslt, "why_no_cublaslt", lambda: "")
    check_gelu_fusion(options("-ge 2 -r 1"))


def test_gelu_fusion_of_sizes_that_it_cannot_have_is_refused_by_plans_too(monkeypatch):
    check_sizes(options("-ge 2 -r 1"))
    with pytest.raises(UserError, match="-ge 1: cuBLASLt fuses GELU into matmuls of widths that 8 divides, and C is 36; use -ge 0"):
        check_sizes(options("-ge 1", config=replace(D12, channels=36, num_heads=2)))
    narrow = replace(D12, channels=40, num_heads=2)
    check_sizes(options("-ge 2 -b 1 -t 6", config=narrow))
    check_sizes(options("-ge 3 -b 2 -t 6", "fp32", config=narrow))
    refusal = "-ge 3 promises .* must take a multiple of 256 bytes, and they take 1920; use a -b or -t with more factors of"
    with pytest.raises(UserError, match=refusal):
        check_sizes(options("-ge 3 -b 1 -t 6", config=narrow))
    monkeypatch.setattr("llmc.source.config_from_descriptor", lambda name: narrow)
    assert plan_text(asked("--plan -e d12 -b 2 -t 6 -ge 3 --precision fp32 --device cuda"))
    with pytest.raises(UserError, match=refusal):
        plan_text(asked("--plan -e d12 -b 1 -t 6 -ge 3 --device cuda"))


# ----------------------------------------------------------------------------
# what a plan must fit in, and what auto may choose


FOUR = World(num_local=4)  # of a machine; of one process, so nobody has to be asked


@pytest.mark.parametrize("kind, wish, world, mib", [
    ("cpu", "", World(), 1000), ("cpu", "", FOUR, 250), ("cuda", "", FOUR, 1000), ("cpu", "8GiB", World(), 1000),
    ("cpu", "8GiB", FOUR, 250), ("cuda", "400MiB", World(), 400), ("cpu", "400MiB", FOUR, 250),
])  # fmt: skip
def test_a_budget_is_never_more_than_is_free_for_each_process(kind, wish, world, mib):
    backend = SimpleNamespace(kind=kind, name="a device", free_bytes=lambda: 1000 * MIB)
    assert run_budget(asked(f"--memory-budget {wish}" if wish else ""), backend, world).bytes == mib * MIB


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr("llmc.request.available_host_bytes", lambda: 1000 * MIB)
    assert (host_budget(World()), host_budget(FOUR)) == (1000 * MIB, 250 * MIB)


@pytest.fixture
def shards(tmp_path):
    """-i of two shards, the shorter one of 65 tokens, -j of one of 33."""
    for name, n_tokens in (("train_1", 1000), ("train_2", 65), ("val", 33)):
        write_shard(tmp_path / f"{name}.bin", np.zeros(n_tokens, np.uint16))
    return f"-i {tmp_path}/train_*.bin -j {tmp_path}/val.bin -t 32 -b auto"


@pytest.mark.parametrize("flags, inputs", [("-v 0", 64), ("-v 1", 32), ("-v 0 -a 1", 32)])
def test_the_shortest_shard_of_what_a_run_reads_counts(shards, flags, inputs):
    assert shortest_shard(asked(f"{shards} {flags}")) == inputs


@pytest.mark.parametrize("flags, processes, B", [("-v 0", 1, 2), ("-v 1", 1, 1), ("-v 0", 2, 1), ("-v 0 --tensor-parallel 2", 2, 2)])
def test_auto_takes_no_more_sequences_than_every_shard_has_for_all_ranks(shards, flags, processes, B):
    s, world = asked(f"{shards} {flags} --kernels numba"), World(num_processes=processes)
    budget = run_budget(s, SimpleNamespace(kind="cpu", name="a CPU", free_bytes=lambda: 1 << 40), World())
    chosen, _ = settle_auto(s, Source(D12), plan_options(s, D12, "bf16", "cpu", world), budget, world, lambda: shortest_shard(s))
    assert chosen.batch_size == B


def test_a_step_s_sequences_are_counted_for_each_rank():
    s = asked("-b 4 -t 64 -d 512")
    assert [plan_options(s, D12, "bf16", "cuda", World(num_processes=n)).step_sequences for n in (1, 2)] == [8, 4]


def test_a_sample_is_as_long_as_the_model_at_most_but_no_matter_where_none_is_printed():
    check_lengths(asked("-s 0 -g 4096"), D12)
    check_lengths(asked("-s 1 -g 1024"), D12)
    with pytest.raises(UserError, match="^-g 1025: the model knows 1024 positions"):
        check_lengths(asked("-s 1 -g 1025"), D12)
