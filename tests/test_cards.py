"""Budgets as people write them: a size is read to the byte, a card is found under its names, anything else is a sentence."""

import re
from fractions import Fraction

import pytest

from llmc.cards import ALIASES, CARDS, CONTEXT_MIB, PEAKS, Budget, Card, parse_budget
from llmc.errors import UserError
from llmc.mfu import promised_tflops
from llmc.units import MIB

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
every_unit = pytest.mark.parametrize("unit", UNITS)
every_card = pytest.mark.parametrize("name", CARDS)


# ----------------------------------------------------------------------------
# sizes


@every_unit
def test_a_size_is_its_number_times_its_unit(unit):
    for text in (f"24{unit}", f"24 {unit}", f" 24{unit} ", f"24{unit.lower()}", f"24{unit.upper()}", f"024{unit}", f"24.0{unit}"):
        budget = parse_budget(text)
        assert budget == Budget(24 * UNITS[unit], text.strip()) and budget.card is None


@every_unit
def test_decimals_are_exact_down_to_the_byte(unit):
    """2.03 kB is 2030 bytes, although the nearest float to 2.03 is below it; a part of a byte is left out."""
    for number in ("0.5", "1.25", "2.01", "2.03", "4.35", "32.3", "64.1", "79.6", "1023.999", "0.001", "1.1", "8.04"):
        assert parse_budget(number + unit).bytes == int(Fraction(number) * UNITS[unit]), number + unit


@every_unit
def test_every_hundredth_up_to_a_hundred_is_exact(unit):
    wrong = [n for n in range(1, 10000) if parse_budget(f"{n / 100:.2f}{unit}").bytes != n * UNITS[unit] // 100]
    assert not wrong, f"{len(wrong)} of 9999, such as {wrong[0] / 100:.2f}{unit}"


# ----------------------------------------------------------------------------
# cards


@every_card
def test_a_card_s_budget_is_its_memory_less_what_cuda_takes(name):
    card = CARDS[name]
    assert parse_budget(name) == Budget((card.memory_mib - CONTEXT_MIB) * MIB, name, card)
    assert 0 < card.budget_bytes < card.memory_mib * MIB


@every_card
def test_a_card_is_found_in_any_case_with_spaces_and_with_rtx_in_front(name):
    wanted = parse_budget(name)
    for text in (name.upper(), name.title(), name.replace("-", " "), f"  {name} ", f"rtx {name}", f"RTX {name.upper()}", f"rtx-{name}"):
        assert parse_budget(text) == wanted, text


@pytest.mark.parametrize("short, name", ALIASES.items())
def test_an_alias_is_the_card_it_stands_for(short, name):
    assert short not in CARDS
    for text in (short, short.upper(), f"RTX {short}"):
        assert parse_budget(text) == Budget(CARDS[name].budget_bytes, name, CARDS[name])


@pytest.mark.parametrize("text, name", [
    ("H100", "h100-80"), ("A100 40", "a100-40"), ("h100 pcie", "h100-pcie"), ("RTX 4090", "4090"), ("RTX A6000", "a6000"),
    ("RTX 6000 Ada", "6000-ada"), ("gh200", "gh200-96"), ("RTX 3060", "3060-12"), ("GH200 96", "gh200-96"),
])  # fmt: skip
def test_names_as_they_stand_on_the_box(text, name):
    assert parse_budget(text).name == name and parse_budget(text).card is CARDS[name]


@every_card
def test_every_card_s_numbers_are_sane(name):
    """Its peak is a row of the table of peaks that knows its speed; memory and bandwidth are those of a graphics card."""
    card = CARDS[name]
    bf16, fp32 = PEAKS[card.peak]
    assert fp32 and fp32 > 0 and (bf16 is None or bf16 > fp32)
    assert 8 * 1024 <= card.memory_mib <= 512 * 1024
    assert 100 <= card.bandwidth_gb_s <= 20000
    assert promised_tflops(f"NVIDIA {card.peak}", "fp32") == fp32


@pytest.mark.parametrize("name", [name for name in CARDS if re.search(r"-\d+$", name)])
def test_a_name_that_ends_in_a_size_has_that_much_memory(name):
    """h100-80 is an 80 GB card: marketing says GB, drivers report within a tenth of that many GiB."""
    size = int(name.rpartition("-")[2])
    assert 0.9 * size < CARDS[name].memory_mib / 1024 < 1.02 * size


def test_a_card_of_one_s_own_says_what_is_left():
    assert Card("H100", CONTEXT_MIB + 10, 1.0, 132, (9, 0)).budget_bytes == 10 * MIB


# ----------------------------------------------------------------------------
# anything else


def refused(text) -> str:
    with pytest.raises(UserError) as caught:
        parse_budget(text)
    return str(caught.value)


WRONG = (
    "24", "24G", "GiB", "1e3MiB", "24,5GiB", "1.GiB", ".5GiB", "24GiB extra", "24 GiB 3", "0GiB", "0.0MiB", "-5GiB", "- 5GiB", "+5GiB",
    "nanGiB", "infGiB", "", "rtx", "h-100", "h100-8O", "4091", "abacus", "24PiB", "h100-80,h200",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_a_sentence_that_names_it_and_what_is_expected(text):
    sentence = refused(text)
    assert sentence.startswith(f"--memory-budget {text}: expected a size such as 24GiB")
    assert "\n" not in sentence


@pytest.mark.parametrize("digits", [30, 400])
def test_a_size_beyond_every_machine_is_read_or_refused_but_never_a_crash(digits):
    """400 digits are more than a float can hold."""
    text = "9" * digits + "GiB"
    try:
        assert parse_budget(text).bytes == int("9" * digits) << 30
    except UserError as error:
        assert "--memory-budget" in str(error)


@pytest.mark.parametrize(
    "text, near", [("h100-8O", "h100-80"), ("a100-4O", "a100-40"), ("RTX 4091", "4090"), ("H2O0", "h200"), ("l40ss", "l40s")]
)
def test_near_names_are_offered(text, near):
    sentence = refused(text)
    meant, _, known = sentence.partition("did you mean ")[2].partition("? known cards: ")
    assert near in re.findall(r"[a-z0-9-]+", meant) and meant.count(" or ") <= 2 and known == ", ".join(CARDS)


def test_where_nothing_is_near_all_cards_are_listed():
    sentence = refused("zzzzzz")
    assert sentence.endswith("known cards: " + ", ".join(CARDS))
