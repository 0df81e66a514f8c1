"""The exceptions that are meant for the person at the shell, and how a script ends with one."""

import sys


class UserError(Exception):
    """Bad input or an option that cannot be honoured.

    The message is one clear sentence: what, where, what was expected, what to do. The program prints it without a
    traceback and exits with code 2. Mistakes of this program itself are asserts and ordinary exceptions instead.
    """


def full_disk_or_denied(error: OSError, path, doing: str) -> UserError:
    """The UserError for an OSError met while `doing` something ("writing the model") at `path`."""
    return UserError(f"{doing} failed at {path}: {error.strerror or error}; make room or fix the permissions, then run again")


class NotEnoughMemory(Exception):
    """What was asked for does not fit. One sentence as in UserError; exit code 3, so that a restart loop can stop on it."""


def run_script(main, on_interrupt: str = "interrupted") -> None:
    """Call main() as a program: a UserError is one line on stderr and exit code 2, Ctrl-C `on_interrupt` and 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(on_interrupt, file=sys.stderr)
        sys.exit(130)
