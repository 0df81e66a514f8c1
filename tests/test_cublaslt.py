"""GELU inside a matmul: through a stand-in for cuBLASLt that multiplies in numpy, through real descriptors, and on a GPU.

The stand-in takes the same C calls at the same addresses, column-major as the library is, so a wrong transpose, size or leading dimension
shows as a wrong number.
"""

import ctypes
import re
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from ctypes.util import find_library
from functools import reduce
from operator import or_
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmc.kernels import cublaslt
from llmc.kernels.cublaslt import DESC, PREFERENCE, MatmulGelu, NoAlgorithm
from oracle import assert_as_good_as_eager
from scripts import gpu_algorithms
from scripts.gpu_common import factors

INTERNAL_ERROR, NOT_SUPPORTED = 14, 15
STATUS_NAMES = {INTERNAL_ERROR: b"CUBLAS_STATUS_INTERNAL_ERROR", NOT_SUPPORTED: b"CUBLAS_STATUS_NOT_SUPPORTED"}
STREAM = 0x5EED
# from cublasLt.h: what the stand-in knows these numbers as
NUMBERS = {"TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8, "EPILOGUE_AUX_POINTER": 11, "EPILOGUE_AUX_LD": 12}
LAYOUT = {"TYPE": (0, c_uint32), "ROWS": (2, c_uint64), "COLS": (3, c_uint64), "LD": (4, c_int64)}
COMPUTE_AND_SCALE_TYPE = {"COMPUTE_TYPE": (0, c_int32), "SCALE_TYPE": (1, c_int32)}

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# rows, inner, columns: the least there is, sizes without a common divisor, and GPT-2's width
shapes = pytest.mark.parametrize("rows, inner, columns", [(1, 1, 8), (7, 13, 24), (5, 768, 3072)])


class FakeLibrary:
    """cuBLASLt as Python: descriptors in dictionaries, GEMMs in numpy. Its functions are C functions of the door's own signatures."""

    def __init__(self, found=1, status=0, state=0):
        self.found, self.status, self.state = found, status, state  # what the search for an algorithm answers
        self.calls, self.objects, self.matmuls, self.searches, self.failures = [], {}, [], [], []
        for name, argument_types in cublaslt.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *argument_types)(self._recorded(name)))

    def _recorded(self, name):
        def call(*arguments):
            self.calls.append(name)
            try:
                return getattr(self, name.removeprefix("cublasLt"))(*arguments) or 0
            except Exception as error:  # ctypes would drop it
                self.failures.append(error)
                return INTERNAL_ERROR

        return call

    def cublasLtGetVersion(self):
        return 130000

    def cublasLtGetStatusName(self, status):
        return STATUS_NAMES[status]

    def _new(self, out, **values):
        handle = 1000 + len(self.objects)
        self.objects[handle] = values
        ctypes.cast(out, POINTER(c_void_p))[0] = handle

    def _set(self, table, handle, number, buffer, size):
        name, kind = next((name, kind) for name, (n, kind) in table.items() if n == number)
        assert size == ctypes.sizeof(kind) and number == NUMBERS.get(name, number), name
        self.objects[handle][name] = kind.from_address(buffer).value

    def Create(self, out):
        self._new(out)

    def MatmulDescCreate(self, out, compute_type, scale_type):
        self._new(out, COMPUTE_TYPE=compute_type, SCALE_TYPE=scale_type, TRANSA=0, TRANSB=0, EPILOGUE=1)

    def MatmulDescSetAttribute(self, *arguments):
        self._set(DESC, *arguments)

    def MatrixLayoutCreate(self, out, data_type, rows, columns, ld):
        self._new(out, TYPE=data_type, ROWS=rows, COLS=columns, LD=ld)

    def MatmulPreferenceCreate(self, out):
        self._new(out, REDUCTION_SCHEME_MASK=7)

    def MatmulPreferenceSetAttribute(self, *arguments):
        self._set(PREFERENCE, *arguments)

    def MatmulPreferenceDestroy(self, preference):
        del self.objects[preference]

    def desc(self, handle):
        return dict(self.objects[handle])

    def layout(self, handle):
        return dict(self.objects[handle])

    def preference(self, handle):
        return dict(self.objects[handle])

    def MatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, wanted, results, found):
        self.searches.append((self.desc(desc), self.preference(preference)))
        # structs of 96 bytes: 8 words of algorithm, the workspace it needs, the state, a float, 4 reserved ints
        assert ctypes.sizeof(cublaslt.HeuristicResult) == 96
        for i in range(min(self.found, wanted)):
            for offset, value in ((0, 77 + i), (56, 77 + i), (64, 1024), (72, self.state)):
                c_uint64.from_address(results + 96 * i + offset).value = value
        c_int.from_address(found).value = min(self.found, wanted)
        return self.status

    def Matmul(self, handle, desc, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, algorithm, workspace, n_bytes, stream):
        desc, (la, lb, lc, ld) = self.desc(desc), (self.layout(x) for x in (layout_a, layout_b, layout_c, layout_d))
        algorithms = {c_uint64.from_address(algorithm + offset).value for offset in (0, 56)}
        call = dict(desc=desc, layouts=(la, lb, ld), pointers=(a, b, d), workspace=(workspace, n_bytes), stream=stream)
        call |= {"algorithm": algorithms.pop()}
        self.matmuls.append(call)
        alpha, beta = (ctypes.c_float.from_address(factor).value for factor in (alpha, beta))
        assert alpha == 1.0 and beta == float(c != d)
        assert not algorithms and lc == ld and desc["SCALE_TYPE"] == 0
        x, y = (read(t, layout).T if desc[turned] else read(t, layout) for t, layout, turned in ((a, la, "TRANSA"), (b, lb, "TRANSB")))
        out = x @ y
        assert out.shape == (ld["ROWS"], ld["COLS"])
        bias = {"TYPE": ld["TYPE"], "ROWS": len(out), "COLS": 1, "LD": len(out)}
        if beta:
            out = out + read(c, lc)
        if desc["EPILOGUE"] & 4:
            out = out + read(desc["BIAS_POINTER"], bias)
        if desc["EPILOGUE"] in (1, 4):
            write(d, ld, out)
            return
        aux = ld | {"LD": desc["EPILOGUE_AUX_LD"]}
        if desc["EPILOGUE"] == 164:
            write(desc["EPILOGUE_AUX_POINTER"], aux, out)
            out = F.gelu(torch.from_numpy(out), approximate="tanh").numpy()
        else:
            assert desc["EPILOGUE"] in (192, 208)
            pre = torch.from_numpy(read(desc["EPILOGUE_AUX_POINTER"], aux))
            out = torch.ops.aten.gelu_backward(torch.from_numpy(out), pre, approximate="tanh").numpy()
            if desc["EPILOGUE"] == 208:
                write(desc["BIAS_POINTER"], bias, out.sum(1, keepdims=True))
        write(d, ld, out)


def at(address, layout):
    """The matrix as it lies, column-major, as fp32 or as the bits of bf16."""
    dtype = np.dtype({0: np.float32, 14: np.uint16}[layout["TYPE"]])
    rows, columns, ld = layout["ROWS"], layout["COLS"], layout["LD"]
    memory = (ctypes.c_char * (dtype.itemsize * (ld * (columns - 1) + rows))).from_address(address)
    return np.ndarray((rows, columns), dtype, memory, strides=(dtype.itemsize, dtype.itemsize * ld))


def read(address, layout):
    found = at(address, layout)
    wide = (found.astype(np.uint32) << 16).view(np.float32) if found.dtype == np.uint16 else found
    return wide.astype(np.float64)


def write(address, layout, values):
    to = at(address, layout)
    values = torch.from_numpy(np.ascontiguousarray(values)).float()
    to[...] = values.bfloat16().view(torch.int16).numpy().view(np.uint16) if to.dtype == np.uint16 else values.numpy()


def stand_in(monkeypatch, library):
    """Give the door `library` and let it take CPU tensors."""
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt, "_stream", lambda device: STREAM)
    monkeypatch.setattr(cublaslt, "DEVICE_TYPE", "cpu")
    return library


@pytest.fixture
def fake(monkeypatch):
    library = stand_in(monkeypatch, FakeLibrary())
    yield library
    assert library.failures == []


def workspace(n_bytes=4096, device="cpu"):
    """At a multiple of 256 bytes, as from CUDA's allocator; a CPU's gives 64."""
    buffer = torch.empty(n_bytes + 256, dtype=torch.uint8, device=device)
    return buffer[-buffer.data_ptr() % 256 :][:n_bytes]


def unwritten(*shape, dtype, device="cpu"):
    return workspace(torch.Size(shape).numel() * dtype.itemsize, device).view(dtype).view(shape).fill_(torch.nan)


def normal(*shape, dtype, device="cpu", seed=0, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return unwritten(*shape, dtype=dtype, device=device).copy_(values)


def floor_of_gelu(dtype, device) -> float:
    """Roundings. A card's GELU in fp32 is rougher than torch's: on an H200 (CUDA 13.0) off by up to 54 in norm, and 152 for one number."""
    return 200.0 if (dtype, device) == (torch.float32, "cuda") else 1.0


def check_forward(kernel, rows, C, OC, dtype, device="cpu"):
    """pre and gelu_out against fp64, within twice the error of torch's own linear and GELU."""
    inp, weight = normal(rows, C, dtype=dtype, device=device), normal(OC, C, dtype=dtype, device=device, seed=1, scale=C**-0.5)
    bias = normal(OC, dtype=dtype, device=device, seed=2)
    gelu_out, pre = (unwritten(rows, OC, dtype=dtype, device=device) for _ in range(2))
    kernel.forward(gelu_out, pre, inp, weight, bias)
    eager = F.linear(inp, weight, bias)
    exact = F.linear(inp.double(), weight.double(), bias.double())
    assert_as_good_as_eager(pre, eager, exact, what="pre")
    gelu = {"approximate": "tanh"}
    assert_as_good_as_eager(gelu_out, F.gelu(eager, **gelu), F.gelu(exact, **gelu), floor=floor_of_gelu(dtype, device), what="gelu_out")
    return gelu_out, pre, inp, weight, bias


def check_backward(kernel, rows, OC, C, dtype, device="cpu", with_bias=False):
    """dpre, and dbias if asked for, against fp64, within twice the error of torch's own matmul, GELU gradient and sum."""
    dout, pre = normal(rows, OC, dtype=dtype, device=device), normal(rows, C, dtype=dtype, device=device, seed=1)
    weight = normal(OC, C, dtype=dtype, device=device, seed=2, scale=OC**-0.5)
    dpre, sums = unwritten(rows, C, dtype=dtype, device=device), [unwritten(C, dtype=dtype, device=device)] * with_bias
    kernel.backward(dpre, dout, weight, pre, *sums)

    def plain(dout, weight, pre):
        return torch.ops.aten.gelu_backward(dout @ weight, pre, approximate="tanh")

    exact = plain(dout.double(), weight.double(), pre.double())
    eager, floor = plain(dout, weight, pre), floor_of_gelu(dtype, device)
    assert_as_good_as_eager(dpre, eager, exact, floor=floor, what="dpre")
    for dbias in sums:
        assert_as_good_as_eager(dbias, eager.sum(0), exact.sum(0), floor=floor, what="dbias")
    return dpre, dout, weight, pre, *sums


@dtypes
@shapes
def test_forward_is_linear_then_gelu(fake, rows, inner, columns, dtype):
    check_forward(MatmulGelu(workspace()), rows, inner, columns, dtype)


@dtypes
@shapes
@pytest.mark.parametrize("with_bias", [False, True])
def test_backward_is_matmul_times_the_derivative_of_gelu(fake, rows, inner, columns, dtype, with_bias):
    check_backward(MatmulGelu(workspace()), rows, inner, columns, dtype, with_bias=with_bias)


def test_leading_dimensions_of_a_batch_are_rows(fake):
    """(B, T, C) buffers give what (B*T, C) ones give."""
    kernel, three = MatmulGelu(workspace()), normal(2, 3, 16, dtype=torch.float32)
    weight, bias = normal(8, 16, dtype=torch.float32, seed=1), normal(8, dtype=torch.float32, seed=2)
    outputs = [[unwritten(*shape, dtype=torch.float32) for _ in range(2)] for shape in ((2, 3, 8), (6, 8))]
    kernel.forward(*outputs[0], three, weight, bias)
    kernel.forward(*outputs[1], three.view(6, 16), weight, bias)
    for a, b in zip(*outputs):
        assert torch.equal(a.view(6, 8), b)


@pytest.mark.parametrize(
    "dtype, tf32, data_type, compute_type",
    [(torch.float32, False, 0, 68), (torch.float32, True, 0, 77), (torch.bfloat16, False, 14, 68), (torch.bfloat16, True, 14, 68)],
)
def test_the_forward_call_is_llm_cs(fake, dtype, tf32, data_type, compute_type):
    """m = OC, n = rows, k = C; the weight transposed, the rest as it lies; GELU_AUX_BIAS; aux and bias by pointer."""
    scratch = workspace(8192)
    gelu_out, pre, inp, weight, bias = check_forward(MatmulGelu(scratch, tf32=tf32), 7, 13, 24, dtype)
    (call,) = fake.matmuls
    assert call["desc"] == {
        "COMPUTE_TYPE": compute_type, "SCALE_TYPE": 0, "TRANSA": 1, "TRANSB": 0, "EPILOGUE": 164,
        "EPILOGUE_AUX_POINTER": pre.data_ptr(), "EPILOGUE_AUX_LD": 24, "BIAS_POINTER": bias.data_ptr(),
    }  # fmt: skip
    assert call["layouts"] == tuple({"TYPE": data_type, "ROWS": r, "COLS": c, "LD": r} for r, c in ((13, 24), (13, 7), (24, 7)))
    assert call["pointers"] == (weight.data_ptr(), inp.data_ptr(), gelu_out.data_ptr())
    assert call["workspace"] == (scratch.data_ptr(), 8192) and call["stream"] == STREAM


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_backward_call_is_llm_cs(fake, with_bias):
    """m = C, n = rows, k = OC; nothing transposed; DGELU; aux by pointer, no bias. Sums over rows are no call of llm.c's."""
    dpre, dout, weight, pre, *sums = check_backward(MatmulGelu(workspace()), 7, 13, 24, torch.bfloat16, with_bias=with_bias)
    (call,) = fake.matmuls
    assert call["desc"] == {
        "COMPUTE_TYPE": 68, "SCALE_TYPE": 0, "TRANSA": 0, "TRANSB": 0, "EPILOGUE": 208 if with_bias else 192,
        "EPILOGUE_AUX_POINTER": pre.data_ptr(), "EPILOGUE_AUX_LD": 24, **{"BIAS_POINTER": t.data_ptr() for t in sums},
    }  # fmt: skip
    assert call["layouts"] == tuple({"TYPE": 14, "ROWS": r, "COLS": c, "LD": r} for r, c in ((24, 13), (13, 7), (24, 7)))
    assert call["pointers"] == (weight.data_ptr(), dout.data_ptr(), dpre.data_ptr())


def test_later_calls_only_set_pointers_and_launch(fake):
    """The first call of a shape searches; the second, with other tensors, gets its own pointers into the same plan."""
    kernel, forward = MatmulGelu(workspace()), (5, 768, 3072, torch.float32)
    kept = check_forward(kernel, *forward)
    first, fake.calls[:] = list(fake.calls), []
    assert first.count("cublasLtMatmulAlgoGetHeuristic") == 1
    assert first.index("cublasLtMatmulAlgoGetHeuristic") < first.index("cublasLtMatmul") == len(first) - 1
    check_forward(kernel, *forward)  # `kept` is alive, so these lie elsewhere
    assert fake.calls == ["cublasLtMatmulDescSetAttribute", "cublasLtMatmulDescSetAttribute", "cublasLtMatmul"]
    assert fake.matmuls[1]["pointers"] != fake.matmuls[0]["pointers"] and kept[0].data_ptr() == fake.matmuls[0]["pointers"][2]
    check_forward(kernel, 5, 768, 3072, torch.bfloat16)  # another type, another operation: searched anew
    check_backward(kernel, 5, 768, 3072, torch.float32)
    assert fake.calls.count("cublasLtMatmulAlgoGetHeuristic") == 2


def test_the_search_knows_workspace_and_alignment(fake):
    """An algorithm chosen for aligned tensors is not used for others; partial sums stay fp32; pointers are set before the search."""
    kernel, store = MatmulGelu(workspace(8192)), workspace(1 << 16).view(torch.float32)
    place = [store[4096 * i :] for i in range(4)]

    def backward(shift):
        dpre, dout, weight, pre = (p[shift:][: 8 * 8].view(8, 8) for p in place)
        kernel.backward(dpre, dout.zero_(), weight.zero_(), pre.zero_())
        return pre

    backward(0), backward(0), backward(64)  # 64 elements are 256 bytes
    assert len(fake.searches) == 1
    pre = backward(4)
    assert len(fake.searches) == 2
    for (desc, preference), alignment in zip(fake.searches, (256, 16)):
        aligned = {f"MIN_ALIGNMENT_{matrix}_BYTES": alignment for matrix in "ABCD"}
        assert preference == {"MAX_WORKSPACE_BYTES": 8192, "REDUCTION_SCHEME_MASK": 2} | aligned
    assert desc["EPILOGUE_AUX_POINTER"] == pre.data_ptr()


@dtypes
@pytest.mark.parametrize("rows, C, OC", [(1, 8, 8), (7, 16, 24)])
def test_other_algorithms_compute_the_same_matmul(monkeypatch, rows, C, OC, dtype):
    """All three of a linear layer, two of which lie transposed; each of as many algorithms as there are, in the library's order."""
    library = stand_in(monkeypatch, FakeLibrary(found=3))
    x, dout = normal(rows, C, dtype=dtype), normal(rows, OC, dtype=dtype, seed=1)
    weight, bias = normal(OC, C, dtype=dtype, seed=2), normal(OC, dtype=dtype, seed=3)
    for form in ("forward", "dinput", "dweight"):
        left, right = factors(form, x, dout, weight)
        out = unwritten(len(left), right.shape[1], dtype=dtype)
        added = [bias, normal(rows, OC, dtype=dtype, seed=4)] if form == "forward" else []
        calls = gpu_algorithms.Algorithms(workspace()).calls(out, left, right, *added)
        eager, exact = left @ right, left.double() @ right.double()
        for more in added:
            eager, exact = eager + more, exact + more.double()
        for number, call in enumerate(calls):
            out.fill_(torch.nan)
            call()
            assert_as_good_as_eager(out, eager, exact, what=form)
            assert library.matmuls[-1]["algorithm"] == 77 + number
        assert len(calls) == 3
    assert library.failures == []


def test_no_algorithm_at_all_is_an_empty_list(monkeypatch):
    stand_in(monkeypatch, FakeLibrary(found=0))
    x = normal(8, 8, dtype=torch.float32)
    assert gpu_algorithms.Algorithms(workspace()).calls(torch.empty_like(x), x, x) == []


@pytest.mark.parametrize("answer", [dict(found=0), dict(found=0, status=NOT_SUPPORTED), dict(state=NOT_SUPPORTED)], ids=str)
def test_no_algorithm_is_said_in_a_sentence(monkeypatch, answer):
    library = stand_in(monkeypatch, FakeLibrary(**answer))
    with pytest.raises(NoAlgorithm, match=r"cuBLASLt 130000 has no algorithm .* m 24, n 7, k 13, torch.float32"):
        check_forward(MatmulGelu(workspace()), 7, 13, 24, torch.float32)
    assert library.calls[-1] == "cublasLtMatmulPreferenceDestroy" and library.matmuls == []


def test_a_failing_call_is_named_with_its_status(monkeypatch):
    stand_in(monkeypatch, FakeLibrary(status=INTERNAL_ERROR))
    with pytest.raises(RuntimeError, match="^cublasLtMatmulAlgoGetHeuristic failed: CUBLAS_STATUS_INTERNAL_ERROR$"):
        check_forward(MatmulGelu(workspace()), 7, 13, 24, torch.float32)


def good_arguments():
    shapes = {"gelu_out": (6, 16), "pre": (6, 16), "inp": (6, 8), "weight": (16, 8), "bias": (16,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "name, change, sentence",
    [
        ("weight", lambda t: t.half(), "weight is torch.float16; expected torch.float32 or torch.bfloat16"),
        ("inp", lambda t: t.bfloat16(), "inp is torch.bfloat16; expected torch.float32"),
        ("pre", lambda t: t.bfloat16(), "pre is torch.bfloat16; expected torch.float32"),
        ("inp", lambda t: torch.zeros(6, 9), r"inp is \(6, 9\), .* expected \(6, 8\)"),
        ("gelu_out", lambda t: torch.zeros(5, 16), r"gelu_out is \(5, 16\), .* expected \(6, 16\)"),
        ("bias", lambda t: torch.zeros(1, 16), r"bias is \(1, 16\), .* expected \(16,\)"),
        ("inp", lambda t: torch.zeros(8, 6).t(), r"inp has strides \(1, 6\); expected it contiguous"),
        ("bias", lambda t: torch.zeros(17)[1:], "bias lies at 0x.*; expected a multiple of 16 bytes"),
        ("weight", lambda t: torch.zeros(129)[1:].view(16, 8), "weight lies at 0x.*; expected a multiple of 16 bytes"),
        ("inp", lambda t: torch.zeros(6, 8, device="meta"), "inp is on meta; expected a cpu device"),
        ("inp", lambda t: torch.zeros(0, 8), "inp is empty"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(fake, name, change, sentence):
    arguments = good_arguments()
    arguments[name] = change(arguments[name])
    if name == "inp" and len(arguments["inp"]) == 0:
        arguments |= {"gelu_out": torch.zeros(0, 16), "pre": torch.zeros(0, 16)}
    kernel = MatmulGelu(workspace())
    with pytest.raises(ValueError, match=sentence):
        kernel.forward(**arguments)
    assert fake.calls == ["cublasLtCreate"]


def test_columns_of_pre_come_in_eights(fake):
    kernel = MatmulGelu(workspace())
    with pytest.raises(ValueError, match="pre has 12 columns; expected a multiple of 8"):
        kernel.forward(torch.zeros(6, 12), torch.zeros(6, 12), torch.zeros(6, 8), torch.zeros(12, 8), torch.zeros(12))
    with pytest.raises(ValueError, match="pre has 12 columns; expected a multiple of 8"):
        kernel.backward(torch.zeros(6, 12), torch.zeros(6, 8), torch.zeros(8, 12), torch.zeros(6, 12))


def test_the_workspace_is_bytes_at_256(fake):
    with pytest.raises(ValueError, match="workspace is torch.float32; expected torch.uint8"):
        MatmulGelu(torch.zeros(64))
    with pytest.raises(ValueError, match="workspace lies at 0x.*; expected a multiple of 256 bytes"):
        MatmulGelu(workspace()[16:])
    with pytest.raises(ValueError, match="workspace is empty"):
        MatmulGelu(workspace(0))


def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="workspace is on cpu; expected a cuda device"):
        MatmulGelu(workspace())


def test_without_the_library_there_is_a_sentence(monkeypatch):
    """Nothing to load is one sentence, something else by that name another; the class raises what why_no_cublaslt() says."""
    cublaslt._library.cache_clear()
    monkeypatch.setattr(cublaslt, "DEVICE_TYPE", "cpu")
    for name, sentence in (("libcublasLt.so.none", "was not found"), (find_library("c"), "is not the cuBLASLt that is needed here")):
        monkeypatch.setattr(cublaslt, "_names", lambda: [name])
        assert sentence in cublaslt.why_no_cublaslt()
        with pytest.raises(RuntimeError, match=sentence):
            MatmulGelu(workspace())


@pytest.fixture
def real():
    """A real libcublasLt: its descriptors live on the host and need no GPU."""
    why_not = cublaslt.why_no_cublaslt()
    if why_not:
        pytest.skip(why_not)
    library = cublaslt._library()
    assert "/libcublasLt.so" in next(cublaslt._names())  # what this process has loaded comes first
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{kind}GetAttribute").argtypes = [c_void_p, c_int, c_void_p, ctypes.c_size_t, c_void_p]
    return library


def stored(library, kind, descriptor, attributes):
    """What the library holds, asked for with our numbers and types; it refuses a size that is not the attribute's."""
    get, values, needed = getattr(library, f"cublasLt{kind}GetAttribute"), {}, ctypes.c_size_t()
    for name, (number, value_type) in attributes.items():
        assert get(descriptor, number, None, 0, ctypes.byref(needed)) == 0, name
        assert needed.value == ctypes.sizeof(value_type), name
        value = value_type()
        assert get(descriptor, number, ctypes.byref(value), ctypes.sizeof(value), None) == 0, name
        values[name] = value.value
    return values


class RealDescriptors(FakeLibrary):
    """The stand-in, with all that needs no GPU done by the real library: what it multiplies by is read back from there."""

    def __init__(self, library):
        super().__init__()
        self.real = library
        for name in cublaslt.SIGNATURES:
            if name not in ("cublasLtCreate", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"):
                setattr(self, name, getattr(library, name))

    def desc(self, handle):
        found = stored(self.real, "MatmulDesc", handle, DESC | COMPUTE_AND_SCALE_TYPE)
        return {name: value for name, value in found.items() if value is not None}

    def layout(self, handle):
        return stored(self.real, "MatrixLayout", handle, LAYOUT)

    def preference(self, handle):
        return stored(self.real, "MatmulPreference", handle, PREFERENCE)


@pytest.fixture
def real_descriptors(real, monkeypatch):
    library = stand_in(monkeypatch, RealDescriptors(real))
    yield library
    assert library.failures == []


def test_real_library_has_the_attributes_under_our_numbers(real):
    """Fresh descriptors hold the defaults that cublasLt.h gives for these names."""
    assert real.cublasLtGetVersion() >= 120000
    desc, layout, preference = c_void_p(), c_void_p(), c_void_p()
    assert real.cublasLtMatmulDescCreate(ctypes.byref(desc), 77, 0) == 0
    fresh = {"TRANSA": 0, "TRANSB": 0, "EPILOGUE": 1, "BIAS_POINTER": None, "EPILOGUE_AUX_POINTER": None, "EPILOGUE_AUX_LD": 0}
    found = stored(real, "MatmulDesc", desc, DESC | COMPUTE_AND_SCALE_TYPE)
    assert found == fresh | {"COMPUTE_TYPE": 77, "SCALE_TYPE": 0}
    assert real.cublasLtMatrixLayoutCreate(ctypes.byref(layout), 14, 5, 7, 11) == 0
    assert stored(real, "MatrixLayout", layout, LAYOUT) == {"TYPE": 14, "ROWS": 5, "COLS": 7, "LD": 11}
    assert real.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)) == 0
    fresh = {"MAX_WORKSPACE_BYTES": 0, "REDUCTION_SCHEME_MASK": 7} | {f"MIN_ALIGNMENT_{matrix}_BYTES": 256 for matrix in "ABCD"}
    assert stored(real, "MatmulPreference", preference, PREFERENCE) == fresh
    assert real.cublasLtMatmulPreferenceDestroy(preference) == 0


def test_numbers_are_those_of_the_header_beside_the_library(real):
    """NVIDIA's wheels and toolkits have include/ beside lib/."""
    include = Path(next(cublaslt._names())).parent.parent / "include"
    if not (include / "cublasLt.h").exists():
        pytest.skip(f"no cublasLt.h in {include}")
    header, text = {}, "".join((include / name).read_text() for name in ("cublas_api.h", "cublasLt.h"))
    for name, expression in re.findall(r"(CUBLAS\w+) = ([\w(][\w |()]*)", text):
        parts = [part.strip("() ") for part in expression.split("|")]
        if all(part.isdigit() or part in header for part in parts):
            header[name] = reduce(or_, (int(part) if part.isdigit() else header[part] for part in parts))
    ours = {f"CUBLASLT_MATMUL_DESC_{name}": number for name, (number, _) in (DESC | COMPUTE_AND_SCALE_TYPE).items()}
    ours |= {f"CUBLASLT_MATMUL_PREF_{name}": number for name, (number, _) in PREFERENCE.items()}
    ours |= {f"CUBLASLT_MATRIX_LAYOUT_{name}": number for name, (number, _) in LAYOUT.items()}
    for name in ("EPILOGUE_GELU_AUX_BIAS", "EPILOGUE_DGELU", "EPILOGUE_DGELU_BGRAD", "REDUCTION_SCHEME_COMPUTE_TYPE"):
        ours[f"CUBLASLT_{name}"] = getattr(cublaslt, name)
    for name in ("COMPUTE_32F", "COMPUTE_32F_FAST_TF32", "OP_N", "OP_T", "STATUS_NOT_SUPPORTED"):
        ours[f"CUBLAS_{name}"] = getattr(cublaslt, name)
    assert ours == {name: header.get(name) for name in ours}


def test_real_library_names_its_statuses(real):
    wrong_size = c_int(1)
    desc = c_void_p()
    assert real.cublasLtMatmulDescCreate(ctypes.byref(desc), 68, 0) == 0
    status = real.cublasLtMatmulDescSetAttribute(desc, DESC["EPILOGUE_AUX_LD"][0], ctypes.byref(wrong_size), 4)
    assert real.cublasLtGetStatusName(status) == b"CUBLAS_STATUS_INVALID_VALUE"
    assert real.cublasLtGetStatusName(cublaslt.STATUS_NOT_SUPPORTED) == b"CUBLAS_STATUS_NOT_SUPPORTED"


@dtypes
@shapes
def test_real_descriptors_hold_what_both_operations_set(real_descriptors, rows, inner, columns, dtype):
    """Twice each, so that pointers of a plan already made are among what is read back."""
    kernel = MatmulGelu(workspace())
    kept = [check(kernel, rows, inner, columns, dtype) for _ in range(2) for check in (check_forward, check_backward)]
    assert len(real_descriptors.matmuls) == len(kept) == 4
    assert real_descriptors.searches[0][1]["REDUCTION_SCHEME_MASK"] == 2
    assert real_descriptors.searches[0][1]["MAX_WORKSPACE_BYTES"] == 4096


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here, so this does not fail")
def test_real_library_without_a_card_is_an_error_with_its_name(real, monkeypatch):
    monkeypatch.setattr(cublaslt, "DEVICE_TYPE", "cpu")
    with pytest.raises(RuntimeError, match="^cublasLtCreate failed: CUBLAS_STATUS_NOT_INITIALIZED$"):
        MatmulGelu(workspace())


@pytest.fixture
def switches():
    """Those of torch's own matmuls, which are put back. pytest's monkeypatch cannot do that: torch gives and takes them, but has no such
    attributes to delete."""
    found = torch.backends.cuda.matmul
    before = {name: getattr(found, name) for name in ("allow_tf32", "allow_bf16_reduced_precision_reduction")}
    yield found
    for name, value in before.items():
        setattr(found, name, value)


@pytest.fixture
def on_gpu(switches):
    """A maker of MatmulGelu that sets torch's own matmuls to the same precision."""
    torch.cuda.init()
    switches.allow_bf16_reduced_precision_reduction = False

    def make(tf32=False):
        switches.allow_tf32 = tf32
        return MatmulGelu(workspace(32 << 20, device="cuda"), tf32=tf32)

    return make


@pytest.mark.parametrize("tf32", [True, False])
def test_torch_s_switches_can_be_set_for_a_test_and_put_back(switches, tf32):
    """Here too, without a card: that putting them back fails was seen by nobody, as only tests on a GPU set them."""
    switches.allow_tf32 = tf32
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


# GPT-2 small's, and the oddest and the least that the epilogue allows; TF32 only at the first, as torch may do small ones in full fp32
gpu_cases = pytest.mark.parametrize(
    "rows, C, OC, dtype, tf32",
    [
        (4096, 768, 3072, torch.float32, False),
        (4096, 768, 3072, torch.float32, True),
        (4096, 768, 3072, torch.bfloat16, False),
        (7, 16, 24, torch.float32, False),
        (7, 16, 24, torch.bfloat16, False),
        (1, 8, 8, torch.float32, False),
        (1, 8, 8, torch.bfloat16, False),
    ],
)


@pytest.mark.gpu
@gpu_cases
def test_gpu_forward_is_as_good_as_torch(on_gpu, rows, C, OC, dtype, tf32):
    check_forward(on_gpu(tf32), rows, C, OC, dtype, "cuda")


@pytest.mark.gpu
@gpu_cases
def test_gpu_backward_is_as_good_as_torch(on_gpu, rows, C, OC, dtype, tf32):
    """As of fcproj: the gradient has C columns and comes out with OC."""
    check_backward(on_gpu(tf32), rows, C, OC, dtype, "cuda")


@pytest.mark.gpu
def test_gpu_bias_gradients_are_as_good_as_torch_s(on_gpu):
    check_backward(on_gpu(), 4096, 768, 3072, torch.bfloat16, "cuda", with_bias=True)


@pytest.mark.gpu
def test_gpu_calls_repeat_their_bits_also_from_a_graph(on_gpu):
    """A captured forward and backward give what the same calls gave before, and allocate nothing."""
    kernel = on_gpu()
    forward = check_forward(kernel, 4096, 768, 3072, torch.bfloat16, "cuda")
    backward = check_backward(kernel, 4096, 768, 3072, torch.bfloat16, "cuda")
    outputs = (*forward[:2], backward[0])
    expected = [t.clone() for t in outputs]
    before = torch.cuda.memory_allocated()
    kernel.forward(*forward)
    kernel.backward(*backward)
    assert torch.cuda.memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.forward(*forward)
        kernel.backward(*backward)
    for t in outputs:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for t, wanted in zip(outputs, expected):
        assert torch.equal(t, wanted)
