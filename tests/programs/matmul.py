"""A thread ``matmul`` that multiplies matrices on the CPU: `matmul.py [torch|numpy]`."""

from __future__ import annotations

import sys
import threading

from life import goes_on, say_ready, stay

library = sys.argv[1] if len(sys.argv) > 1 else "torch"


def multiply_torch() -> None:
    """One thread of OpenMP beside it."""
    import torch

    torch.set_num_threads(2)
    a = torch.randn(400, 400)
    say_ready()
    with torch.no_grad():
        while goes_on():
            a = torch.tanh(a @ a)


def multiply_numpy() -> None:
    """Through BLAS, and a loop over elements."""
    import numpy

    a = numpy.random.default_rng(0).standard_normal((400, 400))
    say_ready()
    while goes_on():
        a = numpy.tanh(a @ a)


work = {"torch": multiply_torch, "numpy": multiply_numpy}[library]
threading.Thread(target=work, name="matmul", daemon=True).start()
stay()
