"""Accelerators: what a chip can do, and slices of them by name.

TPU figures are Google's, as tabulated in "How to Scale Your Model" (Austin et al. 2025, jax-ml.github.io/scaling-book), GPU figures those
of NVIDIA's data sheets (SXM, dense). The usable memory of a TPU is what its compiler (libtpu 0.0.42) admits; of a GPU it is
0.92 of the whole, as the launch files set XLA_CLIENT_MEM_FRACTION.
"""

import math
import re
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One accelerator.

    Attributes:
      name: as in a topology.
      kind: "tpu" or "gpu".
      hbm: bytes that a program may use.
      peak: FLOP/s of products of bfloat16 numbers.
      peak_float32: FLOP/s of float32 products at JAX's default precision (one bfloat16 pass on TPU, TF32 on GPU).
      bandwidth: of the memory, bytes/s.
      link: bytes/s that a chip receives from its neighbours, along one axis of a slice (TPU, both directions) or over NVLink (GPU).
      network: bytes/s that a chip receives from another box; TPU slices have none inside, and plan does not span slices.
      per_host: chips that one process drives, where there are several.
      alone: chips of the largest slice or box that has one host.
      dims: number of axes of a topology's name.
    """

    name: str
    kind: str
    hbm: float
    peak: float
    peak_float32: float
    bandwidth: float
    link: float
    network: float
    per_host: int
    alone: int
    dims: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 30.5 * GIB, 2.75e14, 2.75e14, 1.2e12, 9e10, math.inf, 4, 4, 3),
        Chip("v5e", "tpu", 15.75 * GIB, 1.97e14, 1.97e14, 8.2e11, 9e10, math.inf, 4, 8, 2),
        Chip("v5p", "tpu", 95.74 * GIB, 4.59e14, 4.59e14, 2.8e12, 1.8e11, math.inf, 4, 4, 3),
        Chip("v6e", "tpu", 31.25 * GIB, 9.20e14, 9.20e14, 1.6e12, 1.8e11, math.inf, 4, 8, 2),
        Chip("a100-40", "gpu", 0.92 * 40e9, 3.12e14, 1.56e14, 1.555e12, 3e11, 2.5e10, 8, 8, 1),
        Chip("a100-80", "gpu", 0.92 * 80e9, 3.12e14, 1.56e14, 2.039e12, 3e11, 2.5e10, 8, 8, 1),
        Chip("h100", "gpu", 0.92 * 80e9, 9.89e14, 4.94e14, 3.35e12, 4.5e11, 5e10, 8, 8, 1),
        Chip("h200", "gpu", 0.92 * 141e9, 9.89e14, 4.94e14, 4.8e12, 4.5e11, 5e10, 8, 8, 1),
    )
}


KINDS = (
    (r"TPU v4$", "v4"), (r"TPU v5 ?(lite|e)", "v5e"), (r"TPU v5p?$", "v5p"), (r"TPU v6 ?(lite|e)", "v6e"),
    (r"A100.*40GB", "a100-40"), (r"A100.*80GB", "a100-80"), (r"H100.*HBM3", "h100"), (r"H200", "h200"),
)  # fmt: skip
"""What JAX calls devices (`device_kind`); an H100 without HBM3 is the slower one for PCIe."""


def of_device(kind: str) -> Chip | None:
    """The chip of a device by JAX's name for it; None for others."""
    return next((CHIPS[name] for pattern, name in KINDS if re.search(pattern, kind)), None)


class Topology(NamedTuple):
    """A slice or a cluster: its chip, their number, and the shape in the name ("4x4", "8")."""

    chip: Chip
    count: int
    shape: str

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def hosts(self) -> int:
        """Processes of a run."""
        return 1 if self.count <= self.chip.alone else -(-self.count // self.chip.per_host)

    @property
    def per_host(self) -> int:
        """Chips that a process of a run drives."""
        return self.count if self.hosts == 1 else self.chip.per_host

    @property
    def link(self) -> float:
        """Bytes/s that a chip receives in a collective over all chips: the slower of link and network, where there is a network."""
        return self.chip.link if self.hosts == 1 else min(self.chip.link, self.chip.network)


SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),  # and from 4x4x4 on multiples of 4
}
"""Slices that Google rents out, by the number of axes."""


def topology(name: str) -> Topology:
    """Reads "v5e:4x4", "v5p:2x2x1", "h100:8".

    Raises:
      ValueError: an unknown chip, or a shape that there is not; says which there are.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise ValueError(f"topology {name!r}: no chip {kind!r}; there are {', '.join(CHIPS)}")
    chip, sides = CHIPS[kind], shape.split("x")
    if not all(side.isdigit() and int(side) > 0 for side in sides) or len(sides) != chip.dims:
        example = {1: "8", 2: "4x4", 3: "2x2x2"}[chip.dims]
        raise ValueError(f"topology {name!r}: the shape of {kind} has {chip.dims} side{'s' * (chip.dims > 1)}, as in {kind}:{example}")
    numbers = list(map(int, sides))
    large = len(sides) == 3 and numbers == sorted(numbers) and not any(n % 4 for n in numbers)
    if len(sides) > 1 and not large and "x".join(map(str, numbers)) not in SHAPES[chip.dims]:
        more = ", or three multiples of 4 in rising order, as 4x4x8" * (chip.dims == 3)
        raise ValueError(f"topology {name!r}: there is no such slice of {kind}; there are {', '.join(SHAPES[chip.dims])}{more}")
    return Topology(chip, math.prod(numbers), shape)
