"""ODE solvers as tables of linear updates.

A solver on a list of nodes is a `Plan`: the noise level of each network evaluation, and a 2x3 matrix that turns the latent x, one
memory latent m and the fresh velocity v into the next x and m. Euler, midpoint, Heun, Adams-Bashforth 2 and DPM-Solver++(2M)
are all of this form, so branches with different solvers, nodes and noise levels share one network call.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Solver = Literal["euler", "midpoint", "heun", "ab2", "dpmpp2m"]
Velocity = Callable[..., jax.Array]


class Plan(NamedTuple):
    """sigmas [E]: where the velocity is evaluated; coef [E, 2, 3]: (x, m) <- coef @ (x, m, v) after each evaluation."""

    sigmas: np.ndarray
    coef: np.ndarray

    def __len__(self) -> int:
        return int(self.sigmas.shape[0])


def plan(nodes: np.ndarray, solver: Solver = "euler") -> Plan:
    """The table of a solver on falling noise levels.

    Args:
      nodes: [N+1] noise levels from the start to the end of the path, strictly falling.
      solver: "euler" (order 1); "midpoint", "heun" (order 2, two evaluations a step; Heun's last step to 0 is Euler); "ab2"
        (Adams-Bashforth with variable steps), "dpmpp2m" (DPM-Solver++ multistep in velocity form): order 2 at one evaluation
        a step, their first step is Euler. The last step of "dpmpp2m" to 0 is first order too, as the log-SNR is infinite there.

    Returns:
      A Plan.
    """
    nodes = np.asarray(nodes, np.float64)
    if nodes.ndim != 1 or nodes.size < 2 or np.any(np.diff(nodes) >= 0.0):
        raise ValueError(f"nodes must be at least two strictly falling noise levels, got {nodes.tolist()}")
    if solver not in _ROWS:
        raise ValueError(f"solver = {solver!r}: choose one of {', '.join(_ROWS)}")
    sigmas, rows = [], []
    for i in range(nodes.size - 1):
        before = nodes[i - 1] if i else None
        for sigma, row in _ROWS[solver](before, nodes[i], nodes[i + 1]):
            sigmas.append(sigma)
            rows.append(row)
    return Plan(np.array(sigmas), np.array(rows))


def integrate(velocity: Velocity, x: jax.Array, ode: Plan) -> jax.Array:
    """Follows a plan from x [B, ...] to its last node: one `lax.scan`, len(plan) evaluations of `velocity(x, sigma [B])`."""

    def one(carry, row):
        sigma, coef = row
        v = velocity(carry[0], jnp.full(x.shape[:1], sigma))
        return apply_row(coef, *carry, v), None

    rows = jnp.asarray(ode.sigmas, jnp.float32), jnp.asarray(ode.coef, jnp.float32)
    (x, _), _ = jax.lax.scan(one, (x, jnp.zeros_like(x)), rows)
    return x


def apply_row(coef: jax.Array, x: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One update of a plan; coef [2, 3]."""
    return (
        coef[0, 0] * x + coef[0, 1] * m + coef[0, 2] * v,
        coef[1, 0] * x + coef[1, 1] * m + coef[1, 2] * v,
    )


# --- one step of each solver: (sigma, [[x' from x, m, v], [m' from x, m, v]]) per evaluation --------------------------------
# `before` is the node before this step (None at the first), t the node, s the next one.


def _euler(before, t, s):
    return [(t, [[1, 0, s - t], [0, 0, 0]])]


def _midpoint(before, t, s):
    h = s - t
    return [(t, [[1, 0, h / 2], [1, 0, 0]]), (t + h / 2, [[0, 1, h], [0, 0, 0]])]


def _heun(before, t, s):
    if s == 0.0:
        return _euler(before, t, s)
    h = s - t
    return [(t, [[1, 0, h], [1, 0, h / 2]]), (s, [[0, 1, h / 2], [0, 0, 0]])]


def _ab2(before, t, s):  # m: the velocity of the node before
    h = s - t
    back = 0.0 if before is None else h / (2.0 * (t - before))
    return [(t, [[1, -h * back, h * (1 + back)], [0, 0, 1]])]


def _dpmpp2m(before, t, s):  # m: the clean prediction of the node before
    with np.errstate(divide="ignore"):
        log_snr = [None if u is None else np.log(1 - u) - np.log(u) for u in (before, t, s)]
    extra = 0.0  # weight of (x0 - x0_before)
    if before is not None and s > 0.0:
        extra = (log_snr[2] - log_snr[1]) / (2.0 * (log_snr[1] - log_snr[0]))
    keep = s / t
    clean = (1 - s) - (1 - t) * keep
    return [(t, [[keep + clean * (1 + extra), -clean * extra, -clean * (1 + extra) * t], [1, 0, -t]])]


_ROWS = {"euler": _euler, "midpoint": _midpoint, "heun": _heun, "ab2": _ab2, "dpmpp2m": _dpmpp2m}
