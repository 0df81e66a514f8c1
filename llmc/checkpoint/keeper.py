"""The checkpoints that one run writes: when one is due, when it counts, and when it may replace another.

Each goes through three states. It is on its way until every rank has written its files, which with --async-checkpoint happens while
training goes on. Then it counts: its DONE file exists, and -y 1 finds it. It is proven once a loss computed with its weights is known to
be finite, and only then may -nk delete the checkpoint that it replaces.

Why it must be proven: the loss known when a checkpoint is due was computed before the last update. If that update ruined the weights, only
the next loss shows it, and by then -nk 1 would have deleted the last good checkpoint.
"""

import os
from contextlib import contextmanager

from llmc.checkpoint.extra_file import Extra
from llmc.checkpoint.snapshot import await_all, begin_snapshot, is_first
from llmc.checkpoint.store import delete, done_path, files_of, highest_step, mark_done, step_to_delete, steps_done, unmark
from llmc.checkpoint.writer import Writer
from llmc.errors import UserError
from llmc.flags import Settings


class Checkpoints:
    """The checkpoints of one run. Every rank has one of these and makes the same calls; the answers are the same on all ranks.

    newest    step of the last checkpoint that counts, which may be the one resumed from; None if there is none
    unproven  step of the checkpoint that counts but is not proven; None if there is none. There is never more than one: while there is, no
              further one is written, as then no update, or only skipped ones, came after it
    """

    def __init__(self, s: Settings, model, record, resume_step: int | None):
        """record is told of each checkpoint that counts. With --async-checkpoint this allocates the copy that the plan has."""
        self._settings, self._model, self._record, self._resumed = s, model, record, resume_step
        self._beside = model.plan.options.async_checkpoint
        self._writer = Writer(model.plan if self._beside else None)
        self._has_waited, self._proven_step = False, -1
        self.newest = self.unproven = resume_step  # a crash may have come before the older one was deleted: it is proven anew

    @property
    def written(self) -> int:
        """How many checkpoints this rank has written completely."""
        return self._writer.written

    def due(self, step: int, last: bool, stopping: bool) -> bool:
        """With -n on its period and at the end; when asked to stop, even without -n. But never

        - where there is no -o,
        - at the step just resumed from,
        - before anything is trained, unless that is the end, with -x 0.
        """
        s = self._settings
        if not s.output_dir or step == self._resumed or step == 0 and (stopping or not last):
            return False
        periodic = s.checkpoint_every > 0 and (last or step % s.checkpoint_every == 0)
        return periodic or stopping

    def write(self, step: int, loader, extra: Extra, *, doubtful: bool):
        """Write everything a resumed run needs to go on as if it had never stopped: now, or during the next steps. If the weights are
        doubtful, as the last loss that they gave is not finite, say that none is written.

        Raises UserError where the disk is full or denies the write, of this checkpoint or of the one before.
        """
        s, writer = self._settings, self._writer
        if writer.busy and not self._has_waited:
            self._has_waited = True
            print(f"note: the checkpoint of step {writer.step} is still being written; that of step {step} waits for it, as will others")
        self.complete()
        if self.unproven is not None:  # -sl or -sg have skipped every update since, so these weights are in that checkpoint
            self._leave_out(step, f"since that of step {self.unproven} every loss or norm was nan or infinite, and no update was made")
            return
        if doubtful:
            self._leave_out(step, "the last loss was nan or infinite, and no update was made since")
            return
        with self._kept_told():
            begin_snapshot(writer, s.output_dir, step, self._model, loader, extra)
        if not self._beside:
            self.complete()

    def _leave_out(self, step: int, reason: str):
        print(f"no checkpoint at step {step}: {reason}", flush=True)

    def check(self):
        """Raise UserError for what went wrong in the background since the last call."""
        with self._kept_told():
            self._writer.check()

    def complete(self):
        """Wait until all ranks have written the checkpoint that is on its way, if there is one."""
        if self._writer.step is not None:
            with self._kept_told():
                await_all(self._writer, self._model.sharing)
            self._count()

    def complete_alone(self):
        """The same without asking other ranks, for a run of one."""
        with self._kept_told():
            self._writer.wait()
        if self._writer.step is not None:
            self._count()

    def complete_if(self, written_by_all: int):
        """The same without waiting: only if the number of checkpoints that all ranks have written includes it."""
        if self._writer.step is not None and written_by_all == self._writer.begun:
            self._count()

    def _count(self):
        """Let the checkpoint that all ranks have written count."""
        step = self._writer.take()
        if is_first(self._model):
            with self._kept_told():
                mark_done(self._settings.output_dir, step)
        if self._beside:
            print(f"Wrote checkpoint at step {step}", flush=True)
        self.newest = self.unproven = step
        self._replace()
        self._record.phase("checkpoint", step)

    def prove(self, step: int):
        """A loss computed with the weights of `step` is finite: checkpoints up to there are proven, and may replace another."""
        self._proven_step = step
        self._replace()

    def _replace(self):
        """Delete the checkpoint that -nk no longer keeps, or what a crash left of it, if the newest is proven."""
        if self.unproven is None or self.unproven > self._proven_step:
            return
        step, self.unproven = self.unproven, None
        s = self._settings
        if s.checkpoint_every <= 0 or not is_first(self._model):
            return
        old = step_to_delete(step, s.checkpoint_every, s.checkpoints_keep, s.major_checkpoint_every)
        with self._kept_told():
            if old is not None and files_of(s.output_dir, old):
                print(f"Deleting checkpoint at step {old}")
                delete(s.output_dir, old)

    def kept(self, once_mended: bool = False) -> str:
        """Where a run that ends early, with an error or without, may be resumed, for the sentence that it ends with; empty if nowhere."""
        folder = self._settings.output_dir
        if self.newest is None or not os.path.exists(done_path(folder, self.newest)):
            return ""
        try:
            higher = [done_path(folder, step).name for step in sorted(steps_done(folder)) if step > self.newest]
        except UserError:  # the sentence is about something else that the disk did before
            return ""
        when = "once that is mended, " if once_mended else ""
        unless = f", if {' and '.join(higher)} of an earlier run {'is' if len(higher) == 1 else 'are'} moved away" if higher else ""
        return f"step {self.newest} is kept in {folder}: {when}-y 1 goes on there{unless}"

    @contextmanager
    def _kept_told(self):
        """Add what is kept to a UserError inside."""
        try:
            yield
        except UserError as error:
            raise UserError("; ".join(filter(None, (str(error), self.kept(once_mended=True))))) from error

    def disown(self) -> str:
        """The weights give no finite loss: a checkpoint that is not proven no longer counts, unless the run resumed from it; that one is
        the user's to judge.

        Returns what is left, for the sentence with which rank 0 ends the run; empty without -o, and on other ranks.
        """
        folder, step = self._settings.output_dir, self.unproven
        self._writer.abandon()
        if not folder or not is_first(self._model):
            return ""
        removed = ""
        if step is not None:
            name = done_path(folder, step).name
            if step == self._resumed:
                return f"the run resumed from a checkpoint of these weights: remove {name} from {folder} to resume from an earlier one"
            unmark(folder, step)
            removed = f"{name} removed again, "
        left = highest_step(folder)
        return removed + (f"no checkpoint is left in {folder}" if left is None else f"-y 1 resumes from step {left} in {folder}")
