"""The baseline of bench.py: GPT-2 as a PyTorch user writes it, with autograd and torch's own fused operations."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.NH, C // self.NH).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """A GPT-2 with the same sizes, padded vocabulary and tied head as ours."""

    def __init__(self, config):
        super().__init__()
        C = config.channels
        self.wte, self.wpe = nn.Embedding(config.padded_vocab_size, C), nn.Embedding(config.max_seq_len, C)
        self.blocks = nn.ModuleList(Block(C, config.num_heads) for _ in range(config.num_layers))
        self.lnf, self.head = nn.LayerNorm(C), nn.Linear(C, config.padded_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class PyTorchTrainer:
    """One training step: forward, backward, clipping, fused AdamW. bf16 runs under autocast, with fp32 weights, as is usual.

    compiled      run the model under torch.compile, in the mode "default", or "reduce-overhead", which captures CUDA graphs
    bf16_weights  weights, gradients and optimizer state in bf16, without autocast: faster and smaller, but less accurate
    """

    def __init__(self, config, precision, device, *, compiled=False, mode="default", bf16_weights=False):
        with torch.enable_grad():
            self.model = PlainGPT2(config).to(device, torch.bfloat16 if bf16_weights else torch.float32)
        self.forward = torch.compile(self.model, mode=mode) if compiled else self.model
        self.captured = compiled and mode == "reduce-overhead"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16" and not bf16_weights)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(self, inputs, targets) -> float:
        if self.captured:  # only then, as the call imports the compiler, whose memory is not an eager step's
            torch.compiler.cudagraph_mark_step_begin()  # what a graph of the last step returned is not read again
        with torch.enable_grad():
            self.optimizer.zero_grad(set_to_none=True)
            with self.autocast:
                loss = self.forward(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()
