"""Where a run's weights come from: random ones of a size, a model file, or a checkpoint; and what follows from that for its flags.

Errors are UserError, one sentence each.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from llmc.cards import AMPERE, Device
from llmc.checkpoint.extra_file import read_number
from llmc.checkpoint.model_file import read_model_header
from llmc.checkpoint.store import extra_path, find_last_step, model_path, state_path
from llmc.config import ModelConfig, config_from_descriptor
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.flags import BY_NAME, Settings
from llmc.processor import likely_precision


@dataclass(frozen=True, slots=True)
class Source:
    """Where a run's weights come from."""

    config: ModelConfig
    file: str | os.PathLike | None = None  # none: random weights
    precision: str | None = None  # the file's
    resume_step: int | None = None  # of the checkpoint that the file is of, where the run goes on


def find_source(s: Settings) -> tuple[Settings, Source]:
    """Find the model of a run, and refuse flags that do not go with it. Where that is a checkpoint to resume from, the settings have its
    seed. Raises UserError."""
    source = choose_model(s)
    check_precision(s, source)
    check_lengths(s, source.config)
    return settle_seed(s, source), source


def look_only(s: Settings) -> Settings:
    """-x 0 -y 1 looks at the newest checkpoint in -o: as if -e named its model, and there were no -o to write to. The settings for that;
    others stay as they are. Raises UserError where there is no checkpoint."""
    if s.max_steps != 0 or not s.resume:
        return s
    source = newest_checkpoint(s)
    if source is None:
        raise UserError(f"-x 0 -y 1 looks at the newest checkpoint in {s.output_dir}, which has none; leave -y out to look at -e {s.model}")
    return replace(s, model=str(source.file), resume=0, output_dir="")


def choose_model(s: Settings) -> Source:
    """The checkpoint to resume from, if there is one, else what -e says. Raises UserError."""
    if s.resume and (source := newest_checkpoint(s)):
        return source
    if not s.model.endswith(".bin"):
        return Source(named_config(s.model))
    if not os.path.exists(s.model):
        from llmc.data.shards import matches

        from_scratch = "train from random weights with -e d12 (or d6, the smallest)"
        if not s.plan and not matches(s.train_data):
            raise UserError(
                f"there is neither a model {s.model} (-e) nor training data {s.train_data} (-i); "
                f"make the data with: python scripts/prepare_tinyshakespeare.py, then {from_scratch}: python train_gpt2.py -e d6 -b 4 -t 64"
            )
        raise UserError(
            f"-e {s.model}: no such file; {from_scratch}, "
            f"or make it from a Hugging Face GPT-2 with: python scripts/convert_hf.py to-bin gpt2 {s.model}"
        )
    config, precision = read_model_header(s.model)
    return Source(config, s.model, precision)


def newest_checkpoint(s: Settings) -> Source | None:
    """The complete checkpoint of the highest step in -o, if there is one. Raises UserError if it is damaged, or not of -e's sizes."""
    if not s.output_dir:
        raise UserError("-y 1 resumes from the folder that -o names, and there is no -o; add -o DIR, or leave -y out")
    step = find_last_step(s.output_dir)
    if step is None:
        return None
    path = model_path(s.output_dir, step)
    try:
        config, precision = read_model_header(path)
    except UserError as error:
        raise UserError(f"{error}, or {RESUME_FROM_ANOTHER}") from None
    if not s.model.endswith(".bin") and (named := named_config(s.model)) != config:
        raise UserError(
            f"{path} is {sizes_in_words(config)}, but -e {s.model} is {sizes_in_words(named)}; "
            "resume with the -e of the run that wrote it, or choose another -o"
        )
    return Source(config, path, precision, step)


def named_config(name: str) -> ModelConfig:
    """The sizes of an -e that is not the name of a file. Raises UserError, for a folder with the model that is meant."""
    try:
        return config_from_descriptor(name)
    except UserError:
        if not os.path.isdir(name):
            raise
    models = sorted(Path(name).glob("model_*.bin"))
    meant = f"name a model in it, such as {models[-1]}" if models else "name a model .bin"
    if (Path(name) / "config.json").exists():
        meant = f"a Hugging Face model becomes a model .bin by: python scripts/convert_hf.py to-bin {name} model.bin"
    raise UserError(f"-e {name} is a folder; {meant}")


def sizes_in_words(config: ModelConfig) -> str:
    """All that a model's tensors depend on, but for padding."""
    return f"{config} maxT={config.max_seq_len}"


def check_lengths(s: Settings, config: ModelConfig):
    """Raise UserError unless the model knows as many positions as T and a sample ask for."""
    if s.sequence_length > config.max_seq_len:
        raise UserError(f"-t {s.sequence_length}: the model knows {config.max_seq_len} positions; use -t {config.max_seq_len} or less")
    if s.sample_every > 0 and s.sample_length > config.max_seq_len:
        raise UserError(f"-g {s.sample_length}: the model knows {config.max_seq_len} positions; use -g {config.max_seq_len} or less")


def check_precision(s: Settings, source: Source):
    """Raise UserError where --precision is not that of the file; a checkpoint goes on in any if it has a master."""
    if source.precision is None or s.precision in ("auto", source.precision):
        return
    if source.resume_step is None:
        raise UserError(
            f"{source.file} holds {source.precision} weights, but --precision {s.precision} was asked for; "
            f"leave --precision out, or start from a {s.precision} file"
        )
    if not keeps_master(s, source):
        raise UserError(
            f"{state_path(s.output_dir, source.resume_step, 0)} holds no fp32 master weights, from which the {source.precision} checkpoint "
            f"could go on in {s.precision}; leave --precision out"
        )


def keeps_master(s: Settings, source: Source) -> bool:
    """Whether this is a checkpoint to resume from that has fp32 master weights."""
    from llmc.checkpoint.state_file import has_master

    return source.resume_step is not None and has_master(state_path(s.output_dir, source.resume_step, 0))


def choose_precision(s: Settings, source: Source, device: Device) -> str:
    """fp32 or bf16: what was asked for, else that of the file, else bf16 wherever the hardware has it. To be called after check_precision.

    Raises UserError for bf16 on a card that does not compute in it.
    """
    wanted = s.precision if s.precision != "auto" else source.precision or "auto"
    if device.capability is None or device.capability >= AMPERE:
        return likely_precision(wanted, device.kind)
    if wanted != "bf16":
        return "fp32"
    why, advice = "--precision bf16:", "use --precision fp32"
    if source.precision == "bf16":
        why = f"{source.file} holds bf16 weights, and"
        if keeps_master(s, source):
            advice = "use --precision fp32, which goes on from the checkpoint's fp32 master weights"
        elif source.resume_step is None:
            advice = "start from an fp32 file"
        else:
            advice = "go on with --device cpu, or on a card that has"
    raise UserError(f"{why} {device.name} has no bf16 arithmetic (SM80 or later has); {advice}")


def settle_seed(s: Settings, source: Source) -> Settings:
    """The settings with the seed of the checkpoint to resume from, if any: what it decides is decided. Raises UserError where another one
    was asked for."""
    if source.resume_step is None:
        return s
    seed = read_number(extra_path(s.output_dir, source.resume_step, 0), "seed", BY_NAME["--seed"])
    if s.seed not in (0, seed):
        raise UserError(
            f"--seed {s.seed}: the checkpoint of step {source.resume_step} in {s.output_dir} is of a run with --seed {seed}, "
            "and goes on with that; leave --seed out"
        )
    return replace(s, seed=seed)
