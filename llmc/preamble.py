"""What a run prints before its first step: llm.c's table, what was chosen, and notes on what its flags bring that users may not expect."""

from pathlib import Path

from llmc.backend import MATMUL_LIBRARY
from llmc.checkpoint.store import steps_done
from llmc.config import GPT2_VOCAB_SIZE, ModelConfig
from llmc.flags import Settings
from llmc.logger import LOG_NAME, VALUE_WIDTH, is_of_training, old_name, table_row, table_rule
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.scratch_sizes import head_chunk_rows
from llmc.memory.tables import num_parameters
from llmc.request import training_data
from llmc.units import MIB


def print_rows(rows: dict):
    """Rows of the table, then a rule."""
    print(*(table_row(name, value) for name, value in rows.items()), table_rule(), sep="\n", flush=True)


def print_settings(s: Settings, total_batch_size: int):
    """llm.c's table of parameters, row by row."""
    print(table_rule())
    print_rows({"Parameter": "Value"})
    print_rows({
        "train data pattern": training_data(s)[0], "val data pattern": s.val_data,
        "output log dir": s.output_dir or "NULL", "checkpoint_every": s.checkpoint_every, "resume": s.resume,
        "micro batch size B": s.batch_size, "sequence length T": s.sequence_length, "total batch size": total_batch_size,
        "LR scheduler": s.lr_scheduler, "learning rate (LR)": s.learning_rate, "warmup iterations": s.warmup_steps,
        "final LR fraction": s.final_lr_fraction, "weight decay": s.weight_decay,
        "skip update lossz": f"{s.skip_loss_z:f}", "skip update gradz": f"{s.skip_grad_z:f}", "max_steps": s.max_steps,
        "val_loss_every": s.val_loss_every, "val_max_steps": s.val_max_steps, "sample_every": s.sample_every, "genT": s.sample_length,
        "overfit_single_batch": s.overfit_single_batch,
        "use_master_weights": "enabled" if s.master_weights and s.master != "none" else "disabled",
        "gelu_fusion": s.gelu_fusion, "recompute": s.recompute,
    })  # fmt: skip


def print_device(name: str, peak_tflops: float, precision: str):
    """The device's part of the table."""
    peak = f"{peak_tflops:.1f}" if peak_tflops >= 1 else f"{peak_tflops:.3f}"
    print_rows({"device": name[:VALUE_WIDTH], "peak TFlops": peak, "precision": precision})


def print_model(config: ModelConfig, source: str):
    """The model's part of the table. source: where its weights are from."""
    print_rows({
        "weight init method": source,
        "max_sequence_length T": config.max_seq_len, "vocab_size V": config.vocab_size, "padded_vocab_size Vp": config.padded_vocab_size,
        "num_layers L": config.num_layers, "num_heads NH": config.num_heads, "channels C": config.channels,
        "num_parameters": num_parameters(config),
    })  # fmt: skip


def print_sizes(plan: Plan, total_batch_size: int, grad_accum_steps: int):
    """llm.c's lines on the parameters and on the sequences and micro-steps of a step."""
    o, parameters = plan.options, plan.arenas["parameters"]
    print(f"num_parameters: {num_parameters(o.config)} => bytes: {parameters}")
    print(f"allocated {parameters // MIB} MiB for model parameters")
    ranks = "num_processes" if o.tensor_parallel == 1 else "groups"
    print(f"batch_size B={o.B} * seq_len T={o.T} * {ranks}={o.data_ranks} and total_batch_size={total_batch_size}")
    print(f"=> setting grad_accum_steps={grad_accum_steps}")


def chosen_line(s: Settings, o: PlanOptions, graphs: bool) -> str:
    """The line that says which of several ways to compute the same a run takes."""
    ways = {"kernels": o.kernels, "attention": "in blocks", "head": f"{head_chunk_rows(o)} rows of logits at once"}
    if o.device == "cpu":
        ways["matmul"] = {"native": "torch", "numba": "numba", "widened": "torch"}[o.matmul]
        if o.multiplied_in != o.precision:
            ways["matmul"] += " of factors widened to fp32"
        ways["graphs"] = "on" if graphs else "off"
    if o.device == "cuda":
        matmul = "fp8 in layers" if o.matmul == "fp8" else MATMUL_LIBRARY[s.matmul]
        ways |= {"attention": o.attention, "matmul": matmul, "CUDA graphs": "on" if graphs else "off"}
    return ", ".join(f"{what}: {way}" for what, way in ways.items())


def flag_notes(s: Settings, o: PlanOptions, grad_accum_steps: int, max_steps: int, *, has_tokenizer: bool, resumes: bool):
    """Lines about what a user may not expect of these flags. max_steps: those of -x, or of an epoch."""
    yield from _of_computing(s, o, grad_accum_steps)
    if s.max_steps != 0:
        yield from _of_the_learning_rate(s, max_steps)
    yield from _of_evaluations(s, o, has_tokenizer)
    yield from _of_checkpoints(s, o)
    yield from _of_the_folder(s, resumes)


def _of_computing(s: Settings, o: PlanOptions, grad_accum_steps: int):
    config = o.config
    if padded := -config.num_heads % s.tensor_parallel:
        yield (
            f"note: {config.num_heads} heads in {s.tensor_parallel} equal parts: {padded} more are computed, whose weights are zero, "
            "and are in no file"
        )
    if s.zero_stage < 2 and o.reduces_always:
        yield (
            f"gradients are summed over processes after each of {grad_accum_steps} micro-steps, which gives the bits of -z 2 and 3; "
            "--reduce-every-micro-step 0 does so once a step and sends less"
        )
    if o.ranks == 1 and (s.server_ip or s.init_method != "mpi"):
        yield "note: -pi and -ps are where several processes meet, and this run is one alone; -pn says how many there are"
    if s.attention == "cudnn":
        yield "note: cuDNN's attention does not repeat its bits: two runs, or a run and its resumption, differ in the last ones"
    if o.trains and o.recompute > 0 and not o.gelu_repeats:
        yield f"note: with -ge {s.gelu_fusion} the GELU that -r {o.recompute} computes again is not the matmul's to the last bit"
    if o.matmul == "fp8":
        yield "note: --matmul fp8 has other bits and other losses than bf16; MFU stays relative to the bf16 peak"
    if not o.trains:
        yield "-x 0 trains nothing: no memory is planned for gradients, optimizer state or backward, whatever -r is"
    elif s.sequence_length < config.max_seq_len:
        yield f"note: -t {s.sequence_length} is below the model's {config.max_seq_len} positions; the rest of wpe will not be trained"


def _of_the_learning_rate(s: Settings, max_steps: int):
    if s.lr_scheduler == "constant":
        if s.warmup_steps or s.final_lr_fraction != 1:
            yield "note: -k constant has the learning rate of -l from the first step to the last; -u and -q change nothing"
        return
    if s.lr_scheduler != Settings().lr_scheduler and s.final_lr_fraction == 1:  # a flat cosine is llm.c's default
        yield f"note: -k {s.lr_scheduler} decays to -q times -l, and -q is 1: the learning rate stays; add -q 0 for it to fall"
    if s.warmup_steps >= max_steps:
        yield f"note: -u {s.warmup_steps} warms up over all of the {max_steps} steps: the learning rate only rises"


def _of_evaluations(s: Settings, o: PlanOptions, has_tokenizer: bool):
    if s.hellaswag_data != Settings().hellaswag_data and not s.hellaswag:
        yield f"note: --hellaswag-data {s.hellaswag_data} is only read with -h 1"
    if s.sample_every <= 0:
        return
    if not has_tokenizer:
        V = o.config.vocab_size
        how = " (python scripts/write_tokenizer.py makes one)" if V == GPT2_VOCAB_SIZE else ""
        yield f"no gpt2_tokenizer.bin of {V} tokens here or beside the data: samples are printed as token ids{how}"
    if s.sample_length < 2:
        yield f"note: -g {s.sample_length} leaves nothing to generate after the end-of-text that samples start with; -s 0 prints none"


def _of_checkpoints(s: Settings, o: PlanOptions):
    trains, periodic = s.max_steps != 0, s.checkpoint_every > 0
    if trains and not s.output_dir:
        what = f"-n {s.checkpoint_every} writes no checkpoints" if periodic else "neither logs nor the trained weights are written"
        yield f"note: {what} without -o, the folder for them"
    if trains and s.output_dir and not periodic:
        yield f"note: without -n no checkpoint is written to {s.output_dir} when training is done, only when something stops it before"
    if not trains and s.output_dir and periodic:
        yield "note: with -n and -o, -x 0 writes the weights as a checkpoint of step 0, which takes the memory of training"
    if not periodic and (s.checkpoints_keep > 0 or s.major_checkpoint_every > 0):
        yield "note: -nk and -nm say which of -n's checkpoints stay, and there is no -n"
    if o.async_checkpoint and not (periodic and s.output_dir):
        yield "note: --async-checkpoint 1 keeps room for checkpoints, but none is written beside training without -n and -o"


def _of_the_folder(s: Settings, resumes: bool):
    if not s.output_dir:
        return
    log = Path(s.output_dir, LOG_NAME)
    if not s.resume and steps_done(s.output_dir):
        yield (
            f"note: {s.output_dir} holds checkpoints of an earlier run; a later -y 1 resumes from the highest step, whichever run wrote it"
        )
    if s.resume and not resumes:
        yield f"-y 1: no complete checkpoint in {s.output_dir}, starting from {s.model}"
    if not resumes and is_of_training(log):
        if s.max_steps == 0:
            yield f"note: nothing is trained, so the logs of the run in {s.output_dir} stay, and what is measured now is only printed"
        else:
            yield f"note: the logs in {s.output_dir} are of an earlier run, and stay there under other names, such as {old_name(log).name}"
