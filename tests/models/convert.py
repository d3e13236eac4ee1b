"""Turns a torch state dict into our parameters through a network's name table (small models, whole arrays in memory)."""

import numpy as np
from flax import traverse_util

from densegrpo_jax.models.source import Source

TRANSFORMS = {"none": lambda x: x, "transpose": lambda x: x.T, "conv": lambda x: x.transpose(2, 3, 1, 0)}


def params_from_torch(state_dict, table: dict[str, Source]) -> dict:
    """The parameter tree of numpy arrays that `table` describes; every torch tensor must be used exactly once."""
    named = [name for source in table.values() for name in source.names]
    assert len(named) == len(set(named)), "a torch tensor is named twice"
    assert set(named) == set(state_dict), (sorted(set(named) - set(state_dict)), sorted(set(state_dict) - set(named)))
    flat = {}
    for path, source in table.items():
        arrays = [TRANSFORMS[source.transform](state_dict[name].detach().float().numpy()) for name in source.names]
        assert source.stacked or len(arrays) == 1, path
        flat[path] = np.array(np.stack(arrays) if source.stacked else arrays[0], order="C")
    return traverse_util.unflatten_dict(flat, sep="/")
