"""Write llm.c's debug state of a model: what its C tests (test_gpt2, test_gpt2cu) compare their results with.

    python scripts/write_debug_state.py gpt2_124M.bin dev/data/tinyshakespeare/tiny_shakespeare_val.bin gpt2_124M_debug_state.bin

One forward and backward pass in fp32 over the first B*T+1 tokens of the shard.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script  # first, as it says what is not installed

import numpy as np
import torch

from llmc.checkpoint.debug_state import write_debug_state
from llmc.checkpoint.model_file import open_weights, read_model_header
from llmc.checkpoint.snapshot import load_weights
from llmc.config import ModelConfig
from llmc.data.shards import count_tokens, open_shard
from llmc.gpt2 import GPT2
from llmc.layers.matmul import matmul_forward
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan


def load_fp32_model(path, B: int, T: int) -> GPT2:
    """The model at `path`, planned for this batch, on the CPU. Raises UserError for a damaged or bf16 file, or a T beyond its positions."""
    config, precision = read_model_header(path)
    if precision != "fp32":
        raise UserError(
            f"{path} is a {precision} model; expected fp32, as the gradients to compare with are, so pass the fp32 .bin of this model"
        )
    if T > config.max_seq_len:
        raise UserError(f"-t {T} is longer than {path} knows positions for; expected at most {config.max_seq_len}")
    model = GPT2(Plan(PlanOptions(config, B, T, precision, device="cpu")))
    load_weights(open_weights(path, precision), model)
    return model


def first_batch(path, B: int, T: int, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (B, T) int64 from the start of a shard. Raises UserError if it is too short or of another vocabulary."""
    num_tokens = count_tokens(path)
    if num_tokens < B * T + 1:
        raise UserError(
            f"{path} has {num_tokens} tokens; expected at least B * T + 1 = {B * T + 1}, so choose another shard or a smaller -b or -t"
        )
    with open_shard(path) as shard:
        tokens = shard.read(0, B * T + 1).astype(np.int64)
    if tokens.max() >= config.vocab_size:
        raise UserError(
            f"{path} has a token {tokens.max()}; expected tokens below the model's vocabulary of {config.vocab_size}, "
            "so choose another shard"
        )
    return tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)


@torch.no_grad()
def run_step(model: GPT2, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """(logits (B, T, V) fp32, mean loss, gradients by name) of one step."""
    model.forward(inputs)
    lnf, wte = model.acts["lnf"], model.params["wte"]
    # all rows at once, outside the plan: training never holds them all, but the file does
    logits = torch.empty(*lnf.shape[:2], len(wte))
    matmul_forward(logits, lnf, wte)
    model.backward(targets)
    gradients = {name: gradient.numpy() for name, gradient in model.grads.items()}
    return logits[..., : model.config.vocab_size].numpy(), model.mean_loss(), gradients


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write one step's inputs, logits, loss and gradients in llm.c's debug state format.")
    parser.add_argument("model", help="fp32 model .bin")
    parser.add_argument("tokens", help="token shard .bin")
    parser.add_argument("output", help="the file to write; llm.c's tests read gpt2_124M_debug_state.bin")
    parser.add_argument("-b", type=int, default=4, help="sequences B [%(default)s]")
    parser.add_argument("-t", type=int, default=64, help="tokens T of each [%(default)s]")
    args = parser.parse_args(argv)
    if min(args.b, args.t) < 1:
        raise UserError(f"-b {args.b} -t {args.t}: expected positive numbers")
    model = load_fp32_model(args.model, args.b, args.t)
    inputs, targets = first_batch(args.tokens, args.b, args.t, model.config)
    logits, loss, gradients = run_step(model, inputs, targets)
    write_debug_state(args.output, inputs, targets, logits, loss, gradients)
    print(f"wrote {args.output}: B {args.b}, T {args.t}, loss {loss:.6f}")


if __name__ == "__main__":
    run_script(main)
