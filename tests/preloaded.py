"""What the processes of forked.py find imported."""

import parts_model  # noqa: F401
import ranks_program  # noqa: F401

from llmc.kernels_cpu import not_installed

if not not_installed():
    from numba.core.registry import cpu_target

    import llmc.kernels_cpu.functions  # noqa: F401
    import llmc.kernels_cpu.matmul  # noqa: F401

    cpu_target.typing_context.refresh()  # half of numba is imported only here, or at the first call of a kernel
    cpu_target.target_context.refresh()
