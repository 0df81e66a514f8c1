"""LayerNorm in two stages, statistics and normalisation, so that recompute can run the second alone.

All arithmetic is fp32 on a few rows at a time, in scratch that fits a cache. Source: llm.c llmc/layernorm.cuh.
"""

import torch

EPSILON = 1e-5


def layernorm_statistics(mean, rstd, inp, scratch):
    """mean and 1/sqrt(variance + eps) over the channels.

    mean, rstd  (B, T)    fp32   written
    inp         (B, T, C)        read
    scratch     view norm_rows (3, rows, C) fp32
    """
    x, mean, rstd = _rows(inp), mean.view(-1), rstd.view(-1)
    for at, n, a, b, _ in _pieces(x, scratch):
        a.copy_(x[at : at + n])
        m, r = mean[at : at + n], rstd[at : at + n]
        torch.mean(a, 1, out=m)
        a.sub_(m[:, None])
        torch.mul(a, a, out=b)
        torch.mean(b, 1, out=r)
        r.add_(EPSILON).rsqrt_()


def layernorm_normalize(out, inp, mean, rstd, weight, bias, scratch):
    """out = (inp - mean) * rstd * weight + bias, from statistics at hand.

    out, inp (B, T, C)   mean, rstd (B, T) fp32   weight, bias (C,) as inp
    """
    o, x, mean, rstd = _rows(out), _rows(inp), mean.view(-1), rstd.view(-1)
    for at, n, a, _, _ in _pieces(x, scratch):
        _normalized(a, x, mean, rstd, at, n)
        a.mul_(weight).add_(bias)
        o[at : at + n].copy_(a)


def layernorm_backward(dresidual, dweight, dbias, dout, inp, weight, mean, rstd, scratch, *, accumulate):
    """Gradients of out = layernorm(inp).

    dresidual       (B, T, C)  accumulated (+=): the residual stream's gradient flows past the norm too
    dweight, dbias  (C,)       accumulated, or written when accumulate is False; summed in fp32, rounded once
    dout, inp       (B, T, C)  read
    scratch         views norm_rows (3, rows, C), norm_stats (2, rows) and norm_sums (3, C), fp32
    """
    dres, dy, x = _rows(dresidual), _rows(dout), _rows(inp)
    mean, rstd = mean.view(-1), rstd.view(-1)
    weight_sum, bias_sum, piece_sum = scratch["norm_sums"].zero_()
    for at, n, a, b, c in _pieces(x, scratch):
        _normalized(a, x, mean, rstd, at, n)
        b.copy_(dy[at : at + n])
        bias_sum.add_(torch.sum(b, 0, out=piece_sum))
        weight_sum.add_(torch.sum(torch.mul(a, b, out=c), 0, out=piece_sum))
        # dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) with g = dout * weight
        b.mul_(weight)
        g_mean, gx_mean = (s[:n] for s in scratch["norm_stats"])
        torch.mean(b, 1, out=g_mean)
        torch.mean(torch.mul(a, b, out=c), 1, out=gx_mean)
        a.mul_(gx_mean[:, None])
        b.sub_(g_mean[:, None]).sub_(a).mul_(rstd[at : at + n, None])
        c.copy_(dres[at : at + n])
        dres[at : at + n].copy_(c.add_(b))
    if accumulate:
        weight_sum.add_(dweight)
        bias_sum.add_(dbias)
    dweight.copy_(weight_sum)
    dbias.copy_(bias_sum)


def _normalized(a, x, mean, rstd, at, n):
    """a = (x - mean) * rstd for rows at..at+n, fp32."""
    a.copy_(x[at : at + n])
    a.sub_(mean[at : at + n, None]).mul_(rstd[at : at + n, None])


def _rows(tensor):
    return tensor.view(-1, tensor.shape[-1])


def _pieces(x, scratch):
    """(first row, rows, three fp32 working views) over all rows of x (n, C)."""
    size = scratch["norm_rows"].shape[1]
    for at in range(0, len(x), size):
        n = min(size, len(x) - at)
        yield (at, n, *(w[:n] for w in scratch["norm_rows"]))
