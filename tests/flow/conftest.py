from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def golden():
    """Flow-GRPO's SDE step in float32 torch on seeded inputs: ten steps of SD3's grid, noise level 0.7."""
    with np.load(Path(__file__).parents[1] / "golden" / "flow_sde_step.npz") as file:
        return dict(file)
