"""The command line: one table of flags, and what is read from it (parse), refused by it and printed about it.

Grammar, as in llm.c: every option is `-xx value`. Each also has a long name, `--long value` or `--long=value`; what this project
adds is long only. A repeated option: the last one wins. The environment is never read. -h is HellaSwag; help is --help.
"""

from dataclasses import dataclass, make_dataclass
from math import inf
from os.path import expanduser
from re import compile, fullmatch

from llmc.errors import HANGUP_CODE, INPUT_CODE, INTERRUPT_CODE, LOST_CODE, MEMORY_CODE, OUTPUT_CODE, TERMINATED_CODE, UserError
from llmc.memory.ladder import NOT_KEPT, can_offload


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `long` has no dashes; a bool is a switch, present or absent; `value` stands for its value in --help; a text must match
    `pattern`, if there is one; `also` are values outside the range, or words, that mean something; `hint` ends the sentence about a value
    that it does not take."""

    short: tuple[str, ...]
    long: str
    kind: type
    default: str | int | float | bool
    value: str
    help: str
    choices: tuple = ()
    pattern: str = ""
    at_least: int | None = None
    at_most: int | None = None
    also: tuple = ()
    hint: str = ""

    @property
    def field(self) -> str:
        """Its name in Settings."""
        return self.long.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling, short ones first."""
        return (*self.short, f"--{self.long}")

    @property
    def title(self) -> str:
        """-b (--batch-size), for messages."""
        return f"{self.short[0]} (--{self.long})" if self.short else f"--{self.long}"

    @property
    def expected(self) -> str:
        """What a value must look like, in words."""
        if self.choices:
            return " or ".join(filter(None, (", ".join(map(str, self.choices[:-1])), str(self.choices[-1]))))
        if self.pattern or self.kind is str:
            return self.value
        number = f"a {'whole ' if self.kind is int else ''}number of {self.at_least} or more"
        return ", ".join([*map(str, self.also), f"or {number}"]) if self.also else number

    @property
    def is_path(self) -> bool:
        return self.value in ("FILE", "FILE|NAME", "DIR", "GLOB")

    def takes(self, value) -> bool:
        """Whether a value is of its type, or a word such as auto, and in its range."""
        if type(value) is not self.kind:
            return type(value) is str and value in self.also
        if value in self.also:
            return True
        if self.at_most is not None and value > self.at_most:
            return False
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return not self.pattern or fullmatch(self.pattern, value) is not None
        return self.kind is bool or value >= self.at_least and -inf < value < inf  # false for nan


def _choice(short: tuple[str, ...], long: str, default: str | int, choices: tuple, help: str, hint: str = "") -> Flag:
    return Flag(short, long, type(default), default, "|".join(map(str, choices)), help, choices=choices, hint=hint)


def _on_off(short: tuple[str, ...], long: str, default: int, help: str, hint: str = "") -> Flag:
    return _choice(short, long, default, (0, 1), help, hint)


NEVER = "0 or -1 means never"

# group -> its flags, in llm.c's order. Defaults are llm.c's; help never repeats what default, choices or range say
GROUPS = {
    "files": (
        Flag(("-i",), "train-data", str, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "GLOB",
             "token shards to train on; quote a pattern"),
        Flag(("-j",), "val-data", str, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "GLOB", "token shards to validate on"),
        Flag(("-e",), "model", str, "gpt2_124M_bf16.bin", "FILE|NAME", "start from a model .bin, or from random weights of a size: d12, "
             "gpt2:d48, gpt3:c768"),
        Flag(("-o",), "output-dir", str, "", "DIR", "where logs and checkpoints go; empty writes neither"),
        Flag(("-lg",), "log-gpu-every", int, -1, "STEPS", f"print the GPU's clocks, power and temperature this often; {NEVER}",
             at_least=0, also=(-1,)),
        Flag(("-n",), "checkpoint-every", int, 0, "STEPS",
             f"write a checkpoint this often and at the end; {NEVER}, unless a signal stops the run", at_least=0, also=(-1,)),
        Flag(("-nk",), "checkpoints-keep", int, 0, "COUNT", "keep this many of -n's checkpoints, the newest; 0 or -1 keeps all",
             at_least=0, also=(-1,)),
        Flag(("-nm",), "major-checkpoint-every", int, 0, "STEPS", "checkpoints at multiples of this are never deleted; 0 or -1 spares none",
             at_least=0, also=(-1,)),
        _on_off((), "async-checkpoint", 0, "write checkpoints while training goes on, which waits only until they are copied into host "
                "memory that the plan counts"),
        _on_off(("-y",), "resume", 0, "go on from the complete checkpoint of the highest step in the output directory"),
    ),
    "tokens per step": (
        Flag(("-b",), "batch-size", int, 4, "B",
             "sequences per micro-batch and process, or --tensor-parallel group; auto: the most that fit",
             at_least=1, at_most=2**31 - 1, also=("auto",)),
        Flag(("-t",), "sequence-length", int, 1024, "T", "tokens per sequence", at_least=1, at_most=2**31 - 1),
        Flag(("-d",), "total-batch-size", int, -1, "TOKENS",
             "tokens per step, reached by accumulating gradients; -1: B x T x processes, or groups",
             at_least=1, at_most=1 << 40, also=(-1,)),
    ),
    "steps": (
        Flag(("-x",), "max-steps", int, -1, "STEPS", "how long to train; -1: one epoch, 0: only evaluate", at_least=0, also=(-1,)),
    ),
    "optimisation": (
        _choice(("-k",), "lr-scheduler", "cosine", ("cosine", "linear", "constant", "wsd"),
                "shape of the learning rate over the steps"),
        Flag(("-l",), "learning-rate", float, 3e-4, "LR", "highest learning rate", at_least=0),
        Flag(("-u",), "warmup-steps", int, 0, "STEPS", "steps over which the learning rate rises to -l",
             at_least=0, at_most=2**31 - 1),
        Flag(("-q",), "final-lr-fraction", float, 1.0, "FRACTION", "learning rate at the end, relative to the highest; 1 does not decay",
             at_least=0),
        Flag(("-c",), "weight-decay", float, 0.0, "RATE", "decoupled weight decay of the six matrices", at_least=0),
        Flag(("-sl",), "skip-loss-z", float, 0.0, "Z",
             "skip updates whose loss is this many standard deviations above the mean, or no finite number; 0 never skips", at_least=0),
        Flag(("-sg",), "skip-grad-z", float, 0.0, "Z",
             "skip updates whose gradient norm is this many standard deviations above the mean, or no finite number; 0 never skips",
             at_least=0),
    ),
    "evaluation": (
        Flag(("-v",), "val-loss-every", int, 20, "STEPS", "validate this often and at the end; 0 means never",
             at_least=0, hint="0 means never"),
        Flag(("-m",), "val-max-steps", int, 20, "BATCHES", "validation batches to average; -1: the whole split", at_least=1, also=(-1,),
             hint="to never validate use -v 0"),
        Flag(("-s",), "sample-every", int, 20, "STEPS", f"print generated text this often and at the end; {NEVER}", at_least=0, also=(-1,)),
        Flag(("-g",), "sample-length", int, 64, "TOKENS", "length of a sample, its end-of-text start included", at_least=0),
        Flag((), "prompt", str, "", "TEXT", "text that samples go on from; needs the tokenizer; its tokens count for -g",
             hint="for a text that reads like a flag: --prompt=TEXT"),
        Flag((), "temperature", float, 1.0, "T", "of samples: below 1 favours likely tokens, 0 always takes the likeliest",
             at_least=0),
        _on_off(("-h",), "hellaswag", 0, "score HellaSwag at the end, and whenever -v validates, except at the start",
           hint="-h is HellaSwag as in llm.c, the list of flags is --help"),
    ),
    "debugging": (
        _on_off(("-a",), "overfit-single-batch", 0, "train on the first validation batch alone, over and over"),
    ),
    "numerics": (
        _on_off(("-f",), "tf32", 1, "let fp32 matmuls use TF32 on a GPU that has it"),
        _on_off(("-w",), "master-weights", 1, "keep fp32 weights beside bf16 ones for the optimizer"),
        _choice((), "master", "auto", ("auto", "fp32", "bits16", "none"),
                "form of the fp32 master weights: a copy, or exactly the same in the 16 bits that bf16 lacks; auto follows -w"),
        _choice((), "optimizer-state", "fp32", ("fp32", "bf16"),
                "type of AdamW's m and v; bf16 is rounded stochastically"),
        _choice((), "grad-dtype", "auto", ("auto", "fp32", "bf16"),
                "type of the gradients; auto: that of the weights. In fp32 sums over many micro-steps lose far fewer bits"),
        _choice(("-ge",), "gelu-fusion", 0, (0, 1, 2, 3),
                "fuse GELU into matmuls (CUDA): 0 none, 1 forward, 2 both, 3 backward alone, which keeps the bits of all -r alike"),
        _choice((), "kernels", "auto", ("auto", "triton", "numba", "torch"),
                "whose kernels run all but matmuls and a GPU's attention; auto takes Triton on a GPU and numba on a CPU, where installed"),
        _choice((), "attention", "auto", ("auto", "flash", "cudnn", "efficient", "triton"),
                "whose attention runs on a GPU; auto: triton in bf16, flash with --kernels torch or heads of more than 128 channels, "
                "efficient in fp32. triton is this project's, all in planned memory, which no other is; cudnn does not repeat its bits"),
        Flag((), "matmul", str, "auto", "NAME",
             "which matmuls run; auto takes what was measured to be fastest. On a GPU cublas (auto) or cublaslt for those without a bias, "
             "or fp8 for those of all layers: 8 bits, other losses, for large models on Hopper and later. On a CPU native (torch's), "
             "numba, or widened (torch's fp32, of bf16 converted piece by piece). All but fp8 differ in last bits at most",
             choices=("auto", "cublas", "cublaslt", "fp8", "native", "numba", "widened")),
    ),
    "memory": (
        _choice(("-z",), "zero-stage", 0, (0, 1, 2, 3),
                "shard optimizer state (1), gradients (2), weights (3) over processes"),
        Flag(("-r",), "recompute", int, 1, "LEVEL", "recompute more in backward to store less: 0 nothing, 1 GELU, 2 layernorms, 3 fc, "
             "4 qkv, 5 whole blocks, 6 segments of blocks; auto: the lowest that fits", at_least=0, also=("auto",)),
        Flag((), "offload-residual", bool, False, "", "keep the residuals between blocks in host memory (CUDA)"),
        Flag((), "offload-optimizer", bool, False, "",
             "keep m, v and the master weights in host memory (CUDA), where the update reads and writes them over the bus"),
        Flag((), "head-chunk", int, 0, "ROWS", "rows of logits held at once; 0 chooses", at_least=0),
        Flag((), "memory-budget", str, "", "SIZE|CARD",
             "memory to plan for: 24GiB, or a card such as h100-80; empty: what the device has free"),
        Flag((), "plan", bool, False, "", "print the memory plan of every -r and exit; works on any machine"),
        Flag((), "json", bool, False, "", "print the plan as JSON"),
        Flag((), "tensors", bool, False, "", "print the plan of -r tensor by tensor"),
        Flag((), "ranks", int, 0, "COUNT", "processes to plan for, up to thousands; 0: those of -pn", at_least=0, at_most=2**31 - 1),
        Flag((), "link", float, 0.0, "GBITS", "Gbit/s at which a rank sends to other machines, such as 400, for the plan's times; "
             "0: unknown", at_least=0),
        Flag((), "node-link", float, 0.0, "GBITS", "Gbit/s at which a rank sends to its -pg neighbours inside a machine; 0: as --link",
             at_least=0),
    ),
    "several processes": (
        _on_off((), "reduce-every-micro-step", 1, "sum gradients over processes after each micro-step, as -z 2 and 3 must, so that all "
                "stages give the same bits; 0: -z 0 and 1 do so once a step, and send less"),
        Flag((), "tensor-parallel", int, 1, "PARTS", "split every layer and the vocabulary over this many neighbouring processes",
             at_least=1),
        _on_off((), "tp-recompute-allgather", 1,
                "rows that --tensor-parallel gathers for a matmul: 1 gathers them again in backward, 0 keeps them"),
        Flag(("-pn",), "num-processes", int, 1, "COUNT", "processes in all; not needed with a launcher", at_least=1),
        Flag(("-pr",), "process-rank", int, 0, "RANK", "number of this process, from 0; not needed with a launcher", at_least=0),
        Flag(("-pg",), "gpus-per-node", int, 8, "COUNT", "GPUs, and so processes, in each machine, where no launcher says it", at_least=1),
        Flag(("-pm", "-pi"), "init-method", str, "mpi", "NAME", "how processes find each other: mpi, by a launcher (torchrun, mpirun, "
             "srun), tcp or fs", choices=("mpi", "fs", "tcp")),
        Flag(("-ps",), "server-ip", str, "", "HOST[:PORT]", "where rank 0 listens, for tcp; the port is 12345 if not given"),
        Flag(("-pp", "-pf"), "fs-path", str, "/tmp", "DIR", "a folder all processes share, for fs"),
        Flag((), "timeout", int, 600, "SECONDS", "how long processes wait for one another, at the start and in a step", at_least=1,
             at_most=2**31 - 1),
    ),
    "this project's own": (
        Flag((), "device", str, "auto", "auto|cpu|cuda[:N]", "where to train; auto takes a GPU if there is one",
             pattern=r"auto|cpu|cuda(:\d+)?"),
        _choice((), "precision", "auto", ("auto", "fp32", "bf16"),
                "type of weights and activations; auto follows the model file and the device"),
        Flag((), "hellaswag-data", str, "dev/data/hellaswag/hellaswag_val.bin", "FILE", "the examples -h 1 scores"),
        Flag((), "tokenizer", str, "", "FILE",
             "the file that turns samples' tokens into text; empty looks for gpt2_tokenizer.bin here and beside the data"),
        _choice((), "cuda-graph", "auto", ("0", "1", "auto"),
                "run steps and evaluations as CUDA graphs, on a CPU as recorded lists of calls; auto does where it can"),
        Flag(
            (), "seed", int, 0, "NUMBER",
            "other initial weights, order of the data, rounding and samples; 0: llm.c's, 65535: the last. A resumed run keeps its own",
            at_least=0, at_most=65535,
        ),
        Flag(
            (), "threads", int, 0, "COUNT", "CPU threads; 0: OMP_NUM_THREADS, else one per physical core that this process may use",
            at_least=0, at_most=1024,
        ),
        Flag((), "help", bool, False, "", "print this and exit"),
        Flag((), "version", bool, False, "", "print the version and exit"),
    ),
}  # fmt: skip

FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}

EXIT_CODES = {
    0: "done, or stopped by SIGTERM or SIGHUP, with a checkpoint if there is -o",
    OUTPUT_CODE: "printing failed (-o: a checkpoint if it trained), or a fault (traceback)",
    INPUT_CODE: "one sentence on what to correct",
    MEMORY_CODE: "it does not fit in memory",
    LOST_CODE: "another rank was lost; start all again with -y 1",
    INTERRUPT_CODE: "stopped by Ctrl-C, with a checkpoint if it trained and there is -o",
    TERMINATED_CODE: f"a second SIGTERM, or one before the first step (a SIGHUP then: {HANGUP_CODE})",
}

EXAMPLES = (
    ("a small model from scratch, on any machine", "-e d6 -b 4 -t 128 -d 2048 -x 200 -o log_d6 -n 50"),
    ("go on where it stopped, or crashed", "-e d6 -b 4 -t 128 -d 2048 -x 400 -o log_d6 -n 50 -y 1"),
    ("will the 1.5B model fit? nothing is allocated", "-e d48 -b 16 -r 2 --plan --memory-budget h100-80"),
    (
        "what 1024 processes each hold and send; nothing is started",
        "-e gpt3:c12288 -b 1 -t 2048 -r 2 --plan --ranks 1024 -z 3 --tensor-parallel 8 --link 400 --memory-budget h100-80",
    ),
    ("learn one batch by heart, to see that training works", "-e d12 -b 4 -t 64 -a 1 -x 50 -l 1e-4"),
)

Settings = make_dataclass(
    "Settings",
    [(flag.field, flag.kind, flag.default) for flag in FLAGS],
    frozen=True,
    slots=True,
    namespace={"__doc__": "The value of every flag, under its long name in snake_case.", "__module__": __name__},
)


def parse(argv: list[str]) -> Settings:
    """Settings from the words after the program's name. Raises UserError naming the flag, what was found and what is expected.

    --help and --version win over everything else on the line, so that a wrong command can still be asked about.
    What needs more than one value, the model or the device (is -d divisible by B*T? is T within the model?) is checked by the caller.
    """
    for asked in ("help", "version"):
        if f"--{asked}" in argv:
            return Settings(**{asked: True})
    values, flag = {}, None
    words = iter(argv)
    for word in words:
        flag, inline = _find(word, previous=flag)
        if flag.kind is bool:
            if inline is not None:
                raise UserError(f"{word}: {flag.title} is a switch and takes no value; say only --{flag.long}")
            values[flag] = True
        else:
            values[flag] = _value(flag, _next_value(flag, words) if inline is None else inline)
    return Settings(**{flag.field: value for flag, value in values.items()})


def check_contradictions(settings: Settings) -> None:
    """Raise UserError for options that do not go together: nothing is switched off silently."""
    s = settings
    if s.recompute != "auto" and s.recompute not in NOT_KEPT:
        raise UserError(f"-r {s.recompute}: no such recompute level; use one of {', '.join(map(str, NOT_KEPT))}, or auto")
    if s.recompute == s.batch_size == "auto":
        raise UserError("-r auto -b auto: each is chosen for the other; give one of them, such as -b 4, or -r 6 for the largest -b")
    if s.offload_residual and s.recompute != "auto" and not can_offload(s.recompute):
        raise UserError(
            f"-r {s.recompute} --offload-residual: this level keeps too few residuals to be worth moving; "
            "use -r 5, where most of them go to the host"
        )
    if (s.json or s.tensors) and not s.plan:
        raise UserError(f"--{'json' if s.json else 'tensors'} is a form of the plan; add --plan")
    for asked, what in ((s.prompt, "--prompt is what samples go on from"), (s.temperature != 1, "--temperature is that of samples")):
        if asked and s.sample_every <= 0:
            raise UserError(f"{what}, and -s {s.sample_every} prints none; add -s 1, or leave it out")
    for flag, given in (("ranks", s.ranks), ("link", s.link), ("node-link", s.node_link)):
        if given and not s.plan:
            raise UserError(f"--{flag} is about processes that are only planned for; add --plan, or leave it out")
    if s.node_link and not s.link:
        raise UserError(
            "--node-link is the speed inside a machine, beside --link's between machines, which is not given; add it, such as --link 400"
        )
    if s.master in ("fp32", "bits16") and not s.master_weights:
        raise UserError(f"--master {s.master} -w 0: one asks for master weights and the other for none; leave one of them out")


def format_help(width: int = 100) -> str:
    """The text of --help: the groups in two columns, `width` characters wide where there is room for them. Where a flag's names reach into
    the second, what it means begins below them."""
    from textwrap import TextWrapper, fill

    lines = ["usage: python train_gpt2.py [-xx value | --long value | --switch] ...", "",
             fill("Trains GPT-2 with llm.c's flags and files. Defaults in brackets; the last of repeated options wins.",
                  max(width, 60))]  # fmt: skip
    column = 32  # as wide as the longest names it would leave 31 of 80 characters
    wrapper = TextWrapper(max(width, column + 24), initial_indent=" " * column, subsequent_indent=" " * column)
    wrapper.wordsep_re = compile(r"(\s+)|(?<=/)")  # a long path breaks between its folders, not in a name
    for group, flags in GROUPS.items():
        lines += ["", group]
        for flag in flags:
            text = wrapper.fill(f"{flag.help} {_shown_default(flag)}".rstrip())
            usage = _usage(flag)
            lines += [usage + text[len(usage) :]] if len(usage) + 2 <= column else [usage, text]
    lines += ["", "exit codes", *(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES.items())]
    lines += ["", "examples (the data they read: python scripts/prepare_tinyshakespeare.py)"]
    for what, arguments in EXAMPLES:
        lines += [f"  {what}", f"      python train_gpt2.py {arguments}"]
    return "\n".join(lines) + "\n"


def flag_table_markdown() -> str:
    """The README's list of flags, one table per group, without a trailing newline."""
    lines = []
    for group, flags in GROUPS.items():
        lines += ["", f"**{group}**", "", "| flag | long | value | default | meaning |", "|---|---|---|---|---|"]
        for flag in flags:
            short = ", ".join(f"`{name}`" for name in flag.short)
            cells = (short, f"`--{flag.long}`", flag.value and f"`{flag.value}`", _shown_default(flag).strip("[]"), flag.help)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def _usage(flag: Flag) -> str:
    return f"  {', '.join(flag.names)} {flag.value}".rstrip()


# flags of llm.c's train_gpt2.py, as its scripts have them, and of other trainers: whose names are not near to ours, and which have nothing
# to ask for here
ELSEWHERE = {
    "--input_bin": "--train-data", "--input_val_bin": "--val-data", "--num_iterations": "--max-steps", "--warmup_iters": "--warmup-steps",
    "--learning_rate_decay_frac": "--final-lr-fraction", "--dtype": "--precision", "--tensorcores": "--tf32", "--flash": "--attention",
    "--lr": "--learning-rate",
}  # fmt: skip
NOT_NEEDED = {
    "--dropout": "there is no dropout, as in llm.c",
    "--grad_clip": "gradients are always clipped to a norm of 1, as llm.c clips them",
    "--compile": "there is no autograd here for torch.compile to speed up",
}


def _find(word: str, previous: Flag | None) -> tuple[Flag, str | None]:
    """The flag a word names, and the value after its `=` if it has one."""
    name, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
    if name in BY_NAME:
        return BY_NAME[name], inline if equals else None
    if not word.startswith("-") or len(word) == 1:
        after = f" after {previous.title}" if previous else ""
        raise UserError(
            f"unexpected {word!r}{after}: every option is a flag and one value; put a pattern such as 'data/*.bin' in quotes, or see --help"
        )
    short, equals, inline = word.partition("=")
    if short in BY_NAME and equals:
        raise UserError(f"{word}: only a long flag takes its value after =; use {short} {inline or BY_NAME[short].value}")
    from difflib import get_close_matches  # only a mistake needs it

    if name in NOT_NEEDED:
        raise UserError(f"unknown flag {name}: {NOT_NEEDED[name]}; leave it out")
    meant, known = name.lower(), BY_NAME
    if len(letters := meant.strip("-")) <= 2:  # half of it is like almost any short name: that must begin alike
        known = [other for other in BY_NAME if other.strip("-")[0] == letters[:1]]
    near = [ELSEWHERE[name]] if name in ELSEWHERE else get_close_matches(meant, known, 1, 0.5)
    raise UserError(f"unknown flag {name}: " + (f"did you mean {near[0]}? " if near else "") + "--help lists them all")


def _next_value(flag: Flag, words) -> str:
    """The word after a flag. Raises UserError where there is none, or another flag, with or without its value."""
    text = next(words, None)
    if text is None or text.partition("=")[0] in BY_NAME:
        found = "the command line ends there" if text is None else f"the flag {text} follows"
        raise UserError(f"{flag.title} needs a value, {flag.expected}, but {found}{_hint(flag)}")
    return text


def _hint(flag: Flag) -> str:
    return f"; {flag.hint}" if flag.hint else ""


def _value(flag: Flag, text: str):
    """The value of `flag` that `text` stands for."""
    if text in flag.also:
        return text
    if flag.is_path:
        return expanduser(text)  # a shell leaves the ~ of --output-dir=~/log, and of a quoted pattern, as it is
    try:
        value = flag.kind(text)
    except ValueError:
        value = None
    if value is not None and flag.at_most is not None and value > flag.at_most:
        raise UserError(f"{flag.title} is {text}, but must be at most {flag.at_most}")
    if value is None or not flag.takes(value):
        raise UserError(f"{flag.title} is {text!r}, but must be {flag.expected}{_hint(flag)}")
    return value


def _shown_default(flag: Flag) -> str:
    """[4], or nothing for a switch; an empty text is none."""
    return "" if flag.kind is bool else f"[{flag.default if flag.default != '' else 'none'}]"
