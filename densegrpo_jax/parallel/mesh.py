"""The mesh: the devices of all processes, with axes "data", "fsdp" and "tensor"."""

from contextlib import AbstractContextManager, nullcontext

import jax

from densegrpo_jax.config import Parallel
from densegrpo_jax.models.attention import BATCH_AXES, HEAD_AXIS

ROWS = BATCH_AXES  # the axes that trajectories are spread over
COPIES = "data"  # the axis along which shared weights are there again
AXES = (*ROWS, HEAD_AXIS)


def available() -> list[jax.Device]:
    """The devices that a run may take."""
    return jax.devices()


def count(parallel: Parallel) -> int:
    """Number of devices of a run.

    Raises:
      ValueError: more than there are, or a number that `fsdp` and `tensor` do not divide; names the valid ones.
    """
    there = len(available())
    devices = there if parallel.devices is None else parallel.devices
    if devices > there:
        raise ValueError(f"parallel.devices = {devices}: there are {there}")
    if devices < there and jax.process_count() > 1:
        raise ValueError(f"parallel.devices = {devices}: {jax.process_count()} processes have {there} together, and all of them take part")
    _divides("tensor", parallel.tensor, devices, "the {} devices")
    _divides("fsdp", parallel.fsdp, devices // parallel.tensor, "the {} devices" if parallel.tensor == 1 else "the {} groups of devices")
    return devices


def _divides(name: str, number: int, devices: int, said: str) -> None:
    if devices % number:
        valid = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ValueError(f"parallel.{name} = {number} does not divide {said.format(devices)}; choose one of {valid}")


def shares(parallel: Parallel) -> int:
    """Over how many devices trajectories are spread; those that compute each of them together count once.

    Raises:
      ValueError: see `count`.
    """
    return count(parallel) // parallel.tensor


def make(parallel: Parallel) -> jax.sharding.Mesh | None:
    """The mesh of a run; None for one device, which needs none.

    Raises:
      ValueError: see `count`.
    """
    devices = count(parallel)
    return None if devices == 1 else arranged(available()[:devices], parallel.fsdp, parallel.tensor)


def within(mesh: jax.sharding.Mesh | None) -> AbstractContextManager:
    """Within it, programs run on the mesh; on the default device where there is none."""
    return jax.set_mesh(mesh) if mesh else nullcontext()


def arranged(devices: list[jax.Device], fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """Devices as a mesh, neighbours by "tensor" first, which talk most."""
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh((len(devices) // fsdp // tensor, fsdp, tensor), AXES, axis_types=kinds, devices=devices)
