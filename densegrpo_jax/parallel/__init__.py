"""Floor 2: the devices of a run as a mesh, of one process or of several, and where its arrays lie on it.

Trajectories, and whatever has one entry for each, are spread over all devices, or over groups of `tensor` devices that compute each of
them together. Frozen weights are copied, or shared by `fsdp` devices each; the adapter, the optimiser and the average are copied. The
compiler does the rest: programs are written for the whole batch.
"""

from densegrpo_jax.parallel.mesh import count, make, shares, within
from densegrpo_jax.parallel.placing import by_copies, by_rows, copies, everywhere, over_rows, sent, shared, spread, whole
from densegrpo_jax.parallel.processes import (
    alone,
    anyone,
    apart,
    gather,
    join,
    mine,
    of_process,
    primary,
    same_everywhere,
    to_host,
    together,
)

__all__ = [
    "alone", "anyone", "apart", "by_copies", "by_rows", "copies", "count", "everywhere", "gather", "join", "make", "mine", "of_process",
    "over_rows", "primary", "same_everywhere", "sent", "shared", "shares", "spread", "to_host", "together", "whole", "within",
]  # fmt: skip
