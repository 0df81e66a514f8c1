"""One rank of several that train tiny models, case after case, and say what each step sent."""

import json
import pickle
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import sentinel

import numpy as np
import torch
import torch.distributed as dist

from llmc.distributed.gloo import register_gloo
from llmc.distributed.group import Done, Group, split_world
from llmc.distributed.sharing import Sharing
from llmc.distributed.tensor_parallel import Divided, Undivided
from llmc.distributed.world import World
from llmc.gpt2 import GPT2
from llmc.memory.plan import Plan

STEPS = 2  # the second must send what the first did


class Counting(Group):
    """Rank 0 of as many as one likes: it counts what it is asked to send, and sends nothing."""

    def __init__(self, size):
        super().__init__(0, size, sentinel.nobody)

    def _each(self, kind, collective, calls, tensors, passes=1):
        return super()._each(kind, lambda *_, **__: Done(), calls[:1], tensors, passes)


def main(words):
    """The rank, how many there are, a file that they meet at, and one of pickled (PlanOptions, micro-steps). Rank 0 prints a list of
    {among: {kind: bytes}} as JSON, after all ranks turned out to send the same."""
    rank, size, store, cases = int(words[0]), int(words[1]), *words[2:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group(register_gloo(), store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60))
    worlds = {parts: split_world(rank, size, parts, timeout_s=60) for parts in (1, 2, 4) if parts <= size}
    seen = [sent_by(o, micro_steps, *worlds[o.tensor_parallel]) for o, micro_steps in pickle.loads(Path(cases).read_bytes())]
    everybody = [None] * size
    dist.all_gather_object(everybody, seen)
    if rank == 0:
        assert all(one == seen for one in everybody)
        print(json.dumps(seen))
    dist.destroy_process_group()


def build(o, data, parts, everyone) -> GPT2:
    """The model of a rank of these groups."""
    plan = Plan(o)
    return GPT2(plan, sharing=Sharing(plan, data, Divided(parts) if parts.size > 1 else Undivided(), everyone, World()))


def sent_by(o, micro_steps, data, parts, everyone, computes=True) -> dict:
    """What a step of a rank sends in each of its groups: data, parts, all. With the model's operations left out it is the same."""
    named = {"data": data, "parts": parts} | ({} if everyone is data else {"all": everyone})
    model, steps = build(o, data, parts, everyone), []
    if computes:
        model.init_random()
    else:
        model.ops = SimpleNamespace(**dict.fromkeys(vars(model.ops), lambda *_, **__: None))
    for n in range(STEPS):
        before = {among: group.sent.copy() for among, group in named.items()}
        inputs, targets = np.random.default_rng(n).integers(0, o.config.vocab_size, (2, o.B, o.T))
        for micro_step in range(micro_steps):
            model.train(inputs, targets, micro_steps, micro_step)
        model.update(1e-3, 0.1, n + 1, model.grad_norm())
        steps.append({among: dict(group.sent - before[among]) for among, group in named.items()})
    model.sharing.release_all()
    assert all(one == steps[0] for one in steps)
    return steps[0]
