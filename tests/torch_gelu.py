"""What llmc.kernels.cublaslt's MatmulGelu does, by torch, for models and measurements on a CPU."""

import torch
import torch.nn.functional as F


class TorchGelu:
    """GELU, both ways, takes sums that are not rounded yet; what is kept for backward is."""

    def __init__(self, workspace, *, tf32=False):
        pass

    def forward(self, gelu_out, pre, inp, weight, bias):
        sums = inp.float() @ weight.float().t() + bias.float()
        pre.copy_(sums)
        gelu_out.copy_(F.gelu(sums, approximate="tanh"))

    def backward(self, dpre, dout, weight, pre, dbias=None):
        gradient = torch.ops.aten.gelu_backward(dout.float() @ weight.float(), pre.float(), approximate="tanh")
        dpre.copy_(gradient)
        if dbias is not None:
            dbias.copy_(gradient.flatten(0, -2).sum(0))
