"""The residual stream. Source: llm.c llmc/layernorm.cuh (residual_forward)."""


def residual_add_inplace(out, residual):
    """out += residual; both (B, T, C). The gradient needs no function: it flows to both sides unchanged."""
    out.add_(residual)
