"""Floor 1: grids, transitions, noise, solvers, rollout and completions. Arrays and a `velocity(x, sigma)` callable in, arrays out.

>>> from densegrpo_jax import flow
>>> sigmas = flow.uniform_sigmas(10)
>>> window = flow.all_but_last(10)
>>> kernel = flow.only_where(flow.flow_sde(sigmas, 0.7), sigmas, window.stochastic)
>>> trajectory, clean = flow.rollout_and_complete(velocity, x, kernel, sigmas, noise, flow.branches(sigmas))  # doctest: +SKIP
"""

from densegrpo_jax.flow.completion import (
    Branch,
    Cost,
    branches,
    complete,
    cost,
    level_nodes,
    paired,
    rollout_and_complete,
    substep_branches,
)
from densegrpo_jax.flow.grid import (
    custom_sigmas,
    flux_shift,
    flux_sigmas,
    sd3_sigmas,
    shift_sigma,
    uniform_sigmas,
    unshift_sigma,
)
from densegrpo_jax.flow.kernels import (
    SAMPLERS,
    Kernel,
    cps,
    dance_sde,
    ddim_sde,
    excess_noise,
    flow_scale,
    flow_sde,
    guarded_log_ratio,
    kl,
    log_prob,
    log_prob_of_noise,
    log_ratio,
    ode,
    only_where,
    psi_sde,
    step,
    transition_mean,
)
from densegrpo_jax.flow.noise import initial_noise, step_noise
from densegrpo_jax.flow.rollout import Trajectory, rollout
from densegrpo_jax.flow.solvers import Plan, integrate, plan
from densegrpo_jax.flow.windows import Window, all_but_last, all_steps, fixed, random, sliding

__all__ = [
    "SAMPLERS",
    "Branch",
    "Cost",
    "Kernel",
    "Plan",
    "Trajectory",
    "Window",
    "all_but_last",
    "all_steps",
    "branches",
    "complete",
    "cost",
    "cps",
    "custom_sigmas",
    "dance_sde",
    "ddim_sde",
    "excess_noise",
    "fixed",
    "flow_scale",
    "flow_sde",
    "flux_shift",
    "flux_sigmas",
    "guarded_log_ratio",
    "initial_noise",
    "integrate",
    "kl",
    "level_nodes",
    "log_prob",
    "log_prob_of_noise",
    "log_ratio",
    "ode",
    "only_where",
    "paired",
    "plan",
    "psi_sde",
    "random",
    "rollout",
    "rollout_and_complete",
    "sd3_sigmas",
    "shift_sigma",
    "sliding",
    "step",
    "step_noise",
    "substep_branches",
    "transition_mean",
    "uniform_sigmas",
    "unshift_sigma",
]
