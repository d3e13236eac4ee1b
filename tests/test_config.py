import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import config as configs
from densegrpo_jax.config import Config, Optimizer, Prompts


def made(p, g, updates, micro, minibatch="pairs"):
    return Config(prompts=Prompts(per_step=p, group_size=g), optimizer=Optimizer(updates=updates, micro_batch=micro, minibatch=minibatch))


@given(
    st.integers(1, 12), st.integers(2, 30), st.integers(1, 9), st.integers(1, 300), st.integers(1, 12), st.integers(1, 8),
    st.sampled_from(["pairs", "trajectories"]),
)  # fmt: skip
def test_a_batch_is_refused_or_splits_into_equal_parts(p, g, updates, micro, trained, devices, minibatch):
    config = made(p, g, updates, micro, minibatch)
    try:
        configs.check(config, trained, devices)
    except ValueError as error:
        assert "choose" in str(error)
        whole = p * g if minibatch == "trajectories" else p * g * trained
        assert p * g % devices or whole % updates or p * g * trained // updates % devices
        return
    size = configs.micro_batch(config, trained, devices)
    share = p * g * trained // updates
    assert 1 <= size <= max(micro, devices) and share % size == 0 == size % devices and p * g * trained % updates == 0


def test_refusals_list_what_would_work():
    with pytest.raises(ValueError, match=r"updates = 7 does not divide the 864 .*choose one of \[1, 2, 3, 4, 6, 8, 9"):
        configs.check(made(4, 24, 7, 32), 9)
    with pytest.raises(ValueError, match=r"choose per_step from \[2, 4, 6"):
        configs.check(made(3, 24, 1, 32), 9, devices=16)
    chunked = dataclasses.replace(made(1, 24, 1, 32), sampling=configs.Sampling(chunk=32))
    with pytest.raises(ValueError, match=r"sampling.chunk = 32 does not divide the 24 .*choose one of \[1, 2, 3, 4, 6, 8, 12, 24\]"):
        configs.check(chunked, 9)
    chunked = dataclasses.replace(made(1, 24, 1, 32), sampling=configs.Sampling(chunk=12))
    with pytest.raises(ValueError, match=r"into parts that 8 devices share evenly; choose one of \[8, 24\]"):
        configs.check(chunked, 9, devices=8)
    with pytest.raises(
        ValueError, match=r"updates = 4 leaves 54 pairs an update, which 8 devices do not share .*choose one of \[1, 3, 9, 27"
    ):
        configs.check(made(1, 24, 4, 32), 9, devices=8)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [(("a",), {"a": 1.0}), (("a=0.25", "b=-2"), {"a": 0.25, "b": -2.0})],
)
def test_reward_weights(rewards, expected):
    assert configs.reward_weights(Config(rewards=rewards)) == expected


@pytest.mark.parametrize("rewards", [(), ("a", "a=2"), ("a=x",), ("a=nan",), ("a=inf",)])
def test_bad_reward_weights(rewards):
    with pytest.raises(ValueError, match="rewards"):
        configs.reward_weights(Config(rewards=rewards))


def test_configs_are_frozen_and_become_json():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 1
    assert configs.to_json(config)["run"]["workdir"] == "runs/default"


def test_rewards_on_servers_go_by_their_names():
    config = Config(
        rewards=("geneval@http://a:1,https://b:2=0.5", "pickscore:org/model"), evaluation=configs.Evaluation(witnesses=("ocr@http://c:3",))
    )
    assert configs.reward_weights(config) == {"geneval": 0.5, "pickscore:org/model": 1.0}
    sources = {"geneval": "geneval@http://a:1,https://b:2", "pickscore:org/model": "pickscore:org/model", "ocr": "ocr@http://c:3"}
    assert configs.reward_sources(config) == sources
    with pytest.raises(ValueError, match="each once"):
        configs.reward_weights(Config(rewards=("geneval@http://a:1", "geneval")))


@pytest.mark.parametrize(("field", "value"), [("timeout", 0.0), ("attempts", 0), ("batch", 0)])
def test_bounds_of_reward_servers_are_checked(field, value):
    with pytest.raises(ValueError, match=f"reward_server.{field} = {value}"):
        configs.check(Config(reward_server=configs.RewardServer(**{field: value})), 9)
