import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from densegrpo_jax import flow

SIGMAS = flow.sd3_sigmas(10)
KERNEL = flow.flow_sde(SIGMAS, 0.7)
W = 0.4 * jax.random.normal(jax.random.key(9), (6, 6))


def velocity(x, sigma):
    return jnp.tanh(x @ W) + 0.5 * sigma[:, None] * x


def start(batch, num_steps=10):
    key, ids = jax.random.key(0), jnp.arange(batch)
    return flow.initial_noise(key, 0, ids, (6,)), flow.step_noise(key, 0, ids, num_steps, (6,))


# --- nodes and costs -------------------------------------------------------------------------------------------------


def test_nodes_of_the_paper():
    assert [flow.level_nodes(k, 1) for k in (10, 1)] == [[10, 0], [1, 0]]
    assert flow.level_nodes(4, "all") == [4, 3, 2, 1, 0]
    two = [flow.level_nodes(k, 2) for k in range(10, 0, -1)]
    expected = [[10, 5, 0], [9, 4, 0], [8, 4, 0], [7, 3, 0], [6, 3, 0], [5, 2, 0], [4, 2, 0], [3, 1, 0], [2, 1, 0], [1, 0]]
    assert two == expected
    assert flow.level_nodes(3, 99) == flow.level_nodes(3, "all")
    assert len(flow.level_nodes(7, "k/2")) == 5 and len(flow.level_nodes(7, "k/3")) == 4


@given(st.integers(1, 60), st.one_of(st.integers(1, 80), st.sampled_from(["all", "k/2", "k/3", "k/7"])))
def test_nodes_fall_strictly_from_the_level_to_zero(level, steps):
    nodes = flow.level_nodes(level, steps)
    assert nodes[0] == level and nodes[-1] == 0
    assert np.all(np.diff(nodes) < 0)
    if isinstance(steps, int):
        assert len(nodes) - 1 == min(steps, level)


@pytest.mark.parametrize(
    ("steps", "tail", "extra", "total"),
    [
        ("all", "keep", 45, 55),
        ("all", "skip_node", 36, 46),
        ("all", "skip_call", 36, 45),
        ("k/2", "keep", 20, 30),
        ("k/3", "keep", 12, 22),
        (2, "keep", 9, 19),
        (3, "keep", 17, 27),
        (4, "keep", 24, 34),
        (5, "keep", 30, 40),
        (1, "keep", 0, 10),
    ],
)
def test_cost_table(steps, tail, extra, total):
    scheme = flow.branches(SIGMAS, steps, tail=tail)
    assert flow.cost(10, scheme, tail=tail) == (total, total, 0)
    level = flow.cost(10, scheme, tile=None, tail=tail)
    assert level.evaluations == total and level.calls == (9 if tail == "skip_call" else 10)
    assert extra == total - (9 if tail == "skip_call" else 10)


def test_cost_of_the_naive_loop():
    naive = [flow.cost(10, flow.branches(SIGMAS, n), reuse=False).evaluations for n in ("all", 2, 1)]
    assert naive == [65, 29, 20]


def test_cost_counts_padding_of_wide_tiles():
    scheme = flow.branches(SIGMAS)
    cost = flow.cost(10, scheme, tile=4)
    assert cost.calls == sum(-(-k // 4) for k in range(1, 11)) and cost.evaluations == 4 * cost.calls == 55 + cost.padding


@pytest.mark.parametrize("tile", [1, 3, None])
def test_cost_is_what_the_walk_really_does(tile):
    """Counted by a callback in the network itself."""
    rows = []

    def counted(x, sigma):
        jax.debug.callback(lambda s: rows.append(s.shape[0]), sigma)
        return velocity(x, sigma)

    x, noise = start(4)
    scheme = flow.branches(SIGMAS, 3, "ab2")
    jax.block_until_ready(flow.rollout_and_complete(counted, x, KERNEL, SIGMAS, noise, scheme, tile=tile))
    jax.effects_barrier()
    cost = flow.cost(10, scheme, tile=tile)
    assert len(rows) == cost.calls and sum(rows) == 4 * cost.evaluations


def test_program_size_does_not_grow_with_steps():
    def calls_in(num_steps):
        sigmas = flow.sd3_sigmas(num_steps)
        x, noise = start(2, num_steps)
        run = lambda: flow.rollout_and_complete(velocity, x, flow.flow_sde(sigmas, 0.7), sigmas, noise, flow.branches(sigmas))  # noqa: E731
        return str(jax.make_jaxpr(run)()).count("tanh")

    assert calls_in(4) == calls_in(20) == 1


# --- the walk --------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    num_steps=st.integers(1, 7),
    steps=st.sampled_from(["all", 1, 2, 3, "k/2"]),
    solver=st.sampled_from(["euler", "midpoint", "heun", "ab2", "dpmpp2m"]),
    tile=st.sampled_from([1, 2, None]),
    chunk=st.sampled_from([None, 2]),
    shift=st.sampled_from([1.0, 3.0]),
)
def test_walk_equals_the_naive_loop(num_steps, steps, solver, tile, chunk, shift):
    sigmas = flow.sd3_sigmas(num_steps, shift)
    kernel = flow.flow_sde(sigmas, 0.7)
    scheme = flow.branches(sigmas, steps, solver)
    x, noise = start(4, num_steps)
    alone = flow.rollout(velocity, x, kernel, sigmas, noise)
    trajectory, clean = flow.rollout_and_complete(velocity, x, kernel, sigmas, noise, scheme, tile=tile, chunk=chunk)
    for a, b in zip(trajectory, alone):
        np.testing.assert_allclose(a, b, atol=2e-6)
    np.testing.assert_allclose(clean, flow.complete(velocity, alone.latents, scheme), atol=5e-6)


def test_walk_repeats_conditioning_with_its_trajectory():
    x, noise = start(6)
    cond = {"shift": jnp.linspace(-1.0, 1.0, 6)[:, None]}

    def conditional(x, sigma, cond):
        return velocity(x, sigma) + cond["shift"]

    scheme = flow.branches(SIGMAS)
    alone = flow.rollout(conditional, x, KERNEL, SIGMAS, noise, cond=cond)
    expected = flow.complete(conditional, alone.latents, scheme, cond=cond)
    for tile in (1, 4, None):
        _, clean = flow.rollout_and_complete(conditional, x, KERNEL, SIGMAS, noise, scheme, cond=cond, tile=tile, chunk=3)
        np.testing.assert_allclose(clean, expected, atol=5e-6)


def test_first_velocity_is_the_samplers():
    """n = 1 is x - sigma v with the velocity already computed (Tweedie), at no further call."""
    x, noise = start(4)
    t, clean = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, flow.branches(SIGMAS, 1))
    np.testing.assert_allclose(clean, t.latents[:-1] - SIGMAS[:-1, None, None].astype(np.float32) * t.velocity, atol=1e-6)


def test_without_noise_all_completions_are_the_final_image():
    """sigma = 0 => gains are 0 for grid-Euler n = k (densegrpo.md 3.6)."""
    x, noise = start(4)
    t, clean = flow.rollout_and_complete(velocity, x, flow.ode(SIGMAS), SIGMAS, noise, flow.branches(SIGMAS))
    np.testing.assert_allclose(clean, np.broadcast_to(t.latents[-1], clean.shape), atol=3e-6)
    _, coarse = flow.rollout_and_complete(velocity, x, flow.ode(SIGMAS), SIGMAS, noise, flow.branches(SIGMAS, 1))
    assert np.abs(np.diff(coarse, axis=0)).max() > 1e-2  # and not for n = 1


@pytest.mark.parametrize("solver", ["euler", "ab2", "dpmpp2m", "midpoint"])
@pytest.mark.parametrize("steps", [1, 2, 3, "k/2", "all"])
def test_paired_baselines_give_no_gain_without_noise(steps, solver):
    x, noise = start(4)
    scheme = flow.branches(SIGMAS, steps, solver)
    base = flow.paired(SIGMAS, scheme)
    t, clean = flow.rollout_and_complete(velocity, x, flow.ode(SIGMAS), SIGMAS, noise, (*scheme, *base))
    after = np.concatenate([clean[1:10], t.latents[-1:]])
    np.testing.assert_allclose(clean[10:], after, atol=5e-6)


def test_paired_equals_plain_for_the_papers_scheme():
    x, noise = start(4)
    scheme = flow.branches(SIGMAS)
    _, clean = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, (*scheme, *flow.paired(SIGMAS, scheme)))
    np.testing.assert_allclose(clean[:10], clean[10:], atol=5e-6)


def test_skipped_node_moves_the_image_by_the_closed_form():
    """The error of step 2 -> 0 taken directly is s_1 (v_1 - v_2): 0.0089 times a velocity difference."""
    x, noise = start(4)
    t, full = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, flow.branches(SIGMAS))
    _, skipped = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, flow.branches(SIGMAS, tail="skip_node"), tail="skip_node")
    at_2 = t.latents[8]
    v_2 = velocity(at_2, jnp.full(4, SIGMAS[8]))
    v_1 = velocity(at_2 - (SIGMAS[8] - SIGMAS[9]) * v_2, jnp.full(4, SIGMAS[9]))
    np.testing.assert_allclose(full[8] - skipped[8], SIGMAS[9] * (v_2 - v_1), atol=2e-6)
    np.testing.assert_allclose(full[9], skipped[9], atol=1e-6)


@pytest.mark.parametrize("tile", [1, None])
def test_skipped_call_finishes_with_the_velocity_before(tile):
    window = flow.all_but_last(10)
    kernel = flow.only_where(KERNEL, SIGMAS, window.stochastic)
    x, noise = start(4)
    scheme = flow.branches(SIGMAS, tail="skip_call")
    t, clean = flow.rollout_and_complete(velocity, x, kernel, SIGMAS, noise, scheme, tail="skip_call", tile=tile)
    full = flow.rollout(velocity, x, kernel, SIGMAS, noise)
    np.testing.assert_allclose(t.latents[:10], full.latents[:10], atol=2e-6)
    np.testing.assert_allclose(t.latents[10], t.latents[9] - SIGMAS[9] * t.velocity[8], atol=1e-6)
    np.testing.assert_array_equal(clean[9], t.latents[10])
    np.testing.assert_array_equal(t.velocity[9], t.velocity[8])
    quiet, clean0 = flow.rollout_and_complete(velocity, x, flow.ode(SIGMAS), SIGMAS, noise, scheme, tail="skip_call", tile=tile)
    np.testing.assert_allclose(clean0[7:], np.broadcast_to(quiet.latents[10], clean0[7:].shape), atol=3e-6)


def test_only_wanted_levels_are_completed():
    levels = np.isin(np.arange(10), [2, 3, 4])
    scheme = flow.branches(SIGMAS, levels=levels)
    assert [b.start for b in scheme] == [2, 3, 4]
    x, noise = start(4)
    _, some = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, scheme)
    _, every = flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, noise, flow.branches(SIGMAS))
    np.testing.assert_allclose(some, every[2:5], atol=3e-6)
    late = flow.cost(10, flow.branches(SIGMAS, levels=np.arange(10) >= 5)).evaluations - 10
    early = flow.cost(10, flow.branches(SIGMAS, levels=np.arange(10) <= 5)).evaluations - 10
    assert (late, early) == (10, 39)  # densegrpo.md 9, item 4: k = 5..1, and k = 10..6 with the R_5 that closes the last gain


def test_substeps_are_uniform_in_the_unshifted_time():
    scheme = flow.substep_branches(SIGMAS, 5, shift=3.0)
    assert [len(b.plan) for b in scheme] == [5, 5, 5, 5, 5, 5, 4, 3, 2, 1]
    for branch in scheme[:9]:
        u = flow.unshift_sigma(np.append(branch.plan.sigmas, 0.0), 3.0)
        np.testing.assert_allclose(np.diff(u), np.diff(u)[0], rtol=1e-9)
        assert branch.plan.sigmas[0] == SIGMAS[branch.start]


def test_euler_at_order_one_is_the_paper_on_a_repeated_level():
    sigmas = flow.custom_sigmas([1.0, 0.6, 0.6, 0.2, 0.0])
    x, noise = start(3, 4)
    t, clean = flow.rollout_and_complete(velocity, x, flow.flow_sde(sigmas, 0.7), sigmas, noise, flow.branches(sigmas))
    np.testing.assert_array_equal(t.latents[1], t.latents[2])
    np.testing.assert_allclose(clean[1], clean[2], atol=1e-6)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x, n: flow.branches(SIGMAS, 0), "steps = 0"),
        (lambda x, n: flow.branches(SIGMAS, "half"), "steps = 'half'"),
        (lambda x, n: flow.branches(SIGMAS, "k/0"), "steps = 'k/0'"),
        (lambda x, n: flow.branches(SIGMAS, tail="drop"), "tail = 'drop'"),
        (lambda x, n: flow.branches(SIGMAS, levels=np.ones(9)), "levels has shape"),
        (lambda x, n: flow.substep_branches(SIGMAS, 0), "substeps = 0"),
        (lambda x, n: flow.paired(SIGMAS, flow.branches(SIGMAS, levels=np.arange(10) > 4)), "level 1 has none"),
        (lambda x, n: flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, n, (), tile=0), "tile = 0"),
        (lambda x, n: flow.rollout_and_complete(velocity, x, KERNEL, SIGMAS, n, (), tail="skip_call"), "no noise at the last"),
    ],
)
def test_bad_schemes_are_named(call, reason):
    with pytest.raises(ValueError, match=reason):
        call(*start(2))
