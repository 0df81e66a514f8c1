"""AdamW over the whole arena in one launch, in every form of weights and moments: see llmc/layers/adamw.py.

A program handles a piece of one layer of one tensor, so its layer, its seeds and its decay are the same for all elements.
What changes from step to step lies in device memory, so that a captured launch can be used again.
The arithmetic is that of torch's fused CPU kernel on x86, its two fused multiply-adds included, so both give the same bits, except in
the last few elements of a tensor whose size is no multiple of 16: there the compiler of the CPU's kernel fuses another one.
"""

from llmc.kernels import door
from llmc.kernels.door import fma, jit, load, round_by, rounding_noise, tl
from llmc.layers.adamw import BETA1, BETA2, EPSILON, GRADIENT_CLIP
from llmc.memory.tuning import ROUNDING_BLOCK, UPDATE_COLUMNS
from llmc.staging import stage_chunks

# elements of a program, several working sets, so that it seldom looks for its tensor and that one's numbers; and of a working set, 8 to a
# thread: 16 bytes of bf16, a load as wide as there is. gpu_check.py --tune tries others of the second
CHUNK, ELEMENTS = 8192, 1024
ALIGNED_ELEMENTS = 16  # if every tensor and layer starts at a multiple of it, loads are as wide as they can be
# where the fp32 master is: the weights themselves, a copy, the bits that they lack, nowhere
WEIGHTS, COPY, BITS, NONE = (tl.constexpr(x) for x in range(4))
BLOCK, COLUMNS = tl.constexpr(ROUNDING_BLOCK), tl.constexpr(UPDATE_COLUMNS)
M_SHARE, V_DECAY, V_SHARE, EPS = (tl.constexpr(x) for x in (1 - BETA1, BETA2, 1 - BETA2, EPSILON))


@jit
def _adamw(
    weights, grads, m_state, v_state, master, master_bits, layout, numbers, grad_norm, clip,
    TENSORS: tl.constexpr, MASTER: tl.constexpr, ALIGNMENT: tl.constexpr, CHUNK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(CHUNK % ELEMENTS == 0)
    program = tl.program_id(0)
    tensor = 0
    for i in tl.static_range(1, TENSORS):
        tensor += (program >= tl.load(layout + COLUMNS * i)).to(tl.int32)
    row_of_layout = layout + COLUMNS * tensor  # see chunk_layout
    chunk = program - tl.load(row_of_layout).to(tl.int32)
    start = tl.multiple_of(tl.load(row_of_layout + 1), ALIGNMENT)
    layer_elements = tl.multiple_of(tl.load(row_of_layout + 2), ALIGNMENT)
    chunks = tl.load(row_of_layout + 3).to(tl.int32)
    whole_first = tl.load(row_of_layout + 4)
    layer = chunk // chunks
    first = (chunk - layer * chunks) * CHUNK
    layer_start = start + layer * layer_elements
    seed = tl.load(numbers + tensor).to(tl.uint32, bitcast=True)
    last_seed = tl.load(numbers + TENSORS + tensor).to(tl.uint32, bitcast=True)
    decay = tl.load(numbers + 2 * TENSORS + tensor).to(tl.float32, bitcast=True)
    rate = tl.load(numbers + 3 * TENSORS).to(tl.float32, bitcast=True)
    v_correction = tl.load(numbers + 3 * TENSORS + 1).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.load(grad_norm), clip)
    divisor = tl.where(ratio > 1.0, ratio, 1.0)

    for done in range(0, CHUNK, ELEMENTS):
        k = first + done + tl.arange(0, ELEMENTS)
        mask = k < layer_elements
        at = layer_start + k
        x = (whole_first + k).to(tl.uint32)
        column = x % BLOCK
        row = x - column + layer.to(tl.uint32)

        if MASTER == COPY:
            p = tl.load(master + at, mask=mask, other=0.0)
        elif MASTER == BITS:
            low = tl.load(master_bits + at, mask=mask, other=0).to(tl.uint32) & 0xFFFF
            threshold = rounding_noise(column, row, last_seed) & 0xFFFF
            upper = tl.load(weights + at, mask=mask, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
            p = (((upper - ((low + (0xFFFF - threshold)) >> 16)) << 16) | low).to(tl.float32, bitcast=True)
        else:
            p = load(weights + at, mask)

        g, m, v = load(grads + at, mask), load(m_state + at, mask), load(v_state + at, mask)  # all before any division, which is a call
        g = tl.div_rn(g, tl.zeros_like(g) + divisor)
        m = fma(tl.zeros_like(g) + M_SHARE, g - m, m)
        v = fma(g * V_SHARE, g, v * V_DECAY)
        p = p * decay + tl.div_rn(m * rate, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + v_correction) + EPS)

        noise = tl.zeros_like(x)
        if MASTER != WEIGHTS or m_state.dtype.element_ty == tl.bfloat16:
            noise = rounding_noise(column, row, seed)
        if m_state.dtype.element_ty == tl.bfloat16:
            tl.store(m_state + at, round_by(m, noise >> 16), mask=mask)
            tl.store(v_state + at, round_by(v, (noise >> 16) ^ noise), mask=mask)
        else:
            tl.store(m_state + at, m, mask=mask)
            tl.store(v_state + at, v, mask=mask)
        if MASTER == WEIGHTS:
            tl.store(weights + at, p, mask=mask)
        else:
            tl.store(weights + at, round_by(p, noise), mask=mask)
        if MASTER == COPY:
            tl.store(master + at, p, mask=mask)
        if MASTER == BITS:
            tl.store(master_bits + at, p.to(tl.uint32, bitcast=True).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


def stage_adamw_update(tensors, scratch, *, lr, weight_decay, step, grad_norm):
    """Returns what launch_adamw_update needs, which is the same for the same tensors. Scratch: see stage_chunks."""
    return stage_chunks(tensors, CHUNK, scratch, lr=lr, weight_decay=weight_decay, step=step, grad_norm=grad_norm)


def launch_adamw_update(flat, staged, scratch):
    """Launch the update that was staged, with the same scratch."""
    layout, programs = staged
    params = flat["parameters"]
    in_fp32 = params.element_size() == 4
    form = WEIGHTS if in_fp32 else COPY if "master" in flat else BITS if "master_bits" in flat else NONE
    aligned = not (layout[:, 1:3] % ALIGNED_ELEMENTS).any()
    door.launch(
        _adamw, (programs,), params, flat["gradients"], flat["m"], flat["v"], flat.get("master", params), flat.get("master_bits", params),
        scratch["update_layout"], scratch["update_numbers"], scratch["grad_norm"], GRADIENT_CLIP,
        TENSORS=len(layout), MASTER=form.value, ALIGNMENT=ALIGNED_ELEMENTS if aligned else 1, CHUNK=CHUNK, ELEMENTS=ELEMENTS, num_warps=4,
    )  # fmt: skip
