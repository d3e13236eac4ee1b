"""One whole DenseGRPO step in plain float64 numpy, written from the paper and not from the package; the package agrees with it.

Network: v(x, t) = x W + t u on R^3. Policy: Flow-SDE with a = 0.7. Gains from full Euler completions, advantages per step and group,
clipped surrogate plus KL to a reference, gradient in W by finite differences.
"""

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax import credit, flow
from densegrpo_jax.objective import Rows, grpo_loss

T, GROUPS, G, D, A, CLIP, BETA = 4, 2, 3, 3, 0.7, 2e-3, 0.5
rng = np.random.default_rng(0)
W_OLD, U = 0.5 * rng.standard_normal((D, D)), rng.standard_normal(D)
W_NEW, W_REF = W_OLD + 0.01 * rng.standard_normal((D, D)), W_OLD + 0.05 * rng.standard_normal((D, D))
X_T = rng.standard_normal((GROUPS * G, D)).astype(np.float32).astype(np.float64)
NOISE = rng.standard_normal((T, GROUPS * G, D)).astype(np.float32).astype(np.float64)
TARGET = np.array([0.3, -0.5, 1.0])
SIGMAS = np.array([1.0, 0.8, 0.55, 0.25, 0.0])


# --- the reference ---------------------------------------------------------------------------------------------------


def network(w, x, t):
    return x @ w + t * U


def reward(x):
    return -np.sqrt(((x - TARGET) ** 2).sum(-1))


def noise_scale(i):
    t = SIGMAS[i]
    return A * np.sqrt(t / (1 - (SIGMAS[1] if t == 1 else t)))


def sde_mean(w, x, i):
    t, dt, sig = SIGMAS[i], SIGMAS[i + 1] - SIGMAS[i], noise_scale(i)
    return x * (1 + sig**2 / (2 * t) * dt) + network(w, x, t) * (1 + sig**2 * (1 - t) / (2 * t)) * dt


def log_density(w, x, x_next, i):
    std = noise_scale(i) * np.sqrt(SIGMAS[i] - SIGMAS[i + 1])
    z = (x_next - sde_mean(w, x, i)) / std
    return (-(z**2) / 2 - np.log(std) - np.log(2 * np.pi) / 2).mean(-1)


def ode_to_image(w, x, i):
    for j in range(i, T):
        x = x - (SIGMAS[j] - SIGMAS[j + 1]) * network(w, x, SIGMAS[j])
    return x


def sample():
    path = [X_T]
    for i in range(T):
        std = noise_scale(i) * np.sqrt(SIGMAS[i] - SIGMAS[i + 1])
        path.append(sde_mean(W_OLD, path[-1], i) + std * NOISE[i])
    rewards = np.stack([reward(ode_to_image(W_OLD, path[i], i)) for i in range(T)] + [reward(path[T])])
    gains = rewards[1:] - rewards[:-1]
    grouped = gains.reshape(T, GROUPS, G)
    advantage = (grouped - grouped.mean(-1, keepdims=True)) / (grouped.std(-1, keepdims=True) + 1e-4)
    return path, rewards, advantage.reshape(T, GROUPS * G)


def loss(w, path, advantage):
    total = 0.0
    for i in range(T - 1):  # the last step is sampled with noise and not trained
        r = np.exp(log_density(w, path[i], path[i + 1], i) - log_density(W_OLD, path[i], path[i + 1], i))
        policy = np.maximum(-advantage[i] * r, -advantage[i] * np.clip(r, 1 - CLIP, 1 + CLIP))
        kl = ((sde_mean(w, path[i], i) - sde_mean(W_REF, path[i], i)) ** 2).mean(-1) / (2 * noise_scale(i) ** 2)
        total += (policy + BETA * kl).mean()
    return total / (T - 1)


def loss_gradient(w, path, advantage, h=1e-6):
    grad = np.zeros_like(w)
    for index in np.ndindex(w.shape):
        bump = np.zeros_like(w)
        bump[index] = h
        grad[index] = (loss(w + bump, path, advantage) - loss(w - bump, path, advantage)) / (2 * h)
    return grad


# --- the package -----------------------------------------------------------------------------------------------------


def velocity(w, x, sigma):
    return x @ jnp.asarray(w, jnp.float32) + sigma[:, None] * jnp.asarray(U, jnp.float32)[None]


def test_the_package_makes_the_same_step():
    path, rewards, advantage = sample()

    window = flow.all_but_last(T, last_noise=True)
    kernel = flow.flow_sde(SIGMAS, A)
    trajectory, clean = flow.rollout_and_complete(
        lambda x, s: velocity(W_OLD, x, s), jnp.float32(X_T), kernel, SIGMAS, jnp.float32(NOISE), flow.branches(SIGMAS)
    )
    np.testing.assert_allclose(trajectory.latents, np.stack(path), atol=2e-6)
    ours = reward(np.asarray(jnp.concatenate([clean, trajectory.latents[-1:]]), np.float64))
    np.testing.assert_allclose(ours, rewards, atol=2e-6)
    result = credit.advantages("dense_grpo", ours, np.repeat([7, 3], G))
    np.testing.assert_allclose(result.advantage, advantage, atol=2e-4)

    steps, members = (index.ravel() for index in np.meshgrid(np.flatnonzero(window.trained), np.arange(GROUPS * G), indexing="ij"))
    rows = Rows(
        kernel.at(steps),
        trajectory.velocity[steps, members],
        trajectory.noise[steps, members],
        jnp.float32(result.advantage[steps, members]),
        jnp.ones(len(steps)),
    )
    x, sigma = trajectory.latents[steps, members], jnp.float32(SIGMAS)[steps]

    def objective(w):
        ref = velocity(W_REF, x, sigma)
        return grpo_loss(velocity(w, x, sigma), rows, CLIP, velocity_ref=ref, beta=BETA, kl_mode="code")

    (value, metrics), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(W_NEW))
    assert 0.0 < metrics["clip_above"] + metrics["clip_below"] < 1.0  # both branches of the surrogate are at work
    np.testing.assert_allclose(value, loss(W_NEW, path, advantage), atol=2e-5)
    np.testing.assert_allclose(grad, loss_gradient(W_NEW, path, advantage), atol=2e-4 * np.abs(grad).max())


def test_gains_telescope():
    _, rewards, _ = sample()
    gains = credit.METHODS["dense_grpo"].credit(rewards, np.repeat([0, 1], G))
    np.testing.assert_allclose(gains.sum(0), rewards[-1] - rewards[0], atol=1e-12)
