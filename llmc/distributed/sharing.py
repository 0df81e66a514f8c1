"""What the ranks that train one model do together: they sum gradients and gather weights, layer by layer, while they compute.

The plan decides what a rank holds whole and what it holds only a share of (ZeRO, Rajbhandari et al. 2019). Every stage sums the
same tensors in the same shares and updates the same elements with the same noise, so all stages give the same bits. With several
micro-steps stages 2 and 3 must sum over ranks before they add up micro-steps; stages 0 and 1 do so too unless they are told to send
less (--reduce-every-micro-step 0). On a CPU without numba, torch rounds the last elements of a tensor differently from whole vectors,
so there the bits are the same only if shares are multiples of 16 elements.
"""

import torch

from llmc.distributed.group import Done
from llmc.distributed.tensor_parallel import Undivided
from llmc.memory.layout import flat_layout, weight_buckets
from llmc.memory.slots import gradient_slot, weight_slot
from llmc.memory.tables import SUMMED_OVER_PARTS
from llmc.memory.tuning import LOSS, NORM, STOPS, UNDIVIDED_NORM, WRITTEN


class OneRank:
    """One rank: it holds everything, and there is nobody to wait for."""

    rank, size = 0, 1
    division = Undivided()
    stops = 0.0  # how many ranks said with the last norm that they were asked to stop
    written_by_all = 0  # how many checkpoints every rank has wholly written

    def tell_with_norm(self, *, wants_to_stop: bool, checkpoints_written: int):
        """What this rank tells the others together with its next norm: whether it was asked to stop, and how many checkpoints it has wholly
        written."""
        self.written_by_all = checkpoints_written

    def moved(self):
        """Say that something long still goes on, so that nobody takes it for a hang."""

    def total(self, number: float) -> float:
        """The sum of the numbers of all ranks that have the same part of the model, and so data of their own."""
        return number

    def attach(self, model):
        """Take over the model whose weights are shared. Its arenas exist already, its layers do not."""
        self._flat = model.flat

    def need(self, key, then=None):
        """The weights of bucket `key` are about to be read; those of bucket `then`, which is next, may be gathered meanwhile."""

    def release(self, key):
        """The weights of bucket `key` are not read again before the next need(key): their slot may be used for something else."""

    def release_all(self):
        """Wait for all weights that are being gathered, and give up all slots: their memory may be used for something else."""

    def whole_weights(self):
        """Yields all weights in file order, as flat tensors, each of which the next may overwrite. All ranks must take all of them."""
        yield self._flat["parameters"]

    def barrier(self):
        """Wait until all ranks have come here, as long as a collective may take."""

    def wait_for_all(self, what: str):
        """The same, however long a rank takes that still moves, such as one that writes to a slow disk. `what` they wait for, in words."""

    def clear(self, key):
        """The gradients of bucket `key` are about to be written."""

    def complete(self, key, adding: bool, last: bool):
        """The gradients of bucket `key` are complete for this micro-step.

        adding  whether they add to those of earlier micro-steps
        last    whether this is the last micro-step of the step
        """

    def finish(self):
        """Wait for all sums that were begun."""

    def combine(self, numbers, loss_sum, grad_norm):
        """This rank's loss sum and norm become those of all ranks; `numbers` is scratch for what each rank sends."""

    def gradients(self):
        """The flat gradients of which this rank computes the norm."""
        return self._flat["gradients"]

    def updated(self):
        """The flat arenas that this rank updates, with their present contents."""
        return self._flat

    def spread(self):
        """The update of those arenas is done: begin to give the new weights to the ranks that need them."""


class Sharing:
    """One of several ranks; `plan` says how many, and the ZeRO stage. What the calls mean is said at OneRank's, which are the same.

    group     Group of the ranks with the same part of the model, which share its gradients and weights
    division  Divided, over the ranks with the same data, whose parts make up the model; or Undivided
    everyone  Group of all ranks
    world     World, which is told that something long still goes on, and waits for those that are slow
    """

    def __init__(self, plan, group, division, everyone, world):
        self.options, self.group, self.division, self.everyone, self.world = plan.options, group, division, everyone, world
        self.rank, self.size, self.stage = group.rank, group.size, plan.options.zero_stage
        self._weight_buckets = weight_buckets(plan.options.config)
        self._sums, self._coming = {}, {}  # bucket -> (handle, adding, last) of its gradients; bucket -> handle of its weights
        self._in_slot = {}  # slot -> bucket whose weights it holds or is receiving
        self._spreading = []
        self._wants_to_stop, self._checkpoints_written = False, 0
        assert self.size == plan.options.data_ranks

    def tell_with_norm(self, *, wants_to_stop, checkpoints_written):
        self._wants_to_stop, self._checkpoints_written = wants_to_stop, checkpoints_written

    @property
    def stops(self):
        return self._acts["rank_numbers"][:, STOPS].sum()

    @property
    def written_by_all(self):
        return self._acts["rank_numbers"][:, WRITTEN].amin()

    def total(self, number):
        numbers = torch.zeros(self.size, dtype=torch.float64, device=self._model.device)
        numbers[self.rank] = number
        self.group.gather_shares([numbers]).wait()
        return sum(numbers.tolist())

    def attach(self, model):
        self._model, self._flat = model, model.flat
        o, config, acts = self.options, model.config, model.acts
        layout = flat_layout(config, self.size, self.rank, o.tensor_parallel, self.division.rank) if o.shares else ()
        self._acts, self._layout = acts, {t.name: t for t in layout}
        self._gradient_shares = acts["gradient_share"] if "gradient_share" in acts else self._flat.get("gradients")
        self._weights = {k: [model.weight(*of).view(-1) for of in bucket] for k, bucket in self._weight_buckets.items()}
        self._gradients = {k: [model.gradient(k, *of).view(-1) for of in bucket] for k, bucket in model.gradient_buckets.items()}

    # ------------------------------------------------------------------------
    # weights

    def need(self, key, then=None):
        if self.stage < 3:
            self._wait_for_weights(key)
            return
        self._fetch(key)
        self._wait_for_weights(key)
        if then is not None and weight_slot(then) != weight_slot(key):
            self._fetch(then)

    def _fetch(self, key):
        """Begin to gather a bucket's sharded weights into their slot, unless it holds them already."""
        slot = weight_slot(key)
        if self._in_slot.get(slot) != key:
            self._wait_for_weights(self._in_slot.get(slot))
            self._in_slot[slot] = key
            shares = [self._flat["parameters"][self._layout[name].layer(l)] for name, l in self._weight_buckets[key]]
            self._coming[key] = self.group.gather_shares(self._weights[key], shares)

    def _wait_for_weights(self, key):
        self._coming.pop(key, Done()).wait()

    def release(self, key):
        self._in_slot.pop(weight_slot(key), None)

    def release_all(self):
        for key in list(self._coming):
            self._wait_for_weights(key)
        self._in_slot.clear()

    def whole_weights(self):
        if self.stage < 3:
            yield self._flat["parameters"]
            return
        for t in self._layout.values():
            for l in range(t.layers):
                whole = self._model.weight(t.name, l).view(-1)
                self.group.gather_shares([whole], [self._flat["parameters"][t.layer(l)]]).wait()
                yield whole

    def barrier(self):
        self.everyone.barrier()

    def wait_for_all(self, what):
        self.world.wait_for_all(what)

    def moved(self):
        self.world.moved()

    # ------------------------------------------------------------------------
    # gradients

    def clear(self, key):
        if self.stage >= 2:
            for other in [k for k in self._sums if gradient_slot(k) == gradient_slot(key)]:
                self._take(other)

    def complete(self, key, adding, last):
        if not (last or self.options.reduces_always):
            return
        if self.division.size > 1:
            names = [name for name, _ in self._model.gradient_buckets[key]]
            self.division.group.sum_whole([t for t, name in zip(self._gradients[key], names) if name in SUMMED_OVER_PARTS]).wait()
        if not self.options.shares:
            self._sums[key] = self.group.sum_whole(self._gradients[key]), adding, last
            return
        if self.stage == 0:  # earlier sums can be spread while these are summed
            for other in list(self._sums):
                self._take(other)
        self._sums[key] = self.group.sum_shares(self._gradients[key]), adding, last

    def _take(self, key):
        """Wait for the sums of a bucket, then do what the stage requires: spread them, leave them in place, or keep this rank's share."""
        handle, adding, last = self._sums.pop(key)
        handle.wait()
        spread = self.stage == 0 and self.options.shares and last
        if self.options.reduces_always:
            for (name, l), tensor in zip(self._model.gradient_buckets[key], self._gradients[key]):
                share, new = self._gradient_shares[self._layout[name].layer(l)], self.group.share(tensor)
                share.add_(new) if adding else share.copy_(new)
                if spread:
                    new.copy_(share)
        if spread:
            self._spreading.append(self.group.gather_shares(self._gradients[key]))

    def finish(self):
        for key in list(self._sums):
            self._take(key)
        while self._spreading:
            self._spreading.pop().wait()

    def _norm_of_undivided(self):
        """Norm of those gradients from gradients() that are the same on all parts of the model."""
        flat = self._gradient_shares if self.options.shares else self._flat["gradients"]
        tensors = [t for t in self._model.layout_of("gradients", self.options.shares) if t.parameter.split is None]
        norms = [torch.linalg.vector_norm(flat[t.all_layers], dtype=torch.float32) for t in tensors]
        return torch.stack(norms).square().sum().sqrt()

    def gradients(self):
        if not self.options.shares:
            return self._flat["gradients"]
        if not self.options.reduces_always:  # else they are packed already
            for packed, whole in self._shares("gradient_share", "gradients"):
                packed.copy_(whole)
        return self._gradient_shares

    def combine(self, numbers, loss_sum, grad_norm):
        o, mine = self.options, numbers[self.everyone.rank]
        mine[LOSS].copy_(loss_sum[0])
        mine[NORM].copy_(grad_norm[0])
        mine[UNDIVIDED_NORM] = self._norm_of_undivided() if self.division.size > 1 else 0.0
        mine[STOPS] = float(self._wants_to_stop)
        mine[WRITTEN] = float(self._checkpoints_written)
        self.everyone.gather_shares([numbers.view(-1)]).wait()
        wide = numbers.double().view(o.data_ranks, o.tensor_parallel, -1)  # few, and summed in order: the same on every rank
        loss_sum.copy_(wide[:, 0, LOSS].sum())
        if o.shares or o.tensor_parallel > 1:
            # squares add up over the shares of the gradient, or one rank has all of it, and over parts; what all parts have counts once
            wide = wide[: o.data_ranks if o.shares else 1].square()
            whole, undivided = wide[:, :, NORM], wide[:, :, UNDIVIDED_NORM]
            grad_norm.copy_(((whole - undivided).sum() + undivided[:, 0].sum()).sqrt())

    # ------------------------------------------------------------------------
    # update

    def updated(self):
        if self.stage in (0, 3):
            return self._flat
        for packed, whole in self._shares("parameter_share", "parameters"):
            packed.copy_(whole)
        flat = self._flat | {"parameters": self._acts["parameter_share"]}
        return flat | {"gradients": self._gradient_shares} if self.stage == 1 else flat

    def spread(self):
        self.release_all()
        if self.stage not in (1, 2):
            return
        for packed, whole in self._shares("parameter_share", "parameters"):
            whole.copy_(packed)
        for key, tensors in self._weights.items():
            self._coming[key] = self.group.gather_shares(tensors)

    def _shares(self, packed, arena):
        """Yields for each tensor (this rank's share, packed; the same share within an arena that holds everything), both (layers, n)."""
        packed, arena = self._acts[packed], self._flat[arena]
        for t in self._layout.values():
            whole = arena[t.whole_start : t.whole_start + t.layers * t.whole_elements]
            yield packed[t.all_layers].view(t.layers, -1), whole.view(t.layers, self.size, -1)[:, self.rank]
