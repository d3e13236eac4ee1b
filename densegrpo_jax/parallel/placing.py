"""Where arrays lie on a mesh. Without a mesh they go to the default device, uncommitted."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from densegrpo_jax.parallel.mesh import AXES


def over_rows(mesh: Mesh | None, tree: Any, axis: int = 0) -> Any:
    """Arrays whose `axis` is that of trajectories, spread over all devices.

    Raises:
      ValueError: a number of trajectories that the devices do not share evenly (from jax).
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(tree, NamedSharding(mesh, jax.P(*[None] * axis, AXES)))


def everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Arrays that every device holds."""
    return jax.tree.map(jnp.asarray, tree) if mesh is None else jax.device_put(tree, NamedSharding(mesh, jax.P()))


def by_rows(tree: Any, axis: int = 0) -> Any:
    """Inside a program: keeps arrays spread over all devices of the ambient mesh, along `axis`.

    Without it the compiler may put the rows on fewer devices, where shared weights want the axis "fsdp" for themselves. Arrays of fewer
    axes stay as they are, and so do all where no mesh is set.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    spec = jax.P(*[None] * axis, AXES)
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec) if leaf.ndim > axis else leaf, tree)


def whole(tree: Any) -> Any:
    """Inside a program: has every device of the ambient mesh hold the arrays, so that each process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, jax.P()), tree)


def spread(mesh: Mesh, shapes: Any) -> Any:
    """Shardings of frozen weights over the axis "fsdp": by the longest side that it divides, never by the stack of layers, which a scan
    takes one by one. Vectors, and what no side fits, are whole everywhere.

    Args:
      mesh: of the run.
      shapes: tree of anything with a `shape`.
    """
    fsdp = mesh.shape["fsdp"]

    def one(leaf):
        sides = [(n, i) for i, n in enumerate(leaf.shape) if n % fsdp == 0 and not (i == 0 and leaf.ndim > 2)]
        spec = [None] * leaf.ndim
        if fsdp > 1 and sides and leaf.ndim > 1:
            spec[max(sides)[1]] = "fsdp"
        return NamedSharding(mesh, jax.P(*spec))

    return jax.tree.map(one, shapes)


def shared(mesh: Mesh | None, tree: Any) -> Any:
    """Arrays where `spread` puts them."""
    return tree if mesh is None else jax.device_put(tree, spread(mesh, tree))
