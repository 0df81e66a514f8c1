"""Layers that take turns in a few slots of memory: how many slots there are, and which of them a layer takes."""

LAYER_SLOTS = 2  # whole layers of sharded weights, and of gradients: one in use, one in transit
OFFLOAD_SLOTS = 3  # residuals on the device with --offload-residual: one in use, one on its way in, one on its way out


def layer_slot(l: int) -> int:
    """The slot of a layer whose weights or gradients are sharded."""
    return l % LAYER_SLOTS


def weight_slot(key):
    """The slot of a bucket of sharded weights: see layout.weight_buckets."""
    return key if key == "outer" else layer_slot(key)


def gradient_slot(key):
    """The slot of a bucket of sharded gradients: see layout.gradient_buckets."""
    return "outer" if key in ("lnf", "encoder") else layer_slot(key)


def offload_slot(l: int) -> int:
    """The slot of a layer's output, where outputs go to the host."""
    return l % OFFLOAD_SLOTS
