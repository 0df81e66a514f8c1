"""Ranks of a tiny model that tensor parallelism splits, in processes that stay, over gloo: what each of them sees of a training run."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from ranks_model import MOST_RANKS, answer, meet, raw

from llmc.config import ModelConfig
from llmc.distributed.group import Group, split_world
from llmc.distributed.sharing import Sharing
from llmc.distributed.tensor_parallel import Divided, Undivided
from llmc.distributed.world import World
from llmc.gpt2 import GPT2
from llmc.memory.layout import flat_layout, runs
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import num_parameters

SEQUENCES = 4  # of a micro-step, on all ranks
# heads of 9 channels; the last part of the vocabulary ends in 3 rows of padding, whether of 2 or of 4
CONFIG = ModelConfig(max_seq_len=23, vocab_size=61, num_layers=3, num_heads=4, channels=36, padded_vocab_size=64)
T = 20
SAMPLED = 16, 15, 31, 32  # the first and the last tokens of parts, whether of 2 or of 4


@dataclass(frozen=True, slots=True)
class Case:
    """A run: `options` with B of all ranks together, and how it goes.

    nudged    a seed: every weight starts one unit in the last place higher or lower; 0 leaves them
    poisoned  the stream's room is NaN whenever nothing may count on what it holds
    instead   a function of case, rank and world_of to call instead of train
    """

    options: PlanOptions
    steps: int = 3
    accumulation: int = 1
    nudged: int = 0
    poisoned: bool = False
    instead: object = None


def case(ranks=1, parts=1, stage=0, *, config=CONFIG, level=1, B=SEQUENCES, precision="fp32", forms=None, keep=False, **run) -> Case:
    """Of so many ranks that form models of so many parts. Logits come in chunks of 24 rows, the last of a batch is smaller."""
    o = PlanOptions(
        config, B, T, precision=precision, recompute=level, data_ranks=ranks // parts, zero_stage=stage, tensor_parallel=parts,
        keep_gathered=keep, head_chunk=24, kernels="numba", sample_length=4, **(forms or {}),
    )  # fmt: skip
    return Case(o, **run)


def batch(options, number):
    """(inputs, targets) of all ranks, int64 (B, T); one of five, which can be learnt."""
    tokens = np.random.default_rng(number % 5).integers(0, options.config.vocab_size, (options.B, options.T + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


# ----------------------------------------------------------------------------
# in a rank's process


def build(case: Case, rank: int, world_of) -> GPT2:
    """This rank's model, its weights drawn, with noise in biases and layernorms too."""
    o = replace(case.options, B=case.options.B // case.options.data_ranks)
    plan, sharing = Plan(o), None
    if o.ranks > 1:
        group, parts, whole = world_of(o.ranks, o.tensor_parallel)
        sharing = Sharing(plan, group, Divided(parts) if o.tensor_parallel > 1 else Undivided(), whole, World())
    model = GPT2(plan, sharing=sharing)
    model.init_random()
    noise = np.random.default_rng(9).standard_normal(num_parameters(o.config)).astype(np.float32) * 0.05
    nudge = np.random.default_rng(case.nudged).choice(np.float32([-np.inf, np.inf]), len(noise))
    end = o.config.vocab_size * o.config.channels, o.config.padded_vocab_size * o.config.channels
    for begin, in_file, n in runs(model.layout_of("parameters")):
        weights = model.flat["parameters"][begin : begin + n]
        real = np.arange(in_file, in_file + n)
        values = weights.float().numpy() + np.where((real < end[0]) | (real >= end[1]), noise[in_file : in_file + n], 0)
        weights.copy_(torch.from_numpy(np.nextafter(values, nudge[in_file : in_file + n]) if case.nudged else values))
    model.copy_weights_to_master()
    return model


def forget_streams(model):
    """From now on the room that is gathered in is NaN after every pass, but while the one after next may read it once more."""
    division, stream = model.division, model.acts["stream"]

    def wrapped(work):
        def then_forget(*args, **kwargs):
            work(*args, **kwargs)
            if work.__name__ not in ("_fcproj_dinput", "_gelu_backward", "_gelu_backward_and_again") or division._holds is None:
                stream.fill_(torch.nan)
                division._holds = None

        return then_forget

    model.forward_passes, model.backward_passes = ([*map(wrapped, p)] for p in (model.forward_passes, model.backward_passes))
    model._fcproj, model._head_backward, model._forward = map(wrapped, (model._fcproj, model._head_backward, model._forward))


def train(case: Case, rank: int, world_of) -> dict:
    """What this rank sees: of every step loss and norm, its first gradient, evaluation losses and logits at the end, and all it holds."""
    model, accumulation = build(case, rank, world_of), case.accumulation
    seen = {"losses": [], "norms": []}
    if case.poisoned:
        forget_streams(model)
    for step in range(case.steps):
        for micro_step in range(accumulation):
            model.train(*own(case, rank, accumulation * step + micro_step), accumulation, micro_step)
        norm = model.grad_norm()
        seen["losses"].append(model.acts["loss_sum"].item() / model.tokens(accumulation))
        seen["norms"].append(norm.item())
        if step == 0:
            seen["gradient"] = model.sharing.gradients().float().numpy().copy()
        model.update(1e-3, 0.1, step + 1, norm)
    model.sharing.release_all()
    seen["evaluation"] = model.token_losses(*own(case, rank, 1000)).numpy().copy()
    seen["logits"] = np.stack([model.next_logits(token, position) for position, token in enumerate(SAMPLED)])
    model.sharing.release_all()
    seen["flat"] = {name: raw(flat) for name, flat in model.flat.items() if name != "gradients"}
    seen["arenas"] = {name: flat.nbytes for name, flat in model.flat.items()}
    seen["arenas"]["activations"] = model.acts["losses"].untyped_storage().nbytes()
    return seen


def own(case, rank, number):
    """This rank's sequences of a batch."""
    o = case.options
    B, first = o.B // o.data_ranks, rank // o.tensor_parallel
    return (tokens[first * B : (first + 1) * B] for tokens in batch(o, number))


# ----------------------------------------------------------------------------
# in the tests' process


def whole(case: Case, seen: list[dict], what="parameters") -> np.ndarray:
    """Bits of an arena of all ranks as one file has them. What several ranks have must be the same bits."""
    o, out, written = case.options, None, np.zeros(num_parameters(case.options.config), bool)
    for rank, mine in enumerate(seen):
        copy, part = divmod(rank, o.tensor_parallel)
        if what == "gradient":
            flat, ranks = mine["gradient"].view(np.int32), o.data_ranks if o.shares else 1
        else:
            flat, ranks = mine["flat"][what], o.ranks_of(what)
        out, padding = np.zeros(len(written), flat.dtype) if out is None else out, np.ones(len(flat), bool)
        for begin, in_file, n in runs(flat_layout(o.config, ranks, copy % ranks, o.tensor_parallel, part)):
            there, here = slice(in_file, in_file + n), flat[begin : begin + n]
            assert (out[there] == here)[written[there]].all(), f"{what} of rank {rank} at {in_file} differs from that of ranks before"
            out[there], written[there], padding[begin : begin + n] = here, True, False
        assert not flat[padding].any(), f"padded heads of rank {rank} have {what}"
    assert written.all()
    return out


def serve(rank, store, pipe):
    meet(rank, store)
    pair = dist.new_group([0, 1])
    worlds = {(MOST_RANKS, parts): split_world(rank, MOST_RANKS, parts, timeout_s=60) for parts in (1, 2, 4)}
    if rank < 2:
        alone, both = Group(0, 1), Group(rank, 2, pair)
        worlds |= {(2, 1): (both, alone, both), (2, 2): (alone, both, both)}
    answer(pipe, rank, lambda case: (case.instead or train)(case, rank, lambda size, parts: worlds[size, parts]))
