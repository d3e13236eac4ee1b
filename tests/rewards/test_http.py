"""The client of reward servers against real processes that hang, die and lie: it neither waits beyond its bound nor takes a false zero."""

import logging
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from densegrpo_jax import rewards
from densegrpo_jax.config import RewardServer
from densegrpo_jax.rewards import http, wire

IMAGES, PROMPTS, METADATA = np.zeros((3, 4, 4, 3), np.uint8), ["a", "b", "c"], [{}] * 3
QUICK = RewardServer(timeout=0.4, attempts=2, batch=2)
BACKOFF = 0.01, 0.05
SLACK = 2.0  # seconds that a loaded machine may add

IN_EVERY_ANSWER = [
    ("hung", "no whole answer within"),
    ("trickle", "no whole answer within"),
    ("cut", "ends 983 bytes before its end"),
    ("html", "not JSON"),
    ("array", "not a JSON object"),
    ("nothing", "of the reward None"),
    ("huge", "more than"),
    ("error", "CUDA out of memory"),
    ("refusing", "no such tag"),
    ("busy", "code 503: busy"),
    ("moved", "code 302"),
    ("short", "has 1 scores for 2 images"),
    ("long", "has 3 scores for 2 images"),
    ("texts", "not numbers"),
    ("flags", "not numbers"),
    ("swapped", "of the reward 'other'"),
]


def start():
    process = subprocess.Popen([sys.executable, "-S", "-E", Path(__file__).parent / "faulty_server.py"], stdout=subprocess.PIPE, text=True)
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.fixture(scope="module")
def faulty():
    process, url = start()
    yield url
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def small_replies(monkeypatch):
    monkeypatch.setattr(wire, "REPLY_LIMIT", 10**6)
    monkeypatch.delenv(wire.TOKEN, raising=False)


def scored(urls, options=QUICK, images=IMAGES):
    reward = http.as_reward("mean", [urls] if isinstance(urls, str) else urls, options, BACKOFF)
    return rewards.score("mean", reward, images, PROMPTS, METADATA), reward.counts


def masked(options=QUICK):
    return RewardServer(options.timeout, options.attempts, options.batch, "mask")


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(("fault", "reason"), IN_EVERY_ANSWER, ids=[fault for fault, _ in IN_EVERY_ANSWER])
def test_a_fault_in_every_answer_is_named_or_masked_within_the_bound(faulty, caplog, fault, reason):
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=f"'mean': 2 of 2 requests failed.*/{fault}: .*{reason}"):
        scored(f"{faulty}/{fault}")
    assert time.monotonic() - began < QUICK.attempts * QUICK.timeout + SLACK
    with caplog.at_level(logging.WARNING):
        scores, counts = scored(f"{faulty}/{fault}", masked())
    assert not scores.valid.any() and scores.faults.masked == counts["unscored"] == 3  # counted, and no zero is taken for a score
    assert "2 of 2 requests failed" in caplog.text


@pytest.mark.parametrize(("fault", "fault_of"), [("nan", "masked"), ("null", "masked"), ("inf", "infinite")])
def test_single_scores_that_are_none_are_masked_and_the_others_kept(faulty, fault, fault_of):
    scores, _ = scored(f"{faulty}/{fault}")
    np.testing.assert_array_equal(scores.valid, [False, True, False])  # the first of each request of two
    np.testing.assert_array_equal(scores.value, [0.0, 0.25, 0.0])
    assert scores.faults._asdict()[fault_of] == 2


def test_slow_answers_are_waited_for_and_passing_troubles_gone_through(faulty):
    for fault, failed in (("slow", 0), ("full", 0), ("flaky", 1)):
        scores, counts = scored(f"{faulty}/{fault}", RewardServer(timeout=3.0, attempts=3, batch=3))
        np.testing.assert_array_equal(scores.value, 0.25)
        assert scores.valid.all() and counts == {"requests": 1, "failed_tries": failed, "unscored": 0}


def test_other_servers_step_in(faulty):
    urls = [closed_port(), *(f"{faulty}/{path}" for path in ("error", "refusing", "good"))]
    scores, counts = scored(urls, RewardServer(timeout=2.0, attempts=3, batch=1))
    assert scores.valid.all() and counts["failed_tries"] == 3  # the first batch meets both failing servers, the second one of them


def test_a_server_killed_while_it_scores_fails_at_once():
    process, url = start()
    with pytest.raises(ConnectionError, match="requests failed"):
        began = time.monotonic()
        scored(f"{url}/dead", RewardServer(timeout=30.0, attempts=2, batch=3))
    assert time.monotonic() - began < SLACK and process.wait() == 1


def test_masking_ends_when_nothing_ever_answers(faulty, monkeypatch):
    monkeypatch.setattr(http, "PATIENCE", 0.0)
    with pytest.raises(ConnectionError, match="no answer for"):
        scored(closed_port(), masked())


# ---------------------------------------------------------------------------------------------------------------------
# Before the run


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("loading", "not a ready reward server"),
        ("new", "not a ready reward server"),
        ("other", "serves the reward 'other'"),
        ("few", "takes 1 images in a request"),
        ("web", "not JSON"),
        ("deaf", "no whole answer within"),
    ],
)
def test_the_look_before_the_run_names_the_server_and_the_command(faulty, monkeypatch, path, reason):
    monkeypatch.setattr(http, "PREFLIGHT_SECONDS", 0.5)
    url = f"{faulty}/{path}"
    command = f"densegrpo serve-rewards --reward mean --port {faulty.rpartition(':')[2]}$"
    with pytest.raises(ValueError, match=f"{url}: .*{reason}.*{command}"):
        rewards.load(f"mean@{faulty}/good,{url}")


def test_a_server_that_is_not_there_is_named_within_ten_seconds():
    url, began = closed_port(), time.monotonic()
    with pytest.raises(ValueError, match=f"{url}: Connection refused.*--reward geneval --port {url.rpartition(':')[2]}$"):
        rewards.load(f"geneval@{url}")
    assert time.monotonic() - began < 10.0 and http.PREFLIGHT_SECONDS < 10.0


def test_names_of_servers_are_checked(faulty):
    rewards.load(f"mean@{faulty}/good/, {faulty}/good", QUICK)
    for place in ("http://", "http://host:port", "http://host:0", "http://host?x=1", "http://a:1,,", "http://[::1", "http://h:99999"):
        with pytest.raises(ValueError, match="'mean': expected NAME@http://HOST:PORT"):
            rewards.load(f"mean@{place}")
    with pytest.raises(ValueError, match=wire.TOKEN) as error:
        rewards.load("mean@http://user:secret@host:1")
    assert "secret" not in str(error.value)


def test_a_token_that_no_header_can_hold_is_refused_unseen(faulty, monkeypatch):
    for secret in ("short", "with blanks in its middle", "with-a-newline\n-in-its-middle"):
        monkeypatch.setenv(wire.TOKEN, secret)
        with pytest.raises(ValueError, match="at least 16 characters") as error:
            rewards.load(f"mean@{faulty}/good")
        assert secret not in str(error.value)
