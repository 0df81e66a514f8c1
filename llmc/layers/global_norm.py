"""The gradient's global norm. Source: llm.c llmc/global_norm.cuh."""

import torch


def global_norm(out, grads, scratch, *, piece):
    """out (1,) fp32 = sqrt of the sum of squares of grads (n,).

    Each piece of `piece` elements gives one fp32 partial; the partials are summed in order in fp64. scratch: norm_partials
    (>= number of pieces,) fp32, and norm_work (>= piece,) fp32 unless grads are fp32.
    """
    partials = scratch["norm_partials"][: -(-len(grads) // piece)]
    for i, at in enumerate(range(0, len(grads), piece)):
        part = grads[at : at + piece]
        if part.dtype != torch.float32:
            part = scratch["norm_work"][: len(part)].copy_(part)
        torch.dot(part, part, out=partials[i])
    out.copy_(partials.double().sum().sqrt())
