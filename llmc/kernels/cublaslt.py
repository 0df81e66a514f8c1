"""cuBLASLt, whose epilogues put GELU inside a matmul: llm.c's -ge 1 (forward) and -ge 2 (backward too), and our -ge 3, backward alone.

The library that torch itself runs on is called through ctypes, so there is nothing to build or install. torch offers neither the epilogue
that keeps the pre-activation nor the one that multiplies by GELU's derivative. With them, forward and backward each save one read and one
write of a (rows, 4C) tensor.

On an H200 (CUDA 13.0), at B*T of 65536, either fused matmul of d12 takes 0.89 of the time of the two separate passes. Tests that need no
GPU check constants and sizes against NVIDIA's headers and real descriptors of cuBLAS 12.8.4 and 13.10.0, and transposes and leading
dimensions against a stand-in for the library that multiplies in numpy (tests/test_cublaslt.py).

Numerics: sums are fp32, the partial sums of split-K included. The epilogue works on the fp32 sum, whereas a separate GELU reads it after
rounding to bf16, and its tanh is the library's own: results differ from llmc/layers/gelu.py in the last bits, and may differ between
versions of cuBLAS. In fp32 they differ by more, up to 2^-11, where it takes the GPU's own tanh instruction, as cuBLAS 13.1 seems to.
Whether a GPU has it fused, or as a second kernel, is up to the library: llm.c found it fused on H100 with CUDA 12.5 (PR 591).
Source: llm.c llmc/matmul.cuh; NVIDIA cublasLt.h.
"""

import ctypes
import functools
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from llmc.errors import UserError

# Values from cublas_api.h, cublasLt.h and library_types.h; the same in cuBLAS 12.8.4 and 13.10.0
DATA_TYPES = {torch.float32: 0, torch.bfloat16: 14}  # CUDA_R_32F, CUDA_R_16BF
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
OP_N, OP_T = 0, 1
EPILOGUE_GELU_AUX_BIAS, EPILOGUE_DGELU, EPILOGUE_DGELU_BGRAD = 32 | 128 | 4, 64 | 128, 64 | 128 | 16
REDUCTION_SCHEME_COMPUTE_TYPE = 2
STATUS_NOT_SUPPORTED = 15
# attribute -> (number, type): the library refuses a value of another size. The types of bias and aux are left at their default, D's type
DESC = {
    "TRANSA": (3, c_int32),
    "TRANSB": (4, c_int32),
    "EPILOGUE": (7, c_uint32),
    "BIAS_POINTER": (8, c_void_p),
    "EPILOGUE_AUX_POINTER": (11, c_void_p),
    "EPILOGUE_AUX_LD": (12, c_int64),
}
PREFERENCE = {
    "MAX_WORKSPACE_BYTES": (1, c_uint64),
    "REDUCTION_SCHEME_MASK": (3, c_uint32),
    "MIN_ALIGNMENT_A_BYTES": (5, c_uint32),
    "MIN_ALIGNMENT_B_BYTES": (6, c_uint32),
    "MIN_ALIGNMENT_C_BYTES": (7, c_uint32),
    "MIN_ALIGNMENT_D_BYTES": (8, c_uint32),
}
# function -> argument types, for those that return a status; every handle, descriptor and address is a void pointer here
SIGNATURES = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    # handle, desc, layouts of A B C D, preference, how many are wanted, results, how many were found
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, c_void_p],
    # handle, desc, alpha, A and its layout, B and its, beta, C and its, D and its, algorithm, workspace and its bytes, stream
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}

POINTER_ALIGNMENT = 16  # bytes: what tensor-core kernels and the epilogue's loads want
WORKSPACE_ALIGNMENT = 256  # bytes: as NVIDIA's TransformerEngine insists; torch's allocator gives 512
AUX_COLUMNS_MULTIPLE = 8  # elements: cublasLt.h, EPILOGUE_AUX_LD
DEVICE_TYPE = "cuda"  # tests set "cpu", together with a stand-in for the library


class NoAlgorithm(UserError, RuntimeError):
    """The library has no kernel for this operation, shape and type on this card; a separate GELU will do."""


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: the algorithm is its first field, so its address is also that of the algorithm."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class ChosenMatmul:
    """All that a matmul needs besides its pointers."""

    desc: c_void_p
    a: c_void_p
    b: c_void_p
    d: c_void_p
    result: HeuristicResult


def why_no_cublaslt() -> str:
    """Empty if cuBLASLt can be loaded, else the reason, one sentence. It says nothing about a card or a driver."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return ""


class CublasLt:
    """The library on the current CUDA device: descriptors, and the algorithms that it proposes for a matmul.

    workspace  (n_bytes,) uint8, on the device; scratch of the calls, so they must be on one stream at a time. NVIDIA's advice is 32 MiB
               on Hopper and 4 MiB before it; an algorithm that needs more than there is is not chosen.
    tf32       whether fp32 operands may be rounded to TF32 (10 bits of mantissa); bf16 ones ignore it
    """

    def __init__(self, workspace, *, tf32: bool = False):
        _check("workspace", workspace, dtype=torch.uint8, shape=(workspace.numel(),), alignment=WORKSPACE_ALIGNMENT)
        why_not = why_no_cublaslt()
        if why_not:
            raise RuntimeError(why_not)
        self._library = _library()
        self.workspace, self.version, self._tf32 = workspace, self._library.cublasLtGetVersion(), tf32
        self._handle = self._create("cublasLtCreate")
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def desc(self, dtype, **values):
        """The descriptor of a matmul of that type, with these of DESC's attributes."""
        fast = self._tf32 and dtype == torch.float32
        desc = self._create("cublasLtMatmulDescCreate", COMPUTE_32F_FAST_TF32 if fast else COMPUTE_32F, DATA_TYPES[torch.float32])
        self.set(desc, values)
        return desc

    def set(self, desc, values):
        """Give a descriptor these values of DESC's attributes."""
        self._set("cublasLtMatmulDescSetAttribute", desc, DESC, values)

    def find(self, desc, a, b, d, alignments, wanted) -> list[HeuristicResult]:
        """Algorithms that fit the workspace, for matrices of these layouts and alignments: what the library thinks fastest first."""
        align_a, align_b, align_d = alignments
        wishes = {
            "MAX_WORKSPACE_BYTES": self.workspace.numel(),
            # unsplit, or split with partial sums in fp32: as allow_bf16_reduced_precision_reduction = False asks of torch's matmuls
            "REDUCTION_SCHEME_MASK": REDUCTION_SCHEME_COMPUTE_TYPE,
            "MIN_ALIGNMENT_A_BYTES": align_a,
            "MIN_ALIGNMENT_B_BYTES": align_b,
            "MIN_ALIGNMENT_C_BYTES": align_d,
            "MIN_ALIGNMENT_D_BYTES": align_d,
        }
        preference, results, found = self._create("cublasLtMatmulPreferenceCreate"), (HeuristicResult * wanted)(), c_int(0)
        try:
            self._set("cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE, wishes)
            arguments = (self._handle, desc, a, b, d, d, preference, wanted, results, byref(found))
            status = self._call("cublasLtMatmulAlgoGetHeuristic", *arguments, unless=STATUS_NOT_SUPPORTED)
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [] if status else [result for result in results[: found.value] if result.state == 0]

    def layout(self, dtype, rows, columns):
        """The layout of a column-major matrix without gaps."""
        return self._create("cublasLtMatrixLayoutCreate", DATA_TYPES[dtype], rows, columns, rows)

    def launch(self, plan, a, b, d, c=None):
        """d = op(a) op(b), as the plan's descriptor says, plus c, which has the layout of d."""
        factor, c = (self._zero, d) if c is None else (self._one, c)  # with a factor of 0 c is not read
        self._call(
            "cublasLtMatmul", self._handle, plan.desc, byref(self._one), a.data_ptr(), plan.a, b.data_ptr(), plan.b,
            byref(factor), c.data_ptr(), plan.d, d.data_ptr(), plan.d,
            byref(plan.result), self.workspace.data_ptr(), self.workspace.numel(), _stream(d.device),
        )  # fmt: skip

    def _create(self, function, *arguments):
        made = c_void_p()
        self._call(function, byref(made), *arguments)
        return made

    def _set(self, function, descriptor, attributes, values):
        for name, value in values.items():
            number, kind = attributes[name]
            self._call(function, descriptor, number, byref(kind(value)), ctypes.sizeof(kind))

    def _call(self, function, *arguments, unless=0):
        """Call a function and return its status, 0 or `unless`. Raises RuntimeError for any other."""
        status = getattr(self._library, function)(*arguments)
        if status not in (0, unless):
            raise RuntimeError(f"{function} failed: {self._library.cublasLtGetStatusName(status).decode()}")
        return status


class MatmulGelu:
    """The two fused matmuls, with their descriptors and chosen algorithms; its arguments are CublasLt's.

    The first call with a shape, type and alignment asks the library for its best algorithm. Every later one sets two pointers and
    launches on torch.cuda.current_stream(): no allocation and no synchronization, so a CUDA graph may capture it after one such call.
    """

    def __init__(self, workspace, *, tf32: bool = False):
        self._library, self._plans = CublasLt(workspace, tf32=tf32), {}

    def forward(self, gelu_out, pre, inp, weight, bias):
        """pre = inp @ weight.T + bias; gelu_out = GELU(pre), tanh approximation.

        gelu_out  (..., OC)  written     inp     (..., C)  read     all contiguous, fp32 or bf16 alike, at multiples of 16 bytes;
        pre       (..., OC)  written     weight  (OC, C)   read     no two share memory; OC is a multiple of 8
        bias      (OC,)      read
        Cost 2*rows*C*OC FLOP. Raises ValueError naming the tensor that does not fit, NoAlgorithm.
        """
        OC, C = _rows(weight), weight.shape[-1]
        rows, dtype = _rows(inp), weight.dtype
        wanted = {"weight": (OC, C), "inp": (rows, C), "gelu_out": (rows, OC), "pre": (rows, OC), "bias": (OC,)}
        self._check_operands(wanted, weight=weight, inp=inp, gelu_out=gelu_out, pre=pre, bias=bias)
        # column-major, each row-major (r, c) is its own transpose (c, r): gelu_out.T (OC, rows) = (weight.T).T (OC, C) @ inp.T (C, rows)
        self._matmul(EPILOGUE_GELU_AUX_BIAS, OP_T, OC, rows, C, dtype, a=weight, b=inp, d=gelu_out, aux=pre, bias=bias)

    def backward(self, dpre, dout, weight, pre, dbias=None):
        """dpre = (dout @ weight) * gelu'(pre): the gradient of the linear layer after the GELU, taken through the GELU.

        dpre    (..., C)   written     dout  (..., OC)  read     all contiguous, fp32 or bf16 alike, at multiples of 16 bytes;
        weight  (OC, C)    read        pre   (..., C)   read     no two share memory; C is a multiple of 8
        dbias   (C,)       written with the sums over dpre's rows, the gradient of the bias before the GELU; or None. Training passes
                           None until a GPU is seen to repeat their bits at no cost (gpu_check's gelu_fusion measures both)
        Cost 2*rows*C*OC FLOP. Raises ValueError naming the tensor that does not fit, NoAlgorithm.
        """
        OC, C = _rows(weight), weight.shape[-1]
        rows, dtype = _rows(dout), weight.dtype
        wanted = {"weight": (OC, C), "dout": (rows, OC), "dpre": (rows, C), "pre": (rows, C), "dbias": (C,)}
        sums = {} if dbias is None else {"dbias": dbias}
        self._check_operands(wanted, weight=weight, dout=dout, dpre=dpre, pre=pre, **sums)
        epilogue = EPILOGUE_DGELU_BGRAD if sums else EPILOGUE_DGELU
        # dpre.T (C, rows) = weight.T (C, OC) @ dout.T (OC, rows): both as they lie
        self._matmul(epilogue, OP_N, C, rows, OC, dtype, a=weight, b=dout, d=dpre, aux=pre, bias=dbias)

    def _check_operands(self, wanted, **tensors):
        dtype = tensors["weight"].dtype
        if dtype not in DATA_TYPES:
            raise ValueError(f"weight is {dtype}; expected torch.float32 or torch.bfloat16")
        for name, tensor in tensors.items():
            _check(name, tensor, dtype=dtype, shape=wanted[name], alignment=POINTER_ALIGNMENT)
            if tensor.device != self._library.workspace.device:
                raise ValueError(f"{name} is on {tensor.device}; expected {self._library.workspace.device}, where the workspace is")
        if tensors["pre"].shape[-1] % AUX_COLUMNS_MULTIPLE:
            raise ValueError(f"pre has {tensors['pre'].shape[-1]} columns; expected a multiple of {AUX_COLUMNS_MULTIPLE}")

    def _matmul(self, epilogue, trans_a, m, n, k, dtype, *, a, b, d, aux, bias):
        """d (m, n) = epilogue(op(a) (m, k) @ b (k, n)), column-major; aux has the layout of d, bias is (m,)."""
        # the library judges alignment by the pointers aux and bias and by the preference: an algorithm was chosen for all of these
        alignments = tuple(_alignment(t) for t in (a, b, d, aux, bias) if t is not None)
        key = (epilogue, m, n, k, dtype, alignments)
        plan = self._plans.get(key)
        if plan is None:
            desc = self._library.desc(dtype, TRANSA=trans_a, TRANSB=OP_N, EPILOGUE=epilogue, EPILOGUE_AUX_LD=m)
            self._set_pointers(desc, aux, bias)
            plan = self._plans[key] = self._plan(desc, trans_a, m, n, k, dtype, alignments[:3])
        self._set_pointers(plan.desc, aux, bias)
        self._library.launch(plan, a, b, d)

    def _set_pointers(self, desc, aux, bias):
        values = {"EPILOGUE_AUX_POINTER": aux.data_ptr()} | ({} if bias is None else {"BIAS_POINTER": bias.data_ptr()})
        self._library.set(desc, values)

    def _plan(self, desc, trans_a, m, n, k, dtype, alignments):
        """The descriptor with layouts, and the algorithm that the library thinks fastest within the workspace."""
        shapes = ((k, m) if trans_a == OP_T else (m, k), (k, n), (m, n))
        layouts = [self._library.layout(dtype, *shape) for shape in shapes]
        found = self._library.find(desc, *layouts, alignments, 1)
        if not found:
            raise NoAlgorithm(
                f"cuBLASLt {self._library.version} has no algorithm on this card for a matmul with GELU in it, "
                f"m {m}, n {n}, k {k}, {dtype}, within a workspace of {self._library.workspace.numel()} bytes; use -ge 0"
            )
        return ChosenMatmul(desc, *layouts, found[0])


def _check(name, tensor, *, dtype, shape, alignment):
    if tensor.device.type != DEVICE_TYPE:
        raise ValueError(f"{name} is on {tensor.device}; expected a {DEVICE_TYPE} device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
    found = (_rows(tensor), tensor.shape[-1]) if len(shape) == 2 else tuple(tensor.shape)
    if found != shape:
        raise ValueError(f"{name} is {found}, leading dimensions taken together; expected {shape}")
    if 0 in shape:
        raise ValueError(f"{name} is empty; expected at least one element")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; expected it contiguous")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name} lies at {tensor.data_ptr():#x}; expected a multiple of {alignment} bytes")


def _rows(tensor) -> int:
    return tensor.shape[:-1].numel()


def _alignment(tensor) -> int:
    """The largest power of two that divides the address, up to 256, the most that cuBLASLt assumes."""
    return min(tensor.data_ptr() & -tensor.data_ptr(), 256)


def _stream(device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache  # it remembers success only
def _library():
    """The library with its argument types declared; OSError with one sentence if there is none."""
    for name in _names():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        try:
            for function, argument_types in SIGNATURES.items():
                getattr(library, function).argtypes = argument_types
            library.cublasLtGetVersion.restype = c_size_t
            library.cublasLtGetStatusName.restype = c_char_p
        except AttributeError as error:
            raise OSError(f"{name} is not the cuBLASLt that is needed here: {error}") from None
        return library
    raise OSError("libcublasLt was not found: not loaded by torch, not on the loader's path, not among the nvidia packages beside torch")


def _names():
    """What to ask the loader for, best first."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        mapped = []
    yield from sorted({line.split(maxsplit=5)[5] for line in mapped if "/libcublasLt.so" in line})  # torch's own, once it has used CUDA
    majors = [torch.version.cuda.split(".")[0]] if torch.version.cuda else ["13", "12"]
    yield from (f"libcublasLt.so.{major}" for major in majors)
    packages = Path(torch.__file__).parent.parent
    yield from (str(path) for major in majors for path in sorted(packages.glob(f"nvidia/*/lib/libcublasLt.so.{major}")))
