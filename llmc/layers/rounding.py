"""Stochastic rounding of fp32 to bf16, from integer arithmetic only: every device gives the same bits.

The noise is SquirrelNoise5 over a 2-D position (Squirrel Eiserloh, GDC 2017, and the version he published in 2021).
A value whose low 16 bits exceed the noise's low 16 rounds away from zero, else toward it. Source: llm.c cuda_utils.cuh.
"""

from functools import cache

import torch

PRIME_Y = 198491317  # a row's stride in the noise
NOISE = (0xD2A80A3F, 0xA884F197, 0x6C736F4B, 0xB79F3ABB, 0x1B56C4F5)  # uint32: what positions are multiplied by, and each round's number


def _int32(value: int) -> int:
    """A uint32 as the int32 of the same bits; torch's int32 arithmetic wraps, so the bits stay right."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


N1, N2, N3, N4, N5 = map(_int32, NOISE)
ROUNDS = ((9, torch.add, N2), (11, torch.mul, N3), (13, torch.add, N4), (15, torch.mul, N5), (17, None, 0))


@cache
def _rounds(device):
    """(shift, mask, operation, constant) of each round, with numbers as tensors: a Python int would be converted at every call."""

    def scalar(value):
        return torch.tensor(value, dtype=torch.int32, device=device)

    # torch's right shift is arithmetic; the mask clears the copies of the sign, so the shift is logical
    return [(scalar(shift), scalar((1 << (32 - shift)) - 1), operation, scalar(constant)) for shift, operation, constant in ROUNDS]


def noise_2d(out, work, x, y, seed):
    """out[..., i, j] = noise at position x[j] + PRIME_Y * y[..., i], seeded.

    out, work  (..., n, m) int32  written; work is scratch
    x          (m,) int32, y (..., n) int32; seed uint32
    """
    # position * N1 + seed, with N1 multiplied in before the two axes meet
    torch.add((y * _int32(PRIME_Y * N1) + _int32(seed)).unsqueeze(-1), x * N1, out=out)
    for shift, mask, operation, constant in _rounds(out.device):
        torch.bitwise_right_shift(out, shift, out=work)
        torch.bitwise_and(work, mask, out=work)
        torch.bitwise_xor(out, work, out=out)
        if operation:
            operation(out, constant, out=out)


def round_to_bf16(out, values, noise, work):
    """out = values, stochastically rounded.

    out     bf16, values fp32 contiguous, of the same shape; noise int32 from noise_2d, destroyed; work int32 contiguous
    Adding 0xFFFF - threshold carries into the upper half exactly when the lower half exceeds the threshold.
    """
    noise.bitwise_or_(-65536).bitwise_not_()  # 0xFFFF - threshold
    if values.device.type != "cpu":  # a GPU's NaN, 0x7FFFFFFF, would overflow to a zero; a CPU's would not
        noise.masked_fill_(values.isnan(), 0)
    torch.add(values.view(torch.int32), noise, out=work)
    out.view(torch.int16).copy_(work.bitwise_right_shift_(16))


def low_bits(out, values):
    """out (int16) = the lower halves of values (fp32): what a bf16 number lacks of them, however it was rounded."""
    out.copy_(values.view(torch.int32))


def join_bits(out, rounded, low, noise, work):
    """out (fp32) = the values that round_to_bf16 turned into `rounded` with the very same noise, and low_bits into `low`.

    rounded bf16, low int16; noise int32 as noise_2d made it, destroyed; work int32; all of one shape
    Rounding added a carry to the upper half exactly when low + 0xFFFF - threshold overflowed 16 bits: take it off again.
    """
    bits = out.view(torch.int32)
    work.copy_(low).bitwise_and_(0xFFFF)
    noise.bitwise_or_(-65536).bitwise_not_().add_(work).bitwise_right_shift_(16)  # the carry, 0 or 1
    bits.copy_(rounded.view(torch.int16)).sub_(noise).bitwise_left_shift_(16).bitwise_or_(work)
