"""The matmuls of a linear layer, each with the scratch that it works in: the rest of the model does not know which kind multiplies."""

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True, slots=True)
class Linear:
    """out = inp @ weight.T + bias, and its backward. Shapes and types are those of llmc/layers/matmul.py.

    ops           the operations that a model runs, of which these are matmul_forward, matmul_dinput, matmul_dweight and matmul_dout
    room          scratch of forward and dinput, as these operations want it: None, fp32 elements, or a dict of named views
    dweight_room  the same for dweight
    converts      whether dout is converted once, by matmul_dout, before it is multiplied by the weight and by the input
    """

    ops: SimpleNamespace
    room: object
    dweight_room: object
    converts: bool = False

    def forward(self, out, inp, weight, bias=None):
        self.ops.matmul_forward(out, inp, weight, bias, room=self.room)

    def take_dout(self, dout):
        """To be called with dout before dinput and dweight, whichever comes first."""
        if self.converts:
            self.ops.matmul_dout(dout, self.room)

    def dinput(self, dinp, dout, weight):
        self.ops.matmul_dinput(dinp, dout, weight, room=self.room)

    def dweight(self, dweight, dout, inp, *, accumulate):
        self.ops.matmul_dweight(dweight, dout, inp, accumulate=accumulate, room=self.dweight_room)


def linear_layers(ops, matmul: str, scratch: dict) -> tuple[Linear, Linear, Linear]:
    """How the layers multiply, how fcproj does, and how the head does.

    matmul   as in PlanOptions
    scratch  name -> view of the plan's scratch, of which numba's and FP8's matmuls take several
    """
    fp8 = matmul == "fp8"
    room = {"native": None, "widened": scratch.get("widened"), "numba": scratch, "fp8": scratch}[matmul]
    layers = fcproj = Linear(ops, room, scratch.get("widened", room), converts=fp8)
    if fp8:  # the dout of fcproj must survive while GELU runs: it has buffers of its own, no wider than it is
        own = {name.replace("fp8_fcproj", "fp8"): view for name, view in scratch.items() if name.startswith("fp8_fcproj")}
        room = scratch | own
        fcproj, room = Linear(ops, room, room, converts=True), None  # the head's matmuls are never in FP8
    return layers, fcproj, Linear(ops, room, scratch.get("head_widened", room))
