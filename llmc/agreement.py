"""What all ranks of a run must have in common, before they train."""

from dataclasses import asdict

from llmc import __version__
from llmc.distributed.world import World, different_from_first, smallest
from llmc.errors import RankLost, UserError
from llmc.flags import FLAGS, Settings
from llmc.source import Source, sizes_in_words

# flags that every process may say in its own way; on all others ranks must agree
OWN_FLAGS = {
    "device", "threads", "process_rank", "num_processes", "gpus_per_node", "init_method", "server_ip", "fs_path",
    "timeout", "train_data", "val_data", "model", "output_dir", "hellaswag_data", "tokenizer",
}  # fmt: skip


def check_agreement(s: Settings, source: Source, precision: str, world: World):
    """Raise UserError where this rank was started with other flags than rank 0, RankLost where ranks found different checkpoints.

    A checkpoint may have been completed in the meantime, or not be seen on another machine yet, so that is worth another try.
    """
    facts = {name: value for name, value in asdict(s).items() if name not in OWN_FLAGS}
    facts |= {
        "version": __version__, "precision": precision, "model": sizes_in_words(source.config),
        "output_dir": "a folder" if s.output_dir else "empty",
    }  # fmt: skip
    for name, theirs in different_from_first(world, facts, "flags").items():
        title = next((flag.title for flag in FLAGS if flag.field == name), f"--{name}, of which rank 0's program knows,")
        mine = facts.get(name, "unknown")
        raise UserError(f"{title} is {mine} on rank {world.rank} and {theirs} on rank 0; start all ranks with the same program and flags")
    step = -1 if source.resume_step is None else source.resume_step
    first, last = smallest(world, step), -smallest(world, -step)
    if first != last:
        found = "no checkpoint" if first < 0 else f"the checkpoint of step {first}"
        raise RankLost(
            f"-y 1: some ranks found {found} in -o, others that of step {last}; give all of them the same folder, and start them again",
            said_elsewhere=world.rank > 0,
        )


def check_inputs(facts: dict, world: World):
    """Raise UserError where this rank read, or chose, something else than rank 0: title -> what it was, as text or a number."""
    for title, theirs in different_from_first(world, facts, "inputs").items():
        raise UserError(
            f"{title}: rank {world.rank} has {facts.get(title)}, and rank 0 has {theirs}; give all ranks the same files and the same kind "
            "of machine, or name with flags what they chose"
        )
