"""The mesh: the devices of all processes, with axes "data" and "fsdp"."""

import jax

from densegrpo_jax.config import Parallel
from densegrpo_jax.models.attention import BATCH_AXES as AXES


def available() -> list[jax.Device]:
    """The devices that a run may take."""
    return jax.devices()


def count(parallel: Parallel) -> int:
    """Number of devices of a run.

    Raises:
      ValueError: more than there are, or a number that `fsdp` does not divide; names the valid ones.
    """
    there = len(available())
    devices = there if parallel.devices is None else parallel.devices
    if devices > there:
        raise ValueError(f"parallel.devices = {devices}: there are {there}")
    if devices < there and jax.process_count() > 1:
        raise ValueError(f"parallel.devices = {devices}: {jax.process_count()} processes have {there} together, and all of them take part")
    if devices % parallel.fsdp:
        valid = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ValueError(f"parallel.fsdp = {parallel.fsdp} does not divide the {devices} devices; choose one of {valid}")
    return devices


def make(parallel: Parallel) -> jax.sharding.Mesh | None:
    """The mesh of a run; None for one device, which needs none.

    Raises:
      ValueError: see `count`.
    """
    devices = count(parallel)
    if devices == 1:
        return None
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh((devices // parallel.fsdp, parallel.fsdp), AXES, axis_types=kinds, devices=available()[:devices])
