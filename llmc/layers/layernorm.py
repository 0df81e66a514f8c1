"""LayerNorm, alone and in one pass with the addition to the residual stream before it.

Its statistics are kept, so that recompute can normalise again without computing them again. All arithmetic is fp32.
Source: llm.c llmc/layernorm.cuh; Ba, Kiros and Hinton 2016.
"""

import torch

from llmc.layers.rows import finish_column_sums, row_pieces, rows_of

EPSILON = 1e-5


def layernorm_forward(out, mean, rstd, inp, weight, bias, scratch):
    """mean and rstd = 1/sqrt(variance + eps) over the channels, and out = (inp - mean) * rstd * weight + bias.

    out, inp      (B, T, C)        written, read
    mean, rstd    (B, T)     fp32  written
    weight, bias  (C,)             as inp
    scratch       view rows (4, rows, C) fp32
    """
    x, flat_mean, flat_rstd = rows_of(inp), mean.view(-1), rstd.view(-1)
    for part, a, b, *_ in row_pieces(x, scratch):
        a.copy_(x[part])
        m, r = flat_mean[part], flat_rstd[part]
        torch.mean(a, 1, out=m)
        a.sub_(m[:, None])
        torch.mul(a, a, out=b)
        torch.mean(b, 1, out=r)
        r.add_(EPSILON).rsqrt_()
    layernorm_normalize(out, inp, mean, rstd, weight, bias, scratch)


def residual_layernorm_forward(residual_out, out, mean, rstd, residual, weight, bias, scratch):
    """residual_out += residual, and the layernorm of that sum after it is rounded.

    residual_out  (B, T, C)  read and written: one summand, then the sum
    residual      (B, T, C)  read     the rest as in layernorm_forward
    """
    residual_out.add_(residual)
    layernorm_forward(out, mean, rstd, residual_out, weight, bias, scratch)


def layernorm_normalize(out, inp, mean, rstd, weight, bias, scratch):
    """out = (inp - mean) * rstd * weight + bias, from statistics computed before; arguments as in layernorm_forward."""
    o, x, mean, rstd = rows_of(out), rows_of(inp), mean.view(-1), rstd.view(-1)
    for part, a, *_ in row_pieces(x, scratch):
        _normalized(a, x[part], mean[part], rstd[part])
        a.mul_(weight).add_(bias)
        o[part].copy_(a)


def layernorm_backward(dresidual, dweight, dbias, dproj_bias, dout, inp, weight, mean, rstd, scratch, *, accumulate):
    """Gradients of out = layernorm(inp).

    dresidual       (B, T, C)  accumulated (+=): the residual stream's gradient flows past the norm too
    dweight, dbias  (C,)       accumulated, or written when accumulate is False; summed in fp32, rounded once
    dproj_bias      (C,)       likewise; the sum over rows of the new dresidual, which is the gradient of the bias of the projection
                               that was added to the stream before this norm; or None where there was none
    dout, inp       (B, T, C)  read
    scratch         views rows (4, rows, C), row_stats (2, rows) and column_sums (2, >=2C), fp32
    """
    dres, dy, x = rows_of(dresidual), rows_of(dout), rows_of(inp)
    mean, rstd, C = mean.view(-1), rstd.view(-1), x.shape[1]
    weight_sum, bias_sum, proj_sum, piece_sum = scratch["column_sums"].view(-1)[: 4 * C].zero_().view(4, C)
    for part, a, b, c, _ in row_pieces(x, scratch):
        _normalized(a, x[part], mean[part], rstd[part])
        b.copy_(dy[part])
        bias_sum.add_(torch.sum(b, 0, out=piece_sum))
        weight_sum.add_(torch.sum(torch.mul(a, b, out=c), 0, out=piece_sum))
        # dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) with g = dout * weight
        b.mul_(weight)
        g_mean, gx_mean = (s[: len(a)] for s in scratch["row_stats"])
        torch.mean(b, 1, out=g_mean)
        torch.mean(torch.mul(a, b, out=c), 1, out=gx_mean)
        a.mul_(gx_mean[:, None])
        b.sub_(g_mean[:, None]).sub_(a).mul_(rstd[part][:, None])
        c.copy_(dres[part])
        dres[part].copy_(c.add_(b))
        if dproj_bias is not None:
            proj_sum.add_(torch.sum(c, 0, out=piece_sum))
    finish_column_sums(dweight, weight_sum, accumulate)
    finish_column_sums(dbias, bias_sum, accumulate)
    if dproj_bias is not None:
        finish_column_sums(dproj_bias, proj_sum, accumulate)


def _normalized(out, x, mean, rstd):
    """out (n, C) = (x - mean) * rstd, fp32."""
    out.copy_(x).sub_(mean[:, None]).mul_(rstd[:, None])
