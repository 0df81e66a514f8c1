"""Triton's interpreter, without what makes it slow: the same operations on the same numbers."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    """It patches triton.language for a kernel, and anew at every call of a helper, which is half of its time: once will do. A third of
    the rest are checks for overflow whose outcome it only asks for in debug mode. And a tenth goes into numpy's name of a type, for which
    it makes a table of all types each time."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    plain, patched = interpreter.InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return plain(self, *args, **kwargs)

    plain_np_dtype, known = interpreter._get_np_dtype, {}

    def np_dtype(type):
        if type.name not in known:
            known[type.name] = plain_np_dtype(type)
        return known[type.name]

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))


def little_to_interpret(monkeypatch, elements=2048):
    """What a card works on side by side, the interpreter does one after the other: few partial sums, whose bits differ so; pieces of the
    update of so many `elements`, each in one turn; and no row of the embeddings' gradient fetched that is then left out."""
    monkeypatch.setattr("llmc.memory.scratch_sizes.COLUMN_PARTIALS", 2)
    monkeypatch.setattr("llmc.memory.scratch_sizes.NORM_PARTIALS", 4)
    monkeypatch.setattr("llmc.memory.scratch_sizes.FP8_PARTIALS", 2)
    if not torch.cuda.is_available():
        for name in ("adamw.CHUNK", "adamw.ELEMENTS"):
            monkeypatch.setattr(f"llmc.kernels.{name}", elements)
        for name in ("encoder.TOKEN_UNROLL", "encoder.POSITION_UNROLL"):
            monkeypatch.setattr(f"llmc.kernels.{name}", 1)
