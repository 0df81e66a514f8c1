"""Which of a few slots a layer's numbers lie in, where layers take turns in them."""

LAYER_SLOTS = 2  # whole layers of sharded weights, and of gradients: one in use, one on its way
OFFLOAD_SLOTS = 3  # residuals on the device with --offload-residual: one in use, one on its way in, one on its way out


def layer_slot(l: int) -> int:
    """Of a layer of which only shares are kept."""
    return l % LAYER_SLOTS


def weight_slot(key):
    """Of a group of sharded weights: see layout.weight_groups."""
    return key if key == "outer" else layer_slot(key)


def offload_slot(l: int) -> int:
    """Of the output of a layer that goes to the host."""
    return l % OFFLOAD_SLOTS
