"""The exceptions that are meant for the person at the shell, and how a script ends with one."""

import errno
import os
import sys
from typing import NoReturn

# exit codes; llmc.flags.EXIT_CODES says what they mean. The last three are what a shell reports for SIGHUP, SIGINT and SIGTERM
OUTPUT_CODE, INPUT_CODE, MEMORY_CODE, LOST_CODE, HANGUP_CODE, INTERRUPT_CODE, TERMINATED_CODE = 1, 2, 3, 4, 129, 130, 143

# what to do where a checkpoint cannot be used
RESUME_FROM_ANOTHER = "resume from another checkpoint: remove this one's DONE file, and -y 1 takes the one before"


class UserError(Exception):
    """Bad input or an option that cannot be honoured.

    The message is one clear sentence: what, where, what was expected, what to do. The program prints it without a
    traceback and exits with INPUT_CODE. Mistakes of this program itself are asserts and ordinary exceptions instead.
    """


class Interrupted(KeyboardInterrupt):
    """A signal ended the run before its first step. code: what a shell reports for it, 130 for SIGINT."""

    def __init__(self, number: int):
        super().__init__("interrupted")
        self.code = 128 + number


def code_of_child(returncode: int) -> int:
    """The exit code that a shell reports for a child: 128 and more if a signal ended it, which subprocess counts below 0."""
    return returncode if returncode >= 0 else 128 - returncode


def interrupt_code(error: KeyboardInterrupt) -> int:
    """The exit code that it leads to."""
    return error.code if isinstance(error, Interrupted) else INTERRUPT_CODE


FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
WHAT_TO_DO = {
    **dict.fromkeys(FULL_DISK, "make room"),
    errno.EFBIG: "raise ulimit -f, or choose a file system that takes files of that size",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "fix the permissions, or choose another place"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "choose another path"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise ulimit -n"),
}


def file_error(error: OSError, path, doing: str) -> UserError:
    """The UserError for an OSError, such as a full disk's, met while `doing` something ("writing the model") at `path`."""
    what_to_do = WHAT_TO_DO.get(error.errno, "look at what is there, and whether that disk is well")
    return UserError(f"{doing} failed at {path}: {error.strerror or error}; {what_to_do}, then run again")


def raise_error(error: Exception):
    """The default way to handle an error: raise it."""
    raise error


class NotEnoughMemory(Exception):
    """What was asked for does not fit in memory, or turned out not to. Exits with MEMORY_CODE, so that a restart loop can stop on it.

    The sentence is as in UserError. Below it the program prints the plan of `options` (llmc.memory.options.PlanOptions) and
    the cheapest ways to fit it in `budget_bytes`, at the same number of sequences per step.
    """

    def __init__(self, sentence: str, options, budget_bytes: int, grad_accum_steps: int = 1):
        super().__init__(sentence)
        self.options, self.budget_bytes, self.grad_accum_steps = options, budget_bytes, grad_accum_steps


class RankLost(Exception):
    """Another process of the run is gone, hangs or has stopped. Exits with LOST_CODE: starting all of them again, with -y 1, may help.

    If the other stopped for a reason that would stop it again, `code` is that process's own: see llmc.distributed.verdict.FINAL_CODES.
    `said_elsewhere`: another rank prints the sentence.
    """

    def __init__(self, sentence: str, code: int = LOST_CODE, said_elsewhere: bool = False):
        super().__init__(sentence)
        self.code, self.said_elsewhere = code, said_elsewhere


def lines_of(error: Exception) -> list[str]:
    """The lines of an error's message, of which the first or the last is mostly enough; the error's name and arguments if there is none."""
    return (str(error).strip() or repr(error)).splitlines()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: by torch on a GPU or on the host, by a library of the GPU, or by Python."""
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # the last is cuBLAS's and cuDNN's
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


LOST_OUTPUT = {errno.EPIPE, errno.EIO} | FULL_DISK  # what print may meet: | head -1, a full disk, a closed terminal


def tell_lost_output(error: OSError) -> int:
    """Say on stderr that printing failed, unless only the reader is gone; returns the exit code."""
    if error.errno != errno.EPIPE:
        _say(f"error: printing failed: {error.strerror}; send the output elsewhere, or make room")
    return OUTPUT_CODE


def unusable_path(error: BaseException) -> str:
    """The sentence for an OSError that names the path it is about; empty for any other error."""
    if not (isinstance(error, OSError) and error.filename and error.strerror):
        return ""
    return f"{error.filename}: {error.strerror}; check the path, its permissions and the room there"


def tell(error: UserError | KeyboardInterrupt | OSError, on_interrupt: str) -> int:
    """Print a sentence on what ended a program, for Ctrl-C `on_interrupt`, and return the exit code. An OSError is a path that cannot be
    used or a print that failed, with no sentence if only the output's reader is gone; one that is neither is raised again."""
    if isinstance(error, UserError):
        return end_with(f"error: {error}", INPUT_CODE)
    if isinstance(error, KeyboardInterrupt):
        return end_with(on_interrupt, interrupt_code(error))
    if sentence := unusable_path(error):
        return end_with(f"error: {sentence}", INPUT_CODE)
    if error.filename or error.errno not in LOST_OUTPUT or _can_print():
        raise error
    print_nothing_more()
    return tell_lost_output(error)


def fill_closed_streams() -> None:
    """Give a process that was started without standard output or error (`>&-`) streams that go nowhere, before the first file that is
    opened takes their number, and with it what is printed."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            while (nowhere := os.open(os.devnull, os.O_RDWR)) < number:
                pass  # standard input is closed too
            setattr(sys, name, open(nowhere, "w", errors="backslashreplace"))


def _can_print() -> bool:
    try:
        return os.write(1, b"\n") == 1
    except OSError:
        return False


def print_nothing_more(stream: int = 1) -> None:
    """Send standard output, or error (2), nowhere: what is left in its buffer would fail once more when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _say(sentence: str) -> None:
    """Print a sentence on stderr. Where that fails too, the exit code is left to tell what happened."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        print_nothing_more(2)


def run_script(main, on_interrupt: str = "interrupted") -> None:
    """Call main() as a program: a UserError, or a path that cannot be used, ends with one line on stderr and INPUT_CODE, Ctrl-C with
    `on_interrupt` and INTERRUPT_CODE."""
    code = 0
    fill_closed_streams()
    try:
        try:
            main()
        except SystemExit as end:  # argparse's, such as after --help
            code = end.code
        print(end="", flush=True)
    except (UserError, KeyboardInterrupt, OSError) as error:
        code = tell(error, on_interrupt)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this program with an exit code. With INTERRUPT_CODE it ends, last of all, by SIGINT itself: if a program that heard Ctrl-C ends
    in any other way, a shell goes on with its loop."""
    if code == INTERRUPT_CODE:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    sys.exit(code)


def end_with(sentence: str, code: int) -> int:
    """Print a sentence, if there is one, on stderr, after flushing what was printed before, if that is possible; returns the exit code."""
    try:
        print(end="", flush=True)
    except OSError:
        print_nothing_more()
    if sentence:
        _say(sentence)
    return code
