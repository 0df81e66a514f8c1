"""The checkpoints that one run writes: when one is due, when it counts, and when it may replace another.

Each goes through three states. It is on its way until every rank has written its files, which with --async-checkpoint happens beside
training. Then it counts: its DONE stands, and -y 1 finds it. It is proven once a loss of its weights is known to be a number, and only
then may -nk delete the one it replaces.

Why proven: the loss that is known when a checkpoint is due is of the weights before their last update. An update that left no number
shows only with the next loss, and by then -nk 1 would have deleted the last good checkpoint.
"""

from llmc.checkpoint.snapshot import await_all, begin_snapshot, end_snapshot, is_first, rotate
from llmc.checkpoint.store import done_path, unmark
from llmc.checkpoint.writer import WriteAtOnce, WriteBeside
from llmc.flags import Settings


class Checkpoints:
    """Those of one run. Every rank has one and makes the same calls, as all that can be asked of it is the same on all of them.

    newest    step of the last checkpoint that counts, be it the one resumed from; None for none
    unproven  step of the checkpoint that counts and is not proven; None for none. There is never more than one: while there is, the next
              is not written, as only updates that were skipped lie between, or none
    """

    def __init__(self, s: Settings, model, record, resume_step: int | None):
        """record is told of each that counts. With --async-checkpoint this allocates the room that the plan has for it."""
        self._settings, self._model, self._record, self._resumed = s, model, record, resume_step
        self._writer = WriteBeside(model.plan) if s.async_checkpoint else WriteAtOnce()
        self._has_waited, self._proven_step = False, -1
        self.newest = self.unproven = resume_step  # a crash may have come before the older one was deleted: it is proven anew

    @property
    def written(self) -> int:
        """How many this rank has wholly written."""
        return self._writer.written

    def due(self, step: int, last: bool, stopping: bool) -> bool:
        """On -n's period, at the end, and when asked to stop; never where there is no -o, nor at the step just resumed from."""
        s = self._settings
        if not s.output_dir or step == self._resumed or step == 0 and (stopping or not last):
            return False
        periodic = s.checkpoint_every > 0 and (last or step % s.checkpoint_every == 0)
        return periodic or stopping

    def write(self, step: int, loader, extra: dict):
        """Write everything a resumed run needs to go on as if it had never stopped: now, or beside the next steps.

        Raises UserError where the disk is full or denies, also for the one before.
        """
        s, writer = self._settings, self._writer
        if writer.busy and not self._has_waited:
            self._has_waited = True
            print(f"note: the checkpoint of step {writer.step} is still being written; that of step {step} waits for it, as will others")
        self.complete()
        if self.unproven is not None:  # -sl or -sg have skipped all since, so these are its weights
            print(f"no checkpoint at step {step}: since that of step {self.unproven} no loss and norm were numbers", flush=True)
            return
        master_weights = self._model.plan.options.master != "none"
        begin_snapshot(writer, s.output_dir, step, self._model, loader, extra, master_weights=master_weights)
        if not s.async_checkpoint:
            self.complete()

    def check(self):
        """Raise UserError for what went wrong beside training since this was last asked."""
        self._writer.check()

    def complete(self):
        """Wait until all ranks have written the one that is on its way, if one is."""
        if self._writer.step is not None:
            await_all(self._writer, self._model.sharing)
            self._count()

    def complete_alone(self):
        """The same where nobody can be asked any more, for a run of one rank."""
        self._writer.wait()
        if self._writer.step is not None:
            self._count()

    def complete_if(self, written_by_all: int):
        """The same without waiting, given how many all ranks have written."""
        if self._writer.step is not None and written_by_all == self._writer.begun:
            self._count()

    def _count(self):
        """All ranks have written theirs: now it counts."""
        step = end_snapshot(self._writer, self._settings.output_dir, self._model)
        if self._settings.async_checkpoint:
            print(f"Wrote checkpoint at step {step}", flush=True)
        self.newest = self.unproven = step
        self._replace()
        self._record.phase("checkpoint", step)

    def prove(self, step: int):
        """A loss that the weights of `step` gave is a number: the checkpoint of them, or of earlier ones, may replace another."""
        self._proven_step = step
        self._replace()

    def _replace(self):
        """Delete what -nk no longer keeps, if the newest is proven."""
        s = self._settings
        if self.unproven is not None and self.unproven <= self._proven_step:
            step, self.unproven = self.unproven, None
            if s.checkpoint_every > 0 and is_first(self._model):
                rotate(s.output_dir, step, every=s.checkpoint_every, keep=s.checkpoints_keep, major_every=s.major_checkpoint_every)

    def disown(self) -> str:
        """The weights give no number: what is not proven counts no longer, but for the one resumed from, which is the user's to judge.

        What is left, for the sentence that ends the run; empty without -o.
        """
        folder, step = self._settings.output_dir, self.unproven
        self._writer.step = None  # one that is being written now will not count
        if not folder:
            return ""
        if step is None:
            return f"checkpoints in {folder} are from before it"
        name = done_path(folder, step).name
        if step == self._resumed:
            return f"so it does from that checkpoint on: remove {name} from {folder} to resume from one before"
        if is_first(self._model):
            unmark(folder, step)
        return f"{name} removed again, so -y 1 resumes from a checkpoint before it; the other files of step {step} are yours to delete"
