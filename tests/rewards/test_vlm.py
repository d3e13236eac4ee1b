"""Vision-language judges: what counts as a grade, what is asked, and that an answer without a grade is no zero."""

import base64
import io
import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from densegrpo_jax import rewards
from densegrpo_jax.config import RewardServer
from densegrpo_jax.rewards import vlm, wire

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
OPTIONS = RewardServer(timeout=5.0, attempts=2, on_failure="mask")


def text(content):
    return {"message": {"content": content}}


@pytest.mark.parametrize(
    ("kind", "answer", "grade"),
    [
        ("unifiedreward", "It fits.\nFinal Score: 4", 4.0),
        ("unifiedreward", "**Final Score:** 3.5", 3.5),
        ("unifiedreward", "Final Score : 2.75 because ...", 2.75),
        ("unifiedreward", "final score: 5.", 5.0),
        ("unifiedreward", "Final Score: 4\nAs said, Final Score: 4.0", 4.0),
        ("unifiedreward", "Final Score: 4 ... no, Final Score: 2", None),  # two grades are none
        ("unifiedreward", "Final Score: 7", None),  # of another scale
        ("unifiedreward", "Final Score: 0", None),
        ("unifiedreward", "Final Score: -3", None),
        ("unifiedreward", "Final Score: four", None),
        ("unifiedreward", "Final Score: 4.5.1", None),
        ("unifiedreward", "Score: 4", None),
        ("unifiedreward", "", None),
        ("unifiedreward", None, None),  # a refusal of the API
        ("unifiedreward", [{"type": "text", "text": "Final Score: 4"}], None),
        ("qwenvl", "Good light. <Score>4</Score>", 4.0),
        ("qwenvl", "<score> 3.5 </score>", 3.5),
        ("qwenvl", "<Score>n</Score>", None),
        ("qwenvl", "<Score>4", None),
        ("qwenvl", "<Score>45</Score>", None),
        ("qwenvl", "I cannot grade this picture.", None),
        ("deqa", "Good", 4.0),
        ("deqa", " bad.", 1.0),
        ("deqa", "The picture is bad", None),
        ("deqa", "", None),
    ],
)
def test_grades_of_answers(kind, answer, grade):
    assert vlm.JUDGES[kind].read(text(answer)) == grade


def tokens(**probabilities):
    top = [{"token": word, "logprob": math.log(p)} for word, p in probabilities.items()]
    return {"message": {"content": "good"}, "logprobs": {"content": [{"token": "good", "top_logprobs": top}]}}


def test_levels_are_weighted_by_their_probabilities():
    assert vlm.read_level(tokens(excellent=0.5, good=0.5)) == pytest.approx(4.5)
    assert vlm.read_level(tokens(**{" Good": 0.3, "good": 0.3, "Ġbad": 0.2, "The": 0.2})) == pytest.approx((0.6 * 4 + 0.2) / 0.8)
    assert vlm.read_level(tokens(exc=0.8, b=0.1, Be=0.1)) == 5.0  # the first piece of a word
    assert vlm.read_level(tokens(good=0.3, The=0.7)) is None


class Endpoint(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, values, status=200):
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"data": [{"id": model} for model in self.server.models]} if self.path == "/v1/models" else {}, 200)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"]))) | {"path": self.path, "key": self.headers["Authorization"]}
        self.server.asked.append(asked)
        values = self.server.reply(asked)
        self.answer(values, 500 if values is None else 200)


@contextmanager
def endpoint(reply, models=("judge-7b",)):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.reply, server.models, server.asked, server.handle_error = reply, models, [], lambda *_: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def prompt_of(asked):
    return asked["messages"][0]["content"][1]["text"].split("Request: ")[1].split("\n")[0]


def test_each_image_is_asked_about_with_its_prompt_and_bad_answers_are_masked(monkeypatch):
    monkeypatch.setenv(wire.TOKEN, "a-key-of-these-tests")
    answers = {"a": "Final Score: 5", "b": "I like it", "c": "Final Score: 1", "d": None}

    def reply(asked):
        answer = answers[prompt_of(asked)]
        return None if answer is None else {"choices": [text(answer)]}

    with endpoint(reply) as server:
        reward = rewards.load(f"unifiedreward@{server.url}", OPTIONS)
        scores = rewards.score("unifiedreward", reward, IMAGES, list("abcd"), [{}] * 4)
    np.testing.assert_array_equal(scores.value, [1.0, 0.0, 0.2, 0.0])
    np.testing.assert_array_equal(scores.valid, [True, False, True, False])
    assert reward.counts["unscored"] == 2
    asked = {prompt_of(entry): entry for entry in server.asked}
    assert len(server.asked) == 5 and asked["a"]["model"] == "judge-7b" and asked["a"]["temperature"] == 0.0  # "d" was tried twice
    assert asked["a"]["path"] == "/v1/chat/completions" and asked["a"]["key"] == "Bearer a-key-of-these-tests"
    data = asked["c"]["messages"][0]["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,")
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), IMAGES[2])


@pytest.mark.parametrize("values", [{}, {"choices": []}, {"choices": [{}]}, {"choices": "x"}, {"choices": [{"message": 1}]}, [1]])
def test_answers_of_another_form_are_failures(values):
    with endpoint(lambda asked: values) as server:
        reward = rewards.load(f"qwenvl@{server.url}", RewardServer(timeout=5.0, attempts=1))
        with pytest.raises(ConnectionError, match="requests failed"):
            reward(IMAGES[:1], ["a"], [{}])


def test_the_model_is_found_or_must_be_named():
    with endpoint(lambda asked: {"choices": [text("good")]}, models=("one", "two")) as server:
        with pytest.raises(ValueError, match="serves one, two; name one"):
            rewards.load(f"deqa@{server.url}")
        with pytest.raises(ValueError, match="serves one, two, not three"):
            rewards.load(f"deqa:three@{server.url}")
        with pytest.raises(ValueError, match="does the URL end with /v1"):
            rewards.load(f"deqa:two@{server.url.removesuffix('/v1')}")
        reward = rewards.load(f"deqa:two@{server.url}", OPTIONS)
        np.testing.assert_array_equal(rewards.score("deqa", reward, IMAGES[:1], ["a"], [{}]).value, [0.8])
        assert server.asked[0]["model"] == "two" and server.asked[0]["logprobs"] is True
