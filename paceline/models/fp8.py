"""Linear layers of a frozen target in fp8: half the bytes and, on Hopper and newer, twice the products a second.

Weights have a scale for each output channel, inputs one for each token, both from their largest value. The inputs are
scaled where they are made: compiled, that is a part of the norm or activation before the product. In a prototype
some seven times bfloat16's rounding error reached the taps, so it is an option, to be judged by the acceptance length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
MULTIPLE = 16
"""Both sides of a weight have to be multiples of it for the product."""


class Fp8Linear(nn.Module):
    """A frozen linear layer that multiplies in fp8 and gives its result in the type of its input.

    Attributes:
        weight: e4m3 ``[out, in]``.
        scale: float32 ``[1, out]``; what a channel's weights are multiples of.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        if x.is_cuda:
            out = torch._scaled_mm(
                rows, self.weight.T, scale_a=row_scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
            )
        else:
            out = ((rows.float() @ self.weight.float().T) * row_scale * self.scale).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[R, D]`` in e4m3 and their scales, float32 ``[R, 1]``: each row's largest value becomes the format's."""
    wide = rows.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def why_not_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a target cannot multiply in fp8, in one line; None if it can. On the CPU it is computed, for tests."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 products; Ada, Hopper and newer have"
    if dtype != torch.bfloat16:
        return f"the product gives bfloat16, and target.dtype is {str(dtype).removeprefix('torch.')}"
    return None


def use_fp8(layers: nn.Module) -> int:
    """Replace the linear layers below `layers` whose sizes fit, in place; how many those are.

    Stacked weights of experts are no linear layers and stay as they are.
    """
    replaced = 0
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not (child.in_features % MULTIPLE or child.out_features % MULTIPLE):
                setattr(module, name, Fp8Linear(child))
                replaced += 1
    return replaced
