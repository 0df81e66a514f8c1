"""Token and position embeddings. Source: llm.c llmc/encoder.cuh."""

import torch

from llmc.backend import deterministic
from llmc.layers.rounding import noise_2d, round_to_bf16
from llmc.layers.rows import add_widened


def encoder_forward(out, inputs, wte, wpe):
    """out[b, t] = wte[inputs[b, t]] + wpe[t].

    out      (B, T, C)   as wte   written
    inputs   (B, T)      int64    token ids in [0, Vp)
    wte      (Vp, C), wpe (maxT, C) with maxT >= T
    """
    B, T, C = out.shape
    torch.index_select(wte, 0, inputs.view(-1), out=out.view(B * T, C))
    out.add_(wpe[:T])


def encoder_backward(dwte, dwpe, dout, inputs, order, scratch, *, seed, accumulate):
    """dwte[inputs[b, t]] += dout[b, t]; dwpe[t] += sum over b.

    dwte     (Vp, C)   accumulated always: the classifier's gradient is already in it
    dwpe     (maxT, C) accumulated, or written (rows beyond T with zeros) when accumulate is False
    dout     (B, T, C) read
    inputs   (B, T)    int64
    order    TokenOrder of inputs: which positions hold the same token
    scratch  views encoder_sums; for bf16 dout encoder_rows; for bf16 gradients encoder_gathered, noise, noise_work

    Rows are added one after the other in fp32, for dwte in order of position and for dwpe in order of b: the same bits every time
    and everywhere. Where gradients are bf16, the rows of one token are summed first and added to the gradient with one stochastic
    rounding, seeded by `seed` (uint32): adding a frequent token's rows one by one in bf16 would lose most of them.
    """
    B, T, C = dout.shape
    rows = dout if dout.dtype == torch.float32 else scratch["encoder_rows"].copy_(dout)
    if not accumulate:
        dwpe.zero_()
    sums = scratch["encoder_sums"].view(-1, C)
    position_sums = sums[:T].zero_()
    for b in range(B):
        position_sums.add_(rows[b])
    if dwte.dtype == torch.float32:
        with deterministic(dwte.device):
            dwte.index_add_(0, inputs.view(-1), rows.view(-1, C))
        dwpe[:T].add_(position_sums)
        return
    positions = torch.arange(T, device=dout.device)
    _add_rows(dwpe, positions, position_sums, scratch, seed=seed, first_noise_row=dwte.shape[0])
    tokens = torch.from_numpy(order.tokens).to(dout.device, torch.int64)
    slot = torch.searchsorted(tokens, inputs.view(-1))
    token_sums = sums[: len(tokens)].zero_()
    with deterministic(dwte.device):
        token_sums.index_add_(0, slot, rows.view(-1, C))
    _add_rows(dwte, tokens, token_sums, scratch, seed=seed, first_noise_row=0)


def _add_rows(grad, index, sums, scratch, *, seed, first_noise_row):
    """grad[index] = stochastic rounding of grad[index] + sums; `sums` (n, C) fp32 is destroyed."""
    n, C = sums.shape
    gathered = scratch["encoder_gathered"].view(-1, C)[:n]
    torch.index_select(grad, 0, index, out=gathered)
    piece = max(1, scratch["noise"].numel() // C)
    columns = torch.arange(C, dtype=torch.int32, device=grad.device)
    for at in range(0, n, piece):
        m = min(piece, n - at)
        noise, work = (scratch[k][: m * C].view(m, C) for k in ("noise", "noise_work"))
        add_widened(sums[at : at + m], gathered[at : at + m], work.view(torch.float32))
        noise_2d(noise, work, columns, index[at : at + m].to(torch.int32) + first_noise_row, seed)
        round_to_bf16(gathered[at : at + m], sums[at : at + m], noise, work)
    grad.index_copy_(0, index, gathered)
