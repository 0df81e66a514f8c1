"""What ranks send one another in a step, on paper: bytes by purpose and collective, and how long links are busy with them.

The walk repeats the model's calls of need() and gathered(), over the same schedule, buckets of tensors and slots: whoever changes them in
llmc.gpt2 changes them here. The bytes are those that Group.sent counts in a run, which tests compare: as for a ring, which is the least
possible. In a reduce-scatter or an all-gather of n bytes over N ranks each sends n (N-1)/N; an all-reduce is the one followed by the other.
"""

from collections import Counter
from dataclasses import dataclass
from math import gcd, prod

from llmc.memory.ladder import backward_schedule, kept_names, segments
from llmc.memory.layout import gradient_buckets, weight_buckets
from llmc.memory.options import PlanOptions
from llmc.memory.slots import weight_slot
from llmc.memory.tables import BACKWARD_STAGES, DTYPE_BYTES, FORWARD_STAGES, SUMMED_OVER_PARTS, layer_shapes
from llmc.memory.tuning import RANK_NUMBERS

# purpose -> (among whom, whether computing waits for it). data: ranks with the same part of the model, parts: ranks with the same data
PURPOSES = {
    "gradients of layers": ("data", False),  # summed while backward goes on with the layers below
    "gradients of the embedding": ("data", True),  # the last gradients that backward completes
    "weights of layers": ("data", False),  # gathered while the layer before computes
    "weights outside layers": ("data", True),  # the first weights that forward reads
    "rows for matmuls": ("parts", True),
    "sums of matmuls": ("parts", True),
    "rows for the head": ("parts", True),
    "sums of the head": ("parts", True),
    "softmax": ("parts", True),  # over a vocabulary that is split over the parts
    "gradients all parts have": ("parts", True),
    "loss and norm": ("all", True),
}


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank sends for one purpose, by one kind of collective, in a step."""

    purpose: str
    kind: str  # reduce-scatter | all-gather | all-reduce
    bytes: int

    @property
    def among(self) -> str:
        """data | parts | all"""
        return PURPOSES[self.purpose][0]

    @property
    def waits(self) -> bool:
        """Whether computing waits for it; else computing goes on meanwhile."""
        return PURPOSES[self.purpose][1]


@dataclass(frozen=True, slots=True)
class Links:
    """How fast a rank sends to its neighbour in a ring, in Gbit/s each way.

    link     between machines, and also inside them if `inside` is 0; 0: unknown
    inside   inside a machine
    machine  ranks in each machine, which are neighbours
    """

    link: float = 0.0
    inside: float = 0.0
    machine: int = 8

    def gbit_s(self, o: PlanOptions, among: str) -> float:
        """The speed of a group's ring. It leaves a machine once, over the ports of all its ranks there; the fewest if machines differ."""
        parts = o.tensor_parallel
        size, here = {
            "parts": (parts, gcd(parts, self.machine)),
            "data": (o.data_ranks, max(1, self.machine // parts)),
            "all": (o.ranks, self.machine),
        }[among]
        if not self.inside:
            return self.link
        return self.inside if o.ranks <= self.machine or size == here else min(self.inside, here * self.link)

    def ms(self, o: PlanOptions, sent: Sent) -> float | None:
        """How long a rank is busy sending that; None where the speed is unknown."""
        return sent.bytes * 8 / (self.gbit_s(o, sent.among) * 1e9) * 1e3 if self.link else None


def step_traffic(o: PlanOptions, grad_accum_steps: int = 1) -> tuple[Sent, ...]:
    """What one rank sends in a step of `grad_accum_steps` micro-steps, the update and what follows from it included."""
    sent = Counter()
    for walk in (_gradients, _weights, _rows, _numbers):
        for purpose, kind, n_bytes in walk(o, grad_accum_steps):
            sent[purpose, kind] += n_bytes
    return tuple(Sent(purpose, kind, sent[purpose, kind]) for of in PURPOSES for purpose, kind in sent if purpose == of)


def ring(n_bytes: int, ranks: int, passes: int = 1) -> int:
    """Bytes that each rank of a ring sends for a tensor of n_bytes."""
    return passes * (n_bytes // ranks * (ranks - 1))


def _layer_bytes(o: PlanOptions, dtype: str) -> dict[str, int]:
    """Tensor -> bytes of one layer of this rank's part of it."""
    return {name: prod(shape) * DTYPE_BYTES[dtype] for name, shape in layer_shapes(o.config, o.tensor_parallel).items()}


def _gradients(o, grad_accum_steps):
    """The sum of each complete bucket: after every micro-step, or only the last; at stage 0 the sums are then spread, once."""
    n_bytes, times = _layer_bytes(o, o.grad_dtype), grad_accum_steps if o.reduces_always else 1
    for key, bucket in gradient_buckets(o.config).items():
        names = [name for name, _ in bucket]
        if o.tensor_parallel > 1:
            alike = [ring(n_bytes[name], o.tensor_parallel, 2) for name in names if name in SUMMED_OVER_PARTS]
            yield "gradients all parts have", "all-reduce", times * sum(alike)
        if o.data_ranks == 1:
            continue
        purpose = "gradients of the embedding" if key == "encoder" else "gradients of layers"
        one_pass = sum(ring(n_bytes[name], o.data_ranks) for name in names)
        if not o.shares:
            yield purpose, "all-reduce", times * 2 * one_pass
            continue
        yield purpose, "reduce-scatter", times * one_pass
        if o.zero_stage == 0:
            yield purpose, "all-gather", one_pass


def _weights(o, grad_accum_steps):
    """Stages 1 and 2 gather all weights after the update, stage 3 gathers a bucket whenever it is needed and in no slot."""
    if o.zero_stage == 0:
        return
    n_bytes, buckets = _layer_bytes(o, o.precision), weight_buckets(o.config)
    times = _fetches(o, grad_accum_steps) if o.zero_stage == 3 else dict.fromkeys(buckets, 1)
    for key, bucket in buckets.items():
        purpose = "weights outside layers" if key == "outer" else "weights of layers"
        yield purpose, "all-gather", times[key] * sum(ring(n_bytes[name], o.data_ranks) for name, _ in bucket)


def _fetches(o, grad_accum_steps) -> Counter:
    """Bucket of weights -> how often it is gathered. All micro-steps but the first find in the slots what the one before left."""
    in_slot, after = {}, []
    fetched = Counter()
    for _ in range(min(grad_accum_steps, 2)):
        for keys in _needs(o):
            for key in keys:
                if key is None:
                    in_slot.pop("outer", None)
                elif in_slot.get(weight_slot(key)) != key:
                    in_slot[weight_slot(key)] = key
                    fetched[key] += 1
        after.append(fetched.copy())
    for key in fetched:
        fetched[key] += max(0, grad_accum_steps - 2) * (after[-1][key] - after[0][key])
    return fetched


def _needs(o):
    """Yields buckets of weights in the order in which a micro-step needs them, each with the one that is gathered meanwhile, as in GPT2.
    None means that the outer ones are no longer needed."""
    L, s = o.config.num_layers, segments(o.recompute, o.config.num_layers)

    def forward(layers):
        for l, above in zip(layers, [*layers[1:], None]):
            yield _with(l, above)
            if above is not None:
                yield (above,)

    yield from (_with("outer", 0), (0,), *forward(range(L)), (None,))
    for span, again, then in s.backward():
        if again:
            yield (again[0],)
            yield from forward(again)
        for l in reversed(span):
            yield _with(l, l - 1 if l > span.start else then)


def _with(key, then):
    """The buckets that Sharing.need(key, then) gathers, unless they are there."""
    return (key,) if then is None or weight_slot(then) == weight_slot(key) else (key, then)


def _rows(o, grad_accum_steps):
    """Tensor parallelism: rows of all parts where a matmul needs them, sums where its results are partial; embedding and head included."""
    parts, L = o.tensor_parallel, o.config.num_layers
    if parts == 1:
        return
    gathers, sums = 1, 1  # the embedding's: its gradient needs all rows, its output is a sum over parts
    again = sum(map(len, segments(o.recompute, L).again))
    for stages, times in ((FORWARD_STAGES, L + again), (backward_schedule(o.recompute), L)):
        of_block = _gathers_and_sums(o, stages)
        gathers, sums = gathers + times * of_block[0], sums + times * of_block[1]
    rows = o.B * o.T
    stream = grad_accum_steps * ring(rows * o.config.channels * DTYPE_BYTES[o.precision], parts)
    yield "rows for matmuls", "all-gather", gathers * stream
    yield "sums of matmuls", "reduce-scatter", sums * stream
    yield "rows for the head", "all-gather", stream
    yield "sums of the head", "reduce-scatter", stream
    of_each_row = 3 * DTYPE_BYTES["fp32"]  # its largest logit, the sum of exponentials, the target's logit
    yield "softmax", "all-reduce", grad_accum_steps * ring(rows * of_each_row, parts, passes=2)


def _gathers_and_sums(o, stages) -> tuple[int, int]:
    """How often the stages of a block gather the stream, unless the buffer still holds the rows they need, and sum into it."""
    kept = {"ln1", "ln2"} & set(kept_names(o.recompute)) if o.keeps_all_rows else set()
    backward = {stage.name for stage in BACKWARD_STAGES}
    gathers, sums, there = 0, 0, None  # there: the tensor whose rows the buffer holds
    for stage in stages:
        if stage.gathers in kept:
            gathers += stage.name not in backward
        elif stage.gathers and stage.gathers != there:
            gathers, there = gathers + 1, stage.gathers
        sums += stage.sums
        if stage.sums or there in stage.writes:
            there = None
    return gathers, sums


def _numbers(o, _):
    """The numbers that all ranks tell one another once a step."""
    if o.ranks > 1:
        yield "loss and norm", "all-gather", ring(o.ranks * RANK_NUMBERS * DTYPE_BYTES["fp32"], o.ranks)
