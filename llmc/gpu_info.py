"""The line that -lg prints: what the GPU is doing, from NVIDIA's management library. Source: llm.c llmc/mfu.h."""

from llmc.errors import UserError


def device_line(backend) -> str:
    """Load, clocks, power and temperature of a run's GPU, as llm.c prints them, without a newline.

    What a card does not have (a fan, on most in data centres: llm.c exits there) reads n/a. Raises UserError if the device is no GPU, or
    the library is absent or will not answer; call it once before training to learn that in time.
    """
    if backend.kind != "cuda":
        raise UserError(f"-lg asks a GPU for its state, and this run is on {backend.name}; leave -lg out, or use --device cuda")
    import torch

    return gpu_info_line(f"GPU-{torch.cuda.get_device_properties(backend.device).uuid}")


def gpu_info_line(uuid: str) -> str:
    """device_line of the GPU with that UUID ("GPU-..."): NVML's numbers are not CUDA's where CUDA_VISIBLE_DEVICES is set."""
    try:
        import pynvml as nvml
    except ImportError:
        raise UserError(
            "-lg needs nvidia-ml-py to ask the GPU, and it is not installed; pip install nvidia-ml-py, or leave -lg out"
        ) from None
    try:
        nvml.nvmlInit()  # counted by the library: only the first call costs anything
        return _line(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        raise UserError(f"-lg could not ask {uuid}: {error}; check that nvidia-smi works, or leave -lg out") from error


def _line(nvml, handle) -> str:
    unavailable = {
        nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION, nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }  # fmt: skip

    def ask(function, *arguments):
        try:
            return function(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value not in unavailable:
                raise
            return None

    load, memory = (
        _cell(_mean(ask(nvml.nvmlDeviceGetSamples, kind, 0)), "2.1f")
        for kind in (nvml.NVML_GPU_UTILIZATION_SAMPLES, nvml.NVML_MEMORY_UTILIZATION_SAMPLES)
    )
    fan = _cell(ask(nvml.nvmlDeviceGetFanSpeed), "2d")
    clock, max_clock = (
        _cell(ask(read, nvml.NVML_CLOCK_SM), "4d") for read in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
    )
    power, limit = (
        _cell(ask(read), "3d", per=1000) for read in (nvml.nvmlDeviceGetPowerUsage, nvml.nvmlDeviceGetPowerManagementLimit)
    )  # mW
    temperature = _cell(ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU), "d")
    slowdown = _cell(ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN), "d")
    reason = _throttle_reason(nvml, ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons))
    return (
        f"{'':18}compute {load}% | memory: {memory}% | fan: {fan}% | {clock} MHz / {max_clock} MHz | {power} W / {limit} W | "
        f"{temperature}°C / {slowdown}°C | {reason}"
    )


def _cell(value: float | None, form: str, per: int = 1) -> str:
    return "n/a" if value is None else format(value // per if per > 1 else value, form)


def _mean(samples) -> float | None:
    """Mean of the percentages the driver has recorded lately, about a hundred."""
    values = [sample.sampleValue.uiVal for sample in samples[1]] if samples else []
    return sum(values) / len(values) if values else None


def _throttle_reason(nvml, bits: int | None) -> str:
    """Why the clock is not higher, coarsely; power is named before heat."""
    if bits is None:
        return "n/a"
    if bits & (nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown):
        return "power cap"
    if bits & (nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown):
        return "thermal cap"
    return "other cap" if bits & nvml.nvmlClocksThrottleReasonAll else "no cap"
