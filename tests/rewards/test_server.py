"""`densegrpo serve-rewards` as a real process on loopback; its queue and its scorer's thread also without one."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from densegrpo_jax import cli, rewards
from densegrpo_jax.config import RewardServer
from densegrpo_jax.rewards import known, wire
from densegrpo_jax.rewards.http import exchange
from densegrpo_jax.rewards.server import Service, is_loopback, listen
from tests.rewards import served

SERVED = Path(__file__).parent / "served.py"
SECRET = "a-secret-of-these-tests"
IMAGES = np.random.default_rng(0).integers(0, 256, (11, 6, 5, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def process():
    options = ["--port", "0", "--max-images", "8", "--max-megabytes", "1"]
    code = "import sys; from densegrpo_jax import cli; sys.exit(cli.main())"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "serve-rewards", "--reward", f"{SERVED}:mean", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {wire.TOKEN: SECRET},
    )  # fmt: skip
    lines = [child.stdout.readline() for _ in range(3)]
    assert lines[1] == "self-test: 2 images, scores 0.3399, 0.5294\n", lines
    child.url = lines[2].split("@")[1].split("'")[0]
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv(wire.TOKEN, SECRET)


@pytest.fixture
def no_secret(monkeypatch):
    monkeypatch.delenv(wire.TOKEN, raising=False)


def post(url, body, seconds=5.0, content_type=wire.CONTENT_TYPE):
    reply = exchange("POST", f"{url}/score", seconds, body, content_type)
    return reply.status, json.loads(reply.body)


def request(images=IMAGES[:1], form="npz", timeout=5.0, **metadata):
    return wire.encode(images, ["a"] * len(images), [metadata] * len(images), timeout, form)


def test_scores_are_those_of_the_reward_itself_in_their_order(process, secret):
    reward = rewards.load(f"mean@{process.url}", RewardServer(timeout=10.0, batch=3))
    metadata = [{"nan": i == 4} for i in range(11)]
    far = rewards.score("mean", reward, IMAGES, [str(i) for i in range(11)], metadata)
    near = rewards.score("mean", served.mean, IMAGES, [""] * 11, metadata)
    np.testing.assert_array_equal(far.value, near.value)
    np.testing.assert_array_equal(far.valid, near.valid)
    assert not far.valid[4] and far.valid.sum() == 10
    assert post(process.url, request(IMAGES[:3], "png"))[1]["scores"] == near.value[:3].tolist()


def test_the_token_is_asked_for_everywhere_and_shown_nowhere(process, monkeypatch):
    for wrong in (None, "another-secret-altogether", SECRET + "x"):
        monkeypatch.delenv(wire.TOKEN, raising=False) if wrong is None else monkeypatch.setenv(wire.TOKEN, wrong)
        assert exchange("GET", f"{process.url}/health", 5.0).status == 401
        assert post(process.url, request())[0] == 401
        with pytest.raises(ValueError, match=f"{process.url}: code 401: wrong or missing token; set {wire.TOKEN}") as error:
            rewards.load(f"mean@{process.url}", RewardServer(batch=8))
        assert SECRET not in str(error.value) and str(wrong) not in str(error.value)


def test_what_is_not_a_request_is_refused(process, secret):
    big = request(np.zeros((1, 800, 800, 3), np.uint8))
    for body, kind, status, reason in (
        (big, wire.CONTENT_TYPE, 413, f"{len(big)} bytes, at most 1048576"),
        (request(IMAGES[:9]), wire.CONTENT_TYPE, 400, "takes 1 to 8 images"),
        (b"\x80\x04K\x01.", wire.CONTENT_TYPE, 400, "no newline"),
        (request(), "text/plain", 415, wire.CONTENT_TYPE),
        (request(**{"raise": "value"}), wire.CONTENT_TYPE, 422, "ValueError: as the metadata asked"),
        (request(**{"raise": "other"}), wire.CONTENT_TYPE, 500, "RuntimeError: as the metadata asked"),
        (request(sleep=0.3, timeout=0.05), wire.CONTENT_TYPE, 504, "not scored within the 0.05 s"),
        (request(), wire.CONTENT_TYPE, 200, None),
    ):
        code, answer = post(process.url, body, content_type=kind)
        assert code == status and (reason is None or reason in answer["error"])
    assert exchange("GET", f"{process.url}/", 5.0).status == 404
    chunked = http.client.HTTPConnection(process.url.removeprefix("http://"), timeout=5.0)
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": wire.CONTENT_TYPE}
    chunked.request("POST", "/score", iter([b"x"]), headers, encode_chunked=True)
    assert chunked.getresponse().status == 411


def test_a_request_that_never_ends_holds_no_one_up(process, secret):
    stuck = http.client.HTTPConnection(process.url.removeprefix("http://"), timeout=5.0)
    stuck.putrequest("POST", "/score")
    for name, value in (("Authorization", f"Bearer {SECRET}"), ("Content-Type", wire.CONTENT_TYPE), ("Content-Length", "1000")):
        stuck.putheader(name, value)
    stuck.endheaders(b"{")
    assert post(process.url, request())[0] == 200
    stuck.close()


def test_sigterm_finishes_what_was_accepted(process, secret):
    answers = []
    asker = threading.Thread(target=lambda: answers.append(post(process.url, request(sleep=0.5))))
    asker.start()
    while json.loads(exchange("GET", f"{process.url}/health", 5.0).body)["counts"]["requests"] == 0 or not _busy(process):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    asker.join()
    assert answers[0][0] == 200 and answers[0][1]["scores"] == [IMAGES[0].mean() / 255.0]
    assert process.wait(10) == 0
    said = process.stdout.read()
    assert "finishing the accepted requests" in said and "0 busy" in said and SECRET not in said


def _busy(process):
    return json.loads(exchange("GET", f"{process.url}/health", 5.0).body)["accepted"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# The queue, in this process


@pytest.fixture
def service(no_secret):
    service = Service("mean", wire.Limits(images=8), queue=4)
    with listen(service, "127.0.0.1", 0, None) as server:
        service.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield service


def together(service, bodies):
    """Answers of requests sent while the scorer sleeps over another one, so that they wait together."""
    answers = [None] * len(bodies)

    def send(i, body):
        answers[i] = post(service.url, body)

    threads = [threading.Thread(target=send, args=item) for item in enumerate(bodies)]
    for i, thread in enumerate(threads):
        thread.start()
        while service.counts["requests"] + service.counts["busy"] <= i:
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    return answers


def test_before_the_reward_is_there_the_server_says_so(service):
    reply = exchange("GET", f"{service.url}/health", 5.0)
    assert reply.status == 503 and json.loads(reply.body)["status"] == "loading"
    reply = exchange("POST", f"{service.url}/score", 5.0, request(), wire.CONTENT_TYPE)
    assert reply.status == 503 and reply.retry_after == 1.0 and b"loading" in reply.body


def test_requests_that_wait_are_scored_in_one_call(service):
    service.start(served.mean)
    bodies = [request(sleep=0.3), request(IMAGES[:2], size=True), request(IMAGES[:4], size=True), request(IMAGES[:1, :3], size=True)]
    answers = together(service, bodies)
    assert [answer["scores"] for _, answer in answers[1:]] == [[6.0] * 2, [6.0] * 4, [1.0]]  # another size of images is another call
    assert service.counts["calls"] == 3 and service.counts["images"] == 8


def test_one_request_does_not_spoil_those_it_waits_with(service):
    service.start(served.mean)
    answers = together(service, [request(sleep=0.3), request(), request(**{"raise": "other"}), request(IMAGES[1:2])])
    assert [status for status, _ in answers] == [200, 200, 500, 200]
    assert [answers[i][1]["scores"] for i in (1, 3)] == [[IMAGES[i].mean() / 255.0] for i in (0, 1)]


def test_a_full_queue_says_when_to_come_again_and_the_client_does(service):
    service.start(served.mean)
    answers = together(service, [request(sleep=0.3)] + [request()] * 4)
    assert sorted(status for status, _ in answers) == [200] * 4 + [503] and service.counts["busy"] == 1
    reward = rewards.load(f"mean@{service.url}", RewardServer(timeout=5.0, batch=1))
    sleepers = threading.Thread(target=together, args=(service, [request(sleep=0.2)] * 4))
    sleepers.start()
    assert rewards.score("mean", reward, IMAGES[:3], [""] * 3, [{}] * 3).valid.all()
    sleepers.join()


def test_what_nobody_waits_for_is_not_scored(service):
    service.start(served.mean)
    answers = together(service, [request(sleep=0.3), request(timeout=0.05)])
    assert [status for status, _ in answers] == [200, 504]
    post(service.url, request())
    assert service.counts["images"] == 2 and service.counts["expired"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Before it is ready


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--reward", "mean"], "unknown reward 'mean'"),
        (["--reward", f"{SERVED}:nothing"], "defines no function 'nothing'"),
        (["--reward", "nowhere.py:mean"], "there is no file nowhere.py"),
        (["--reward", "mean@http://127.0.0.1:1"], "not that of another server"),
        (["--reward", f"{SERVED}:broken"], "self-test of reward 'broken': image 0"),
        (["--reward", f"{SERVED}:unordered"], "in the other"),
        (["--reward", f"{SERVED}:short"], r"returned scores of shape (1,) for 2 images"),
        (["--reward", f"{SERVED}:mean", "--host", "0.0.0.0"], f"a token is required; set {wire.TOKEN}"),
        (["--reward", f"{SERVED}:mean", "--host", "203.0.113.1"], "a token is required"),
        (["--reward", f"{SERVED}:mean", "--queue", "0"], "queue = 0"),
    ],
)
def test_a_server_that_is_not_right_does_not_start(capsys, no_secret, arguments, reason):
    assert cli.main(["serve-rewards", "--port", "0", *arguments]) == 2
    said = capsys.readouterr()
    assert reason in said.err and len(said.err.splitlines()) == 1 and "ready" not in said.out


def test_a_port_that_is_taken_is_named(service, capsys):
    port = service.url.rpartition(":")[2]
    assert cli.main(["serve-rewards", "--reward", f"{SERVED}:mean", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_addresses_of_this_machine_alone():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org", "localhost.example.org", "")))


@pytest.mark.parametrize("name", ["toy_spot", "scenes_compose_strict"])
def test_rewards_that_ship_pass_their_self_test_and_swapped_scores_do_not(name):
    reward = rewards.load(name)
    assert known.self_test(name, reward).startswith("self-test: 2 images")
    with pytest.raises(ValueError, match=f"self-test of reward {name!r}: image 0"):
        known.self_test(name, lambda images, prompts, metadata: reward(images[::-1], prompts, metadata))


def test_a_reward_may_bring_its_own_known_images():
    def reward(images, prompts, metadata):
        return np.full(len(images), 0.5)

    reward.known = known.Known(IMAGES[:1], ["a"], [{}], np.array([0.6]), np.array([1.0]))
    with pytest.raises(ValueError, match=r"must score 0.6 to 1, got 0.5"):
        known.self_test("mine", reward)
