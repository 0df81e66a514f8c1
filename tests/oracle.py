"""GPT-2 from plain torch functions under autograd: what llmc's explicit forward and backward are judged by.

In float64 it is the truth. In fp32 or bf16 it is "eager torch", whose own error to float64 is the yardstick: ours may be twice that.
"""

from math import sqrt

import torch
import torch.nn.functional as F

from llmc.memory.tables import PARAMETERS

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


def copies(params, dtype):
    """Leaves for autograd: name -> tensor of `dtype`, same values."""
    return {name: p.detach().to(dtype).clone().requires_grad_() for name, p in params.items()}


def logits_of(params, inputs, config):
    """(B, T, V) in the parameters' type."""
    T = inputs.shape[1]
    x = F.embedding(inputs, params["wte"]) + params["wpe"][:T]
    for l in range(config.num_layers):
        p = {q.name: params[q.name][l] for q in PARAMETERS if q.per_layer}
        qkvr = F.linear(norm(x, p["ln1w"], p["ln1b"]), p["qkvw"], p["qkvb"])
        x = x + F.linear(attention(qkvr, config.num_heads), p["attprojw"], p["attprojb"])
        h = F.gelu(F.linear(norm(x, p["ln2w"], p["ln2b"]), p["fcw"], p["fcb"]), approximate="tanh")
        x = x + F.linear(h, p["fcprojw"], p["fcprojb"])
    return F.linear(norm(x, params["lnfw"], params["lnfb"]), params["wte"])[..., : config.vocab_size]


def norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, eps=1e-5)


def attention(qkvr, NH):
    """Causal attention over packed (B, T, 3C): torch's own kernel where it has one, the definition in float64."""
    B, T, C3 = qkvr.shape
    C = C3 // 3
    q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in qkvr.split(C, 2))
    if qkvr.dtype != torch.float64:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        scores = (q @ k.transpose(-1, -2)) / sqrt(C // NH)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).reshape(B, T, C)


def loss_and_gradients(params, inputs, targets, config, dtype):
    """Mean loss as a float, and name -> gradient, at `params` cast to `dtype`. The loss of bf16 logits is taken in fp32."""
    with torch.enable_grad():  # the program turns autograd off for its process
        leaves = copies(params, dtype)
        logits = logits_of(leaves, inputs, config)
        logits = logits.float() if dtype == torch.bfloat16 else logits
        loss = F.cross_entropy(logits.reshape(-1, config.vocab_size), targets.reshape(-1))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, gradients))


class Trainer:
    """The contract's update in `dtype`: clip to norm 1, AdamW with decay on the six matrices. Plain formulas, no torch.optim."""

    def __init__(self, params, config, dtype):
        self.params = {name: p.detach().to(dtype).clone() for name, p in params.items()}
        self.m = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.config, self.dtype, self.t = config, dtype, 0

    def step(self, inputs, targets, lr, weight_decay) -> tuple[float, float]:
        """(loss, gradient norm) before the update."""
        loss, gradients = loss_and_gradients(self.params, inputs, targets, self.config, self.dtype)
        total = sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        self.t += 1
        for p in PARAMETERS:
            decay = weight_decay if p.name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw") else 0.0
            g = gradients[p.name] / max(1.0, total)
            adamw(self.params[p.name], g, self.m[p.name], self.v[p.name], lr=lr, decay=decay, t=self.t)
        return loss, total


def adamw(p, g, m, v, *, lr, decay, t):
    """The contract's formula, in place, in the type of its tensors."""
    m.mul_(0.9).add_(0.1 * g)
    v.mul_(0.95).add_((1 - 0.95) * g * g)
    m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.95**t)
    p.sub_(lr * (m_hat / (v_hat.sqrt() + 1e-8) + decay * p))


def assert_as_good_as_eager(ours, eager, exact, *, floor=1.0, what="", largest=True):
    """The error of `ours` to `exact` (float64), in norm and the `largest`, is at most twice that of `eager` plus `floor` roundings.

    One rounding is half a unit in the last place of the largest value: what storing even a perfect result may cost.
    """
    assert ours.shape == exact.shape and eager.shape == exact.shape and ours.dtype == eager.dtype, what
    one = floor * UNIT_ROUNDOFF[ours.dtype] * exact.abs().max().item()
    errors = [(t.double() - exact).flatten() for t in (ours, eager)]
    for kind, scale, order in (("norm of the", sqrt(exact.numel()), 2), *([("largest", 1.0, torch.inf)] if largest else [])):
        mine, theirs = (torch.linalg.vector_norm(e, order).item() / scale for e in errors)
        assert mine <= 2 * theirs + one, f"{what}: {kind} error {mine:.3g}, eager torch {theirs:.3g}, floor {one:.3g}"  # false for nan
