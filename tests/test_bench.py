"""scripts/bench.py: PyTorch's side of the comparison makes the same steps, and says so when it cannot be compiled."""

from argparse import Namespace

import pytest
import torch

from llmc.backend import open_backend
from llmc.config import ModelConfig
from llmc.errors import UserError
from scripts import bench
from scripts.bench_pytorch import PyTorchTrainer
from scripts.gpu_common import random_tokens

CONFIG = ModelConfig(max_seq_len=16, vocab_size=64, padded_vocab_size=64, num_layers=2, num_heads=2, channels=32)
ARGS = Namespace(model="tiny", batch_size=2, sequence_length=16, recompute=0, kernels="torch", matmul="native", compile=False)


def side_by_side():
    """Our trainer, and PyTorch's with our weights."""
    backend = open_backend("cpu", 0, True, "native")
    ours, theirs = bench.OurTrainer(ARGS, CONFIG, "fp32", backend), PyTorchTrainer(CONFIG, "fp32", backend.device)
    places = dict(theirs.model.named_parameters())
    for name, weight in ours.model.params.items():
        module, kind = (name, "weight") if name in ("wte", "wpe") else (name[:-1], {"w": "weight", "b": "bias"}[name[-1]])
        if f"{module}.{kind}" in places:
            places.pop(f"{module}.{kind}").data.copy_(weight)
        else:
            for l, weight_of_layer in enumerate(weight):
                places.pop(f"blocks.{l}.{module}.{kind}").data.copy_(weight_of_layer)
    assert not places, f"nothing of ours was copied into {list(places)}"
    return ours, theirs


def test_both_sides_make_the_same_steps():
    ours, theirs = side_by_side()
    tokens = random_tokens(CONFIG, ARGS.batch_size, ARGS.sequence_length)
    losses = [(ours.step(*tokens), theirs.step(*torch.from_numpy(tokens))) for _ in range(5)]
    assert losses[4][0] < losses[0][0] - 0.01, "five steps should learn something, else this test compares nothing but forward passes"
    for mine, their in losses:
        assert mine == pytest.approx(their, abs=2e-5)


def test_a_model_file_is_refused_as_what_it_is_not():
    with pytest.raises(UserError, match="^-e gpt2_124M.bin: both sides start from random weights of a size, not from a file"):
        bench.config_of(Namespace(**{**vars(ARGS), "model": "gpt2_124M.bin"}))


def test_a_machine_that_cannot_compile_is_told_in_one_sentence(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    def fails(model, mode):
        def forward(inputs, targets):
            raise TorchDynamoException("InvalidCxxCompiler: No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1 for more")

        return forward

    monkeypatch.setattr(torch, "compile", fails)
    args, backend = Namespace(**{**vars(ARGS), "compile": True}), open_backend("cpu", 0, True, "native")
    with pytest.raises(UserError, match=r"^torch.compile cannot compile here: .*No working C\+\+ compiler found; mend that, or"):
        bench.pytorch_trainer(args, CONFIG, "fp32", backend, torch.from_numpy(random_tokens(CONFIG, 2, 16)))
