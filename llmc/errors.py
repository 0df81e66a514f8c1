"""The exceptions that are meant for the person at the shell."""


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
