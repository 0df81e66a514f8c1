"""Two ways to write a checkpoint: while the run waits, or beside it from a copy.

A writer is given writes, an iterable of (write, tensors) as llmc.checkpoint.snapshot yields them, and knows nothing of their meaning.
Only one checkpoint is on its way at a time. What happens once every rank has written is not a writer's business.
"""

from threading import Thread

import torch

from llmc.memory.arena import allocate_host

PIECE_BYTES = 1 << 20  # copied from a device, to it, or given to a file, at a time


class Writer:
    """Writes what it is given before begin() returns. Made with a plan, it copies that into host memory, which it allocates once, as
    planned, and a thread writes the copy while training goes on.

    step     step of the checkpoint that is on its way: begun, and neither taken nor abandoned; None if there is none
    begun    how many checkpoints were begun
    written  how many of them this rank has wholly written
    The thread does nothing but write files. What goes wrong there is raised by check() or wait().
    """

    def __init__(self, plan=None):
        self.step, self.begun, self.written = None, 0, 0
        self._copy = self._thread = self._error = None
        if plan is not None:
            self._on_gpu = plan.options.device == "cuda"
            self._copy = allocate_host(plan.checkpoint_bytes, self, pinned=self._on_gpu)

    def begin(self, step, writes):
        """Write the checkpoint of `step`, or copy it and begin to write. Raises UserError where the disk is full or denies the write."""
        assert self.step is None, f"the checkpoint of step {self.step} is still on its way"
        if self._copy is None:
            for write, tensors in writes:
                write(piece.cpu().numpy() for piece in tensors)
            self.written += 1
        else:
            copied = self._copied(writes)
            thread = Thread(target=self._write, args=(copied,), name="checkpoint")  # not a daemon: Python waits for it before it ends
            thread.start()
            self._thread = thread
        self.step, self.begun = step, self.begun + 1

    def _copied(self, writes) -> list:
        """(write, copy of its tensors) for each write."""
        filled, copied = 0, []
        for write, tensors in writes:
            start = filled
            for piece in tensors:
                self._copy[filled : filled + len(piece)].copy_(piece, non_blocking=True)
                filled += len(piece)
            copied.append((write, self._copy[start:filled].numpy()))
        assert filled == len(self._copy), f"{len(self._copy)} bytes are planned and {filled} were copied"
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied

    def _write(self, copied):
        try:
            for write, copy in copied:
                write(copy[at : at + PIECE_BYTES] for at in range(0, len(copy), PIECE_BYTES))
            self.written += 1
        except BaseException as error:  # handed to the main thread, which can end the run
            self._error = error

    def take(self) -> int:
        """The step of the checkpoint on its way, which all ranks have written: it is on its way no longer."""
        step, self.step = self.step, None
        return step

    def abandon(self):
        """Nobody waits any more for the checkpoint on its way, if there is one: it will not count, whether or not it is wholly written."""
        self.step = None

    @property
    def busy(self) -> bool:
        """Whether something is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def check(self):
        """Raise what went wrong since the last check()."""
        error, self._error = self._error, None
        if error is not None:
            self.abandon()
            raise error

    def wait(self):
        """Wait until this rank has written what was begun, and raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
        self.check()
