"""Where a parameter of ours is found in a torch state dict: one entry of a network's name table."""

from typing import Literal, NamedTuple


class Source(NamedTuple):
    """The torch tensors that make one parameter array.

    Attributes:
      names: torch tensor names; exactly one, or with `stacked` one per scanned layer in order.
      transform: what turns a torch tensor into ours: "none", "transpose" (linear, [out, in] -> [in, out]) or
        "conv" (OIHW -> HWIO).
      stacked: the parameter has a leading layer axis of `len(names)`.
    """

    names: tuple[str, ...]
    transform: Literal["none", "transpose", "conv"] = "none"
    stacked: bool = False
