import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import flow


def places(window):
    return np.flatnonzero(window.trained).tolist()


def test_all_but_last_with_and_without_noise_at_the_last_step():
    plain, parity = flow.all_but_last(10), flow.all_but_last(10, last_noise=True)
    assert places(plain) == places(parity) == list(range(9))
    assert not plain.stochastic[-1] and parity.stochastic[-1]
    assert flow.all_steps(4).trained.all()


@given(st.integers(2, 40), st.data())
def test_random_window_has_its_size_stays_in_range_and_is_addressed(num_steps, data):
    size = data.draw(st.integers(1, num_steps))
    first = data.draw(st.integers(0, num_steps - size))
    last = data.draw(st.integers(first, num_steps - size))
    step = data.draw(st.integers(0, 1000))
    window = flow.random(num_steps, size, seed=3, step=step, first=first, last=last)
    got = places(window)
    assert len(got) == size and got == list(range(got[0], got[0] + size))
    assert first <= got[0] <= last
    again = flow.random(num_steps, size, seed=3, step=step, first=first, last=last)
    np.testing.assert_array_equal(window.trained, again.trained)


def test_random_window_moves_with_step_and_reaches_every_place():
    starts = {places(flow.random(10, 2, seed=0, step=step))[0] for step in range(200)}
    assert starts == set(range(9))
    assert len({places(flow.random(10, 2, seed=0, step=5, group=g))[0] for g in range(40)}) > 3


def test_sliding_window_of_mixgrpo():
    starts = [places(flow.sliding(25, 4, step, every=25))[0] for step in range(0, 25 * 24, 25)]
    assert starts == [*range(22), 0, 1]
    assert places(flow.sliding(25, 4, 24))[0] == 0 and places(flow.sliding(25, 4, 25))[0] == 1
    assert places(flow.sliding(25, 4, 10**6, at_end="stay"))[0] == 21
    assert places(flow.sliding(25, 4, 10**6, stride=0))[0] == 0


def test_a_window_is_noisy_inside_and_ode_outside():
    sigmas = flow.sd3_sigmas(10)
    window = flow.fixed(10, 3, 2)
    kernel = flow.only_where(flow.flow_sde(sigmas, 0.7), sigmas, window.stochastic)
    assert np.flatnonzero(kernel.std).tolist() == [3, 4]
    np.testing.assert_array_equal(kernel.x_coef[[0, 1, 2, 5, 6, 7, 8, 9]], 1.0)
    np.testing.assert_array_equal(kernel.v_coef[:3], np.diff(sigmas)[:3])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: flow.fixed(10, 8, 3), "does not fit"),
        (lambda: flow.fixed(10, 0, 0), "does not fit"),
        (lambda: flow.random(10, 2, 0, 0, first=5, last=3), "last must not be smaller"),
        (lambda: flow.random(10, 2, 0, 0, last=9), "does not fit"),
        (lambda: flow.sliding(10, 2, 0, every=0), "every"),
        (lambda: flow.sliding(10, 2, 0, at_end="jump"), "at_end"),
        (lambda: flow.all_but_last(1), "all_steps"),
    ],
)
def test_bad_windows_are_named(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()
