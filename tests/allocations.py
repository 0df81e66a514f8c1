"""What a run allocates beside its arenas."""

import torch

MUST_BE_SEEN = 1 << 20  # bytes of a tensor that tells whether anything is seen at all


def largest_allocation(run) -> tuple[int, str]:
    """(bytes, operator) of the largest tensor that this thread makes in run(), called once before.

    Gloo's are not counted: a copy of all it is given, in threads of its own. NCCL needs none.
    """

    def is_ours(event) -> bool:
        return event is None or not event.name.startswith("c10d::") and is_ours(event.cpu_parent)

    run()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled, torch.profiler.record_function("here"):
        run()
        torch.empty(MUST_BE_SEEN, dtype=torch.uint8)
    (here,) = (event.thread for event in profiled.events() if event.name == "here")
    used = [(e.self_cpu_memory_usage, e.name) for e in profiled.events() if e.thread == here and is_ours(e)]
    used.remove((MUST_BE_SEEN, "aten::empty"))
    return max(used)
