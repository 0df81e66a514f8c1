"""Where the residuals between blocks are while nobody reads them: on the device, or in pinned host memory.

With --offload-residual the device holds OFFLOAD_SLOTS of them, whatever the depth. Forward copies each out on a side stream while
the next block computes; backward fetches it two blocks ahead of the block that reads it. The last ones never leave the device.
"""

import torch

from llmc.memory.arena import allocate_host
from llmc.memory.plan import Plan
from llmc.memory.slots import OFFLOAD_SLOTS, offload_slot


class ResidentResiduals:
    """Every residual stays where it was written: nothing to do."""

    def before_forward(self, l):
        """Layer l is about to write its residual3."""

    def after_forward(self, l):
        """Layer l has written its residual3."""

    def before_backward(self, l):
        """Layer l is about to read its input, the residual3 of the layer below."""


class OffloadedResiduals:
    """residual3 of layer l lies in slot offload_slot(l) while a block reads or writes it, and in host memory otherwise.

    slots  (OFFLOAD_SLOTS or fewer, B, s, C) on the device, in the activation arena; host memory is allocated here, as planned.
    Copies run in order on a side stream, so one event per slot orders them with the blocks. On a CPU copies are immediate.
    """

    def __init__(self, plan: Plan, slots: torch.Tensor):
        self.slots = slots
        on_gpu = slots.device.type == "cuda"
        host = allocate_host(plan.residual_bytes, self, pinned=on_gpu)
        self.host = host.view(slots.dtype).view(plan.offloaded_layers, *slots.shape[1:])
        self.stream = torch.cuda.Stream(slots.device) if on_gpu else None
        self.copied = [torch.cuda.Event() for _ in slots] if on_gpu else None

    def before_forward(self, l):
        if l >= OFFLOAD_SLOTS:
            self._wait(l)  # until the residual that was there before has been copied out

    def after_forward(self, l):
        if l < len(self.host):
            self._copy(self.host[l], self.slots[offload_slot(l)], l)

    def before_backward(self, l):
        if l - 1 >= 0 and l - 1 < len(self.host):
            self._wait(l - 1)
        # the output of layer l was read for the last time by the layer above, so its slot can take the input of layer l - 2
        below = l - OFFLOAD_SLOTS
        if 0 <= below < len(self.host):
            self._copy(self.slots[offload_slot(l)], self.host[below], l)

    def _copy(self, target, source, l):
        """Copy on the side stream, after everything that the blocks have launched so far."""
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.copied[offload_slot(l)].record()

    def _wait(self, l):
        """Make the blocks wait for the last copy from or to the slot of layer l."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.copied[offload_slot(l)])
