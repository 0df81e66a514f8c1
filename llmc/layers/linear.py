"""The matmuls of a linear layer, each with the scratch that it works in: the rest of the model does not know which kind multiplies."""

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True, slots=True)
class Linear:
    """out = inp @ weight.T + bias, and its backward. Shapes and types are those of llmc/layers/matmul.py.

    ops              the operations that a model runs, of which these are matmul_forward, matmul_dinput, matmul_dweight and matmul_dout
    scratch          name -> view, for forward and dinput; None where torch multiplies the factors as they are
    dweight_scratch  the same for dweight
    converts         whether dout is converted once, by matmul_dout, before it is multiplied by the weight and by the input
    """

    ops: SimpleNamespace
    scratch: dict | None
    dweight_scratch: dict | None
    converts: bool = False

    def forward(self, out, inp, weight, bias=None):
        self.ops.matmul_forward(out, inp, weight, bias, scratch=self.scratch)

    def take_dout(self, dout):
        """To be called with dout before dinput and dweight, whichever comes first."""
        if self.converts:
            self.ops.matmul_dout(dout, self.scratch)

    def dinput(self, dinp, dout, weight):
        self.ops.matmul_dinput(dinp, dout, weight, scratch=self.scratch)

    def dweight(self, dweight, dout, inp, *, accumulate):
        self.ops.matmul_dweight(dweight, dout, inp, accumulate=accumulate, scratch=self.dweight_scratch)


def linear_layers(ops, matmul: str, scratch: dict) -> tuple[Linear, Linear, Linear]:
    """How the layers multiply, how fcproj does, and how the head does.

    matmul   as in PlanOptions
    scratch  name -> view of the plan's scratch, of which each kind of matmul takes its own
    """
    fp8 = matmul == "fp8"
    usual = None if matmul == "native" else scratch
    # where gradients are fp32 and factors bf16, dweight is widened even if the others are not
    layers = fcproj = Linear(ops, usual, scratch if "widened" in scratch else usual, converts=fp8)
    if fp8:  # the dout of fcproj must survive while GELU runs: it has buffers of its own, no wider than it is
        own = scratch | {name.replace("fp8_fcproj", "fp8"): view for name, view in scratch.items() if name.startswith("fp8_fcproj")}
        fcproj, usual = Linear(ops, own, own, converts=True), None  # the head's matmuls are never in FP8
    head = scratch | {"widened": scratch["head_widened"]} if "head_widened" in scratch else usual
    return layers, fcproj, Linear(ops, usual, head)
