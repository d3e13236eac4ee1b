"""Where arrays lie on a mesh. Without a mesh they go to the default device, uncommitted."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from densegrpo_jax.models.mmdit import INPUTS_SHARED, OUTPUTS_SHARED
from densegrpo_jax.parallel.mesh import COPIES, ROWS


def over_rows(mesh: Mesh | None, tree: Any, axis: int = 0) -> Any:
    """Arrays whose `axis` is that of trajectories, spread over all devices; those of a group along "tensor" hold the same.

    Raises:
      ValueError: a number of trajectories that the devices do not share evenly (from jax).
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(tree, NamedSharding(mesh, jax.P(*[None] * axis, ROWS)))


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
    spec = jax.P(*[None] * axis, ROWS)
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec) if leaf.ndim > axis else leaf, tree)


def whole(tree: Any) -> Any:
    """Inside a program: has every device of the ambient mesh hold the arrays, so that each process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, jax.P()), tree)


def spread(mesh: Mesh, shapes: Any) -> Any:
    """Shardings of frozen weights.

    Axis "tensor" takes a side of the layers that make heads or hidden units, or read them, as `models.mmdit` names them, so that each
    device computes with its share. Over "fsdp" lies the longest other side that it divides, never the stack of layers, which a scan takes
    one by one; weights without a share to compute with lie over both axes. Vectors, and what no side fits, are whole everywhere.

    Args:
      mesh: of the run.
      shapes: tree of anything with a `shape`.
    """
    sizes = {axis: mesh.shape[axis] for axis in ("fsdp", "tensor")}
    rules = ((OUTPUTS_SHARED, -1), (INPUTS_SHARED, -2))

    def one(path, leaf):
        name, spec = jax.tree_util.keystr(path, simple=True, separator="/"), [None] * leaf.ndim
        side = next((side for rule, side in rules if re.search(rule, name) and sizes["tensor"] > 1), None)
        if side is not None:
            spec[side] = "tensor"
        over = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in spec)
        number = math.prod(sizes[axis] for axis in over)
        free = [(n, i) for i, n in enumerate(leaf.shape) if n % number == 0 and spec[i] is None and not (i == 0 and leaf.ndim > 2)]
        if over and free and leaf.ndim > 1:
            spec[max(free)[1]] = over if len(over) > 1 else over[0]
        return NamedSharding(mesh, jax.P(*spec))

    return jax.tree.map_with_path(one, shapes)


def shared(mesh: Mesh | None, tree: Any) -> Any:
    """Arrays where `spread` puts them."""
    return tree if mesh is None else jax.device_put(tree, spread(mesh, tree))


def sent(tree: Any) -> Any:
    """Numpy arrays on the devices of the ambient mesh, where `spread` puts them; each process sends what its own devices hold."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.device_put(tree)
    return jax.tree.map(lambda leaf, place: jax.make_array_from_callback(leaf.shape, place, leaf.__getitem__), tree, spread(mesh, tree))


def copies() -> int:
    """How many copies of shared weights the ambient mesh holds; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[COPIES]


def by_copies(tree: Any) -> Any:
    """Inside a program: spreads arrays over the copies of shared weights of the ambient mesh, along their first axis. The devices of a copy
    hold the same, so that weights may stay where they are, and products be computed in shares: for few rows and large weights."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, jax.P(COPIES)), tree)
