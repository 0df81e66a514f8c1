"""The -lg line, from a stand-in for NVIDIA's library."""

import sys
from types import SimpleNamespace

import pytest

from llmc.errors import UserError
from llmc.gpu_info import gpu_info_line

NOT_SUPPORTED, NO_DRIVER = 3, 9


class FakeError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


def fake(answers):
    """A pynvml whose functions return `answers`; an exception among them is raised."""

    def answer(name):
        def call(*arguments):
            given = answers[name]
            if isinstance(given, Exception):
                raise given
            return given(*arguments) if callable(given) else given

        return call

    def samples(handle, kind, since):
        return 1, [SimpleNamespace(sampleValue=SimpleNamespace(uiVal=value)) for value in answers["samples"][kind]]

    return SimpleNamespace(
        NVMLError=FakeError, NVML_ERROR_NOT_SUPPORTED=NOT_SUPPORTED, NVML_ERROR_NOT_FOUND=6, NVML_ERROR_NO_PERMISSION=4,
        NVML_ERROR_FUNCTION_NOT_FOUND=13, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN=1,
        NVML_GPU_UTILIZATION_SAMPLES="gpu", NVML_MEMORY_UTILIZATION_SAMPLES="memory",
        nvmlClocksThrottleReasonSwPowerCap=0x4, nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20, nvmlClocksThrottleReasonHwThermalSlowdown=0x40, nvmlClocksThrottleReasonAll=0x1FF,
        nvmlDeviceGetSamples=samples, **{name: answer(name) for name in answers if name != "samples"},
    )  # fmt: skip


BUSY = {
    "samples": {"gpu": [98, 99, 100], "memory": [40, 41]},
    "nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle", "nvmlDeviceGetFanSpeed": 7,
    "nvmlDeviceGetClockInfo": 990, "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetPowerUsage": 699_999,
    "nvmlDeviceGetPowerManagementLimit": 700_000, "nvmlDeviceGetTemperature": 65, "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
}  # fmt: skip


@pytest.fixture
def ask(monkeypatch):
    def line(**changes):
        monkeypatch.setitem(sys.modules, "pynvml", fake({**BUSY, **changes}))
        return gpu_info_line("GPU-12ab")

    return line


def test_the_line_is_llmc_s(ask):
    assert ask() == (
        "                  compute 99.0% | memory: 40.5% | fan:  7% |  990 MHz / 1980 MHz | 699 W / 700 W | 65°C / 87°C | power cap"
    )


@pytest.mark.parametrize(
    "bits,reason",
    [(0, "no cap"), (0x1, "other cap"), (0x20, "thermal cap"), (0x40, "thermal cap"), (0x84, "power cap"), (0x24, "power cap")],
)
def test_power_is_named_before_heat_before_the_rest(ask, bits, reason):
    assert ask(nvmlDeviceGetCurrentClocksThrottleReasons=bits).endswith(f"| {reason}")


def test_what_the_card_does_not_have_is_said_and_the_rest_printed(ask):
    absent = FakeError(NOT_SUPPORTED)
    line = ask(nvmlDeviceGetFanSpeed=absent, nvmlDeviceGetTemperatureThreshold=absent, samples={"gpu": [], "memory": [5]})
    assert line.split() == (
        "compute n/a% | memory: 5.0% | fan: n/a% | 990 MHz / 1980 MHz | 699 W / 700 W | 65°C / n/a°C | power cap".split()
    )
    assert ask(nvmlDeviceGetCurrentClocksThrottleReasons=absent).endswith("| n/a")


@pytest.mark.parametrize("where", ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage"))
def test_a_failing_driver_stops_with_a_sentence(ask, where):
    with pytest.raises(UserError, match="-lg could not ask GPU-12ab: error 9; check that nvidia-smi works"):
        ask(**{where: FakeError(NO_DRIVER)})


def test_an_absent_library_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="pip install nvidia-ml-py"):
        gpu_info_line("GPU-12ab")
