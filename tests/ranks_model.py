"""Several ranks of a tiny model in processes of their own, over gloo: what each of them sees of a training run.

The processes stay, so that a case costs what its steps cost. The way collectives run can be chosen: as they come, or at the earliest
or the latest moment they may, and what nobody may count on can be overwritten with NaN at every turn. All must give the same bits.
"""

import faulthandler
import tempfile
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Pipe, wait

import forked
import numpy as np
import torch
import torch.distributed as dist

from llmc.config import ModelConfig
from llmc.distributed.gloo import register_gloo
from llmc.distributed.group import Done, Group
from llmc.distributed.sharing import Sharing
from llmc.distributed.tensor_parallel import Undivided
from llmc.distributed.world import World
from llmc.gpt2 import GPT2
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tables import PARAMETERS, parameter_shapes

MOST_RANKS = 4
LONGEST_S = 120
CONFIG = ModelConfig(max_seq_len=16, vocab_size=61, num_layers=3, num_heads=4, channels=64, padded_vocab_size=64)
SEQUENCES = 4  # of a micro-step, on all ranks


@dataclass(frozen=True, slots=True)
class Case:
    """A run: `options` with B of all ranks together, and how it goes.

    collectives  real: beside the computing. early: done when they are begun. late: done when they are waited for
    poisoned     NaN in all memory whose contents no stage may count on, whenever the model is between two of its methods
    skipped      steps without an update, as -sl and -sg make them
    """

    options: PlanOptions
    steps: int = 3
    accumulation: int = 1
    collectives: str = "real"
    poisoned: bool = False
    skipped: tuple[int, ...] = ()


def case(ranks=1, stage=0, *, kernels="torch", layers=3, level=1, config=CONFIG, forms=None, **run) -> Case:
    config = replace(config, num_layers=layers)
    options = PlanOptions(config, SEQUENCES, config.max_seq_len, kernels=kernels, recompute=level, sample_length=4, data_ranks=ranks,
                          zero_stage=stage, **(forms or {"precision": "fp32"}))  # fmt: skip
    return Case(options, **run)


# ----------------------------------------------------------------------------
# in a rank's process


class Early(Group):
    """Every collective is over when it is begun."""

    def _each(self, kind, collective, calls, tensors, passes=1):
        others = [part for t in tensors for part in without_own_share(t, self)] if kind == "reduce-scatter" else []
        super()._each(kind, collective, calls, tensors, passes).wait()
        for part in others:
            part.fill_(torch.nan)
        return Done()


class Late(Group):
    """Every collective begins when it is waited for; until then what it will write is NaN."""

    def _each(self, kind, collective, calls, tensors, passes=1):
        if kind == "all-gather":
            for (whole, share), t in zip(calls, tensors):
                for part in without_own_share(t, self) if share.data_ptr() == self.share(t).data_ptr() else (whole,):
                    part.fill_(torch.nan)
        return Waiting(lambda: super(Late, self)._each(kind, collective, calls, tensors, passes).wait())


class Waiting:
    def __init__(self, work):
        self.work = work

    def wait(self):
        work, self.work = self.work, None
        work()


GROUPS = {"real": Group, "early": Early, "late": Late}


def without_own_share(tensor, group):
    """What is before and behind this rank's share."""
    n = len(tensor) // group.size
    return tensor[: group.rank * n], tensor[(group.rank + 1) * n :]


class Forgetful(Sharing):
    """Weights that are not needed any more are NaN at once."""

    def release(self, key):
        super().release(key)
        if self.stage == 3:
            for tensor in self._weights[key]:
                tensor.fill_(torch.nan)


def poison(model, slots_too=False):
    """NaN (-1 in integers) into all of the activation arena but what survives micro-steps, and weights in their slots.

    slots_too  before the norm and the update, in which slots are not alive
    """
    sharing, kept = model.sharing, [model.acts["losses"]]
    if model.plan.options.reduces_always and "gradient_share" in model.acts:
        kept.append(model.acts["gradient_share"])
    if sharing.size > 1 and sharing.stage == 3 and not slots_too:
        assert not sharing._coming, "nothing is on its way between two stages"
        kept += [tensor for key in sharing._in_slot.values() for tensor in sharing._weights[key]]
    values = [tensor.clone() for tensor in kept]
    torch.empty(0, dtype=torch.uint8).set_(model.acts["losses"].untyped_storage()).fill_(0xFF)
    for tensor, value in zip(kept, values):
        tensor.copy_(value)


def train(case: Case, rank: int, process_group) -> dict:
    """What this rank sees: losses, norms and bytes sent of each step, evaluations and samples between them, the first gradient, and all
    arenas at the end."""
    o, accumulation = case.options, case.accumulation
    B = o.B // o.data_ranks
    plan = Plan(replace(o, B=B))
    group = GROUPS[case.collectives](rank, o.data_ranks, process_group)
    sharing = (Forgetful if case.poisoned else Sharing)(plan, group, Undivided(), group, World()) if o.data_ranks > 1 else None
    model = GPT2(plan, sharing=sharing)
    model.init_random()
    between = poison if case.poisoned else lambda *_, **__: None
    seen = {"losses": [], "norms": [], "evaluations": [], "logits": [], "sent": []}
    for step in range(case.steps):
        before = group.sent.copy()
        for micro_step in range(accumulation):
            inputs, targets = (tokens[rank * B : (rank + 1) * B] for tokens in batch(o, accumulation * step + micro_step))
            between(model)
            model.train(inputs, targets, accumulation, micro_step)
        between(model, slots_too=True)
        norm = model.grad_norm()
        seen["losses"].append(model.acts["loss_sum"].item() / model.tokens(accumulation))
        seen["norms"].append(norm.item())
        if step == 0:
            seen["gradient"] = model.sharing.gradients().float().numpy().copy()
        if step not in case.skipped:
            model.update(1e-2, 0.1, step + 1, seen["norms"][-1])
        seen["sent"].append(group.sent - before)
        between(model)
        seen["evaluations"].append(model.token_losses(*(tokens[:B] for tokens in batch(o, 1000))).numpy().copy())
        if step != 1:
            between(model)
            seen["logits"] += [model.next_logits(token, position) for position, token in enumerate((3, 1))]
    model.sharing.release_all()
    seen["flat"] = {name: raw(flat) for name, flat in model.flat.items() if name != "gradients"}
    seen["arenas"] = {name: flat.nbytes for name, flat in model.flat.items()} | {
        "activations": model.acts["losses"].untyped_storage().nbytes()
    }
    seen["planned"] = plan.arenas
    return seen


def batch(options, number):
    """(inputs, targets) of all ranks, int64 (B, T)."""
    tokens = np.random.default_rng(number).integers(0, options.config.vocab_size, (options.B, options.T + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def raw(tensor) -> np.ndarray:
    """Its bits, as integers of its size."""
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).numpy().copy()


# ----------------------------------------------------------------------------
# in the tests' process


def whole(parts, config) -> np.ndarray:
    """Flat shares of every rank, put together: of each layer of each tensor each rank has its part, in the order of ranks."""
    tensors, at, n = [], 0, len(parts)
    for p, shape in zip(PARAMETERS, parameter_shapes(config).values()):
        layers, size = shape[0] if p.per_layer else 1, int(np.prod(shape)) // n
        tensors.append(np.stack([part[at : at + size].reshape(layers, -1) for part in parts], axis=1).ravel())
        at += size
    assert all(len(part) == at for part in parts)
    return np.concatenate(tensors)


class Ranks:
    """MOST_RANKS processes that wait for work. One that fails ends them all; new ones come with the next work."""

    def __init__(self, serve=None):
        """serve(rank, store, pipe) is what a process does; None stands for the one below."""
        self.serve, self.processes, self.pipes = serve or globals()["serve"], [], []

    def run(self, *cases: Case) -> list:
        """For each case what each of its ranks saw."""
        if not self.processes:
            self._start()
        for rank, pipe in enumerate(self.pipes):
            pipe.send([case for case in cases])
        waiting, answers = dict(zip(self.pipes, range(MOST_RANKS))), {}
        while waiting:
            ready = wait(waiting, LONGEST_S)
            problem = "" if ready else f"ranks {sorted(waiting.values())} did not answer"
            for pipe in ready:
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = "its process ended"
                problem = f"rank {waiting[pipe]}: {answer}" if isinstance(answer, str) else problem
                answers[waiting.pop(pipe)] = answer
            if problem:
                self.stop()
                raise AssertionError(problem)
        return [[answers[rank][i] for rank in range(case.options.ranks)] for i, case in enumerate(cases)]

    def _start(self):
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(MOST_RANKS):
            ours, theirs = Pipe()
            self.processes.append(forked.started(self.serve, rank, f"{self.folder.name}/store", theirs))
            theirs.close()
            self.pipes.append(ours)

    def stop(self):
        for process, pipe in zip(self.processes, self.pipes):
            pipe.close()
            process.kill()
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.pipes = [], []


def serve(rank, store, pipe):
    meet(rank, store)
    groups = {n: dist.new_group(range(n)) for n in range(1, MOST_RANKS + 1)}
    answer(pipe, rank, lambda case: train(case, rank, groups[case.options.data_ranks]))


def meet(rank, store):
    """Become one of MOST_RANKS."""
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    store = dist.FileStore(store, MOST_RANKS)
    dist.init_process_group(register_gloo(), store=store, rank=rank, world_size=MOST_RANKS, timeout=timedelta(seconds=LONGEST_S))


def answer(pipe, rank, work):
    """Do `work` of each case that this rank takes part in, until nobody asks any more."""
    while True:
        try:
            cases = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send([work(case) if rank < case.options.ranks else None for case in cases])
        except Exception:
            pipe.send(traceback.format_exc())
