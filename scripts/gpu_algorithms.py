"""Sections of gpu_check.py: whether cuBLASLt has faster algorithms for a model's matmuls than the one it ranks first, and what is gained
if the matmul of a projection adds to the residual stream."""

from functools import partial
from itertools import starmap
from math import inf

import torch

from llmc.kernels.cublaslt import OP_N, OP_T, ChosenMatmul, CublasLt
from llmc.layers.matmul import matmul_dinput, matmul_dweight, matmul_forward
from llmc.memory.scratch_sizes import head_chunk_rows
from llmc.memory.tuning import MATMUL_WORKSPACE
from llmc.operations import operations
from scripts.gpu_common import (
    Skip, attempt, block_matmuls, check_cublaslt, factors, measure, measure_in_turn, relative_difference, table, while_time,
)  # fmt: skip

WANTED = 16  # algorithms to ask for, of each matmul
SEQUENCES = 16  # in a batch, at most
EPILOGUE_BIAS = 4  # cublasLt.h
NO_ALGORITHM = "cuBLASLt has no algorithm for it within the workspace"


class Algorithms:
    """A matmul by each of the algorithms that the library proposes."""

    def __init__(self, workspace):
        self._library = CublasLt(workspace)

    def calls(self, out, left, right, bias=None, added=None) -> list:
        """Functions that compute out (M, N) = left (M, K) @ right (K, N) + bias (N,) + added (M, N), the library's first choice first.

        All have one dtype. out and added are contiguous, and so are the others or their transposes.
        """
        # the library is column-major, so it sees each matrix as its transpose: out.T = right.T @ left.T
        (a, trans_a), (b, trans_b) = _as_it_lies(right), _as_it_lies(left)
        values = {"TRANSA": trans_a, "TRANSB": trans_b}
        if bias is not None:
            values |= {"EPILOGUE": EPILOGUE_BIAS, "BIAS_POINTER": bias.data_ptr()}
        desc = self._library.desc(out.dtype, **values)
        layouts = [self._library.layout(t.dtype, *reversed(t.shape)) for t in (a, b, out)]
        found = self._library.find(desc, *layouts, (256, 256, 256), WANTED)
        return [partial(self._library.launch, ChosenMatmul(desc, *layouts, result), a, b, out, added) for result in found]


def _as_it_lies(matrix):
    """The matrix or its transpose, whichever is contiguous; and whether the library has to transpose it."""
    return (matrix, OP_N) if matrix.is_contiguous() else (matrix.t(), OP_T)


def as_trained(form, out, x, dout, weight, bias):
    """The trainer's call for that form of matmul."""
    return {
        "forward": partial(matmul_forward, out, x, weight, bias), "dinput": partial(matmul_dinput, out, dout, weight),
        "dweight": partial(matmul_dweight, out, dout, x, accumulate=False),
    }[form]  # fmt: skip


def models(sizes) -> tuple:
    """(name, config, batch) of the usual model and of the largest; batches have at most SEQUENCES sequences."""
    (name, config, batches), usual = sizes.larger[-1], sizes.config
    return (f"d{usual.num_layers}", usual, min(sizes.B, SEQUENCES)), (name, config, min(batches[0], SEQUENCES))


def algorithms(run, record):
    check_cublaslt(run, "algorithms are")
    s = run.sizes
    for name, config, B in models(s):
        rows = []
        for matmul in while_time(run, record, shapes(run, config, B, s.T), 5, name=lambda m: f"{name} {m[0]}"):
            rows += measure_matmul(run, record, name, *matmul)
        if len(rows) == 3 * len(shapes(run, config, B, s.T)):
            table(record, "over a step").append(step_sums(name, B, rows))
    record["notes"].append(f"best: of at most {WANTED} algorithms, in the order of cuBLASLt's own estimate; forward with its bias")


def shapes(run, config, B, T) -> list[tuple]:
    """(matmul, rows, inner, outer, how often a step runs it) for each matmul of the model."""
    C, L, n = config.channels, config.num_layers, B * T
    R = head_chunk_rows(run.options(config, B, T))
    return [(matmul, n, *sizes, L) for matmul, sizes in block_matmuls(C).items()] + [("head", R, C, config.padded_vocab_size, n / R)]


def measure_matmul(run, record, model, matmul, n, inner, outer, times) -> list[dict]:
    """A row for each form of a matmul: the trainer's call, and the best of all algorithms."""
    library = Algorithms(torch.empty(MATMUL_WORKSPACE, dtype=torch.uint8, device=run.backend.device))
    sets = [(run.random(n, inner), run.random(n, outer), run.random(outer, inner)) for _ in range(2)]
    bias, rows = None if matmul == "head" else run.random(outer), []
    for form in ("forward", "dinput", "dweight"):
        with attempt(record, f"{model} {matmul} {form}"):
            products = [(left.new_empty(len(left), right.shape[1]), left, right) for left, right in (factors(form, *s) for s in sets)]
            usual = [as_trained(form, product[0], *s, bias) for product, s in zip(products, sets)]
            added = bias if form == "forward" else None
            others = list(zip(*(library.calls(*product, added) for product in products)))
            each, best = times_of(run, others)
            # the minimum of many times is low partly by chance: it is measured again, in turn with the trainer's call
            (ms, spread), (best_ms, _) = measure_in_turn(run, usual, others[best])
            row = {"model": model, "matmul": matmul, "which": form, "rows, in, out": f"{n}, {inner}, {outer}", "ms": ms, "spread": spread}
            row |= {"of matmul": run.share(2 * n * inner * outer / ms / 1e9, "bf16"), "first ms": each[0], "best ms": best_ms}
            row |= {"best of": f"{best + 1} of {len(each)}", "best/ms": best_ms / ms}
            row["relative difference"] = difference(products[0][0], usual[0], others[best][0])
            rows.append(row | {"times": times})
            table(record, "").append(row)
    return rows


def times_of(run, algorithms) -> tuple[list[float], int]:
    """Milliseconds of each of the algorithms, which are calls on several sets of inputs, and the place of the fastest.

    Those that the library proposes and then refuses to launch take forever. Raises RuntimeError where none is left.
    """
    each = [ms_or_never(run, calls) for calls in algorithms]
    if min(each, default=inf) == inf:
        raise RuntimeError(NO_ALGORITHM)
    return each, each.index(min(each))


def ms_or_never(run, calls) -> float:
    try:
        return measure(run, *calls)[0]
    except RuntimeError:
        return inf


def difference(out, usual, other) -> float:
    """The relative difference of the other's result from the usual one; both are computed into an output full of NaN."""
    results = []
    for call in (usual, other):
        out.fill_(torch.nan)
        call()
        results.append(out.clone())
    return relative_difference(results[1], results[0])


def step_sums(model, B, rows) -> dict:
    """Sums over all matmuls of a step of B sequences; an algorithm is taken only where it is faster by more than the spread."""
    usual = sum(row["times"] * row["ms"] for row in rows)
    best = sum(row["times"] * row["ms" if row["best/ms"] > 1 - row["spread"] else "best ms"] for row in rows)
    return {"model": f"{model} -b {B}", "ms": usual, "best ms": best, "best/ms": best / usual}


# ---- the residual stream


def residual_fusion(run, record):
    """A projection, and the addition to the stream with the layernorm after it: as they are now, and with the addition in the matmul."""
    check_cublaslt(run, "a projection that adds is")
    if run.kernels != "triton":
        raise Skip("the layernorm beside it is Triton's")
    ops, library = operations(run.kernels), Algorithms(torch.empty(MATMUL_WORKSPACE, dtype=torch.uint8, device=run.backend.device))
    for name, config, B in models(run.sizes):
        C, T = config.channels, run.sizes.T
        for matmul, inner in while_time(run, record, (("attproj", C), ("fcproj", 4 * C)), 5, name=lambda m: f"{name} {m[0]}"):
            with attempt(record, f"{name} {matmul}"):
                products, fused, separate, written = zip(*(projection(run, ops, library, B, T, C, inner) for _ in range(2)))
                _, best = times_of(run, zip(*products))
                fused = [partial(with_norm, multiply[best]) for with_norm, multiply in zip(fused, products)]
                (fused_ms, spread), (ms, _) = measure_in_turn(run, fused, separate)
                row = {"model": f"{name} -b {B}", "matmul": matmul, "fused ms": fused_ms, "spread": spread, "separate ms": ms}
                row |= {"fused/separate": fused_ms / ms, "relative difference": max(starmap(relative_difference, written[0]))}
                table(record, "").append(row)


def projection(run, ops, library, B, T, C, inner):
    """(products, fused, separate, pairs of the outputs that these two write): two calls on the same inputs.

    products: calls that multiply and add, one for each algorithm; fused takes one of them.
    """
    x, w, residual, bias = run.random(B, T, inner), run.random(C, inner, scale=inner**-0.5), run.random(B, T, C), run.random(C)
    lnw, lnb = run.random(C), run.random(C)
    ours, usual = ([run.random(B, T, C), run.random(B, T, C), *(torch.empty(B, T, device=x.device) for _ in range(2))] for _ in range(2))
    products = library.calls(ours[0].view(-1, C), x.view(-1, inner), w.t(), bias, residual.view(-1, C))

    def fused(multiply):
        multiply()
        stream, *rest = ours
        ops.layernorm_forward(*rest, stream, lnw, lnb, {})

    def separate():
        stream, *rest = usual
        matmul_forward(stream, x, w, bias)
        ops.residual_layernorm_forward(stream, *rest, residual, lnw, lnb, {})

    return products, fused, separate, list(zip(ours, usual))
