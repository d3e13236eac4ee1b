"""Vision-language models as judges, behind any OpenAI-compatible chat endpoint (vLLM, SGLang, ...): "qwenvl@http://host:8000/v1".

The endpoint's model is taken if it serves one, else it is named: "qwenvl:Qwen/Qwen2.5-VL-7B-Instruct@http://host:8000/v1". A key, if
the endpoint wants one, is read from DENSEGRPO_REWARD_TOKEN. An answer that does not hold a grade is masked and counted: a judge that
talks about something else has not given the worst grade.

The questions are this project's own words. The answer forms and scales are those that Flow-GRPO's rewards of these names read (recipes:
"Final Score: x" of 1 to 5 over 5; <Score>n</Score> of 1 to 5 over 5; DeQA-Score's five levels, 1 to 5 over 5), so that a judge which was
tuned on its own question can be given it: `as_reward(..., judge=JUDGES["unifiedreward"]._replace(question=...))`.
"""

import base64
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from densegrpo_jax.config import RewardServer
from densegrpo_jax.rewards.base import Reward
from densegrpo_jax.rewards.http import BACKOFF, ask, check_url, exchange, in_batches, preflight, read_json

REQUESTS = 8  # at a time, per server: the endpoint batches them itself
LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}  # DeQA-Score (arXiv 2501.11561)
NUMBER = r"\**\s*(-?\d+(?:\.\d+)?)(?!\.?\d)"


class Judge(NamedTuple):
    """How a model is asked and its answer read.

    Attributes:
      question: with "{prompt}" where the image's prompt belongs, if anywhere.
      read: the endpoint's choice, a dict -> grade, or None where it holds none.
      scale: what divides the grade.
      options: of the request, beside model and messages.
    """

    question: str
    read: Callable[[dict], float | None]
    scale: float
    options: dict


def read_grade(pattern: str, low: float, high: float) -> Callable[[dict], float | None]:
    """A reader of the number that `pattern` finds, None if it finds none, several that differ, or one out of [low, high]."""

    def read(choice: dict) -> float | None:
        found = {float(number) for number in re.findall(pattern, _text(choice), re.IGNORECASE)}
        grade = found.pop() if len(found) == 1 else math.nan
        return grade if low <= grade <= high else None

    return read


def read_level(choice: dict) -> float | None:
    """DeQA's grade: the mean of the five levels under the probabilities of the first token, or the level named where none are given.

    Tokens that begin no level are left out. None where the levels have less than half of the probability.
    """
    content = (choice.get("logprobs") or {}).get("content") or []
    if not content:
        words = re.findall(r"[a-z]+", _text(choice).lower())
        return LEVELS.get(words[0]) if words else None
    weights: dict[str, float] = {}
    for entry in content[0]["top_logprobs"]:
        begun = entry["token"].strip(" \tĠ▁").lower()
        for word in LEVELS if len(begun) > 1 else ():
            if word.startswith(begun):  # a level may be several tokens
                weights[word] = weights.get(word, 0.0) + math.exp(entry["logprob"])
    total = sum(weights.values())
    return sum(LEVELS[word] * weight for word, weight in weights.items()) / total if total >= 0.5 else None


def _text(choice: dict) -> str:
    text = choice["message"]["content"]
    return text if isinstance(text, str) else ""


JUDGES = {
    "unifiedreward": Judge(
        "This picture was generated for the request below. Judge how well it shows what was asked for, and how good it looks: objects, "
        "their number, colours and places, then defects and style.\nRequest: {prompt}\n"
        "Explain in a few sentences, then end with one line of the form\nFinal Score: x\nwhere x is a number from 1 (bad) to 5 (perfect).",
        read_grade(r"Final Score\**\s*:" + NUMBER, 1.0, 5.0),
        5.0,
        {"max_tokens": 512, "temperature": 0.0},
    ),
    "deqa": Judge(
        "How would you rate the technical quality of this picture? Answer with one word: excellent, good, fair, poor or bad.",
        read_level,
        5.0,
        {"max_tokens": 4, "temperature": 0.0, "logprobs": True, "top_logprobs": 20},
    ),
    "qwenvl": Judge(
        "Grade the beauty of this picture: composition, light, colours, sharpness, and whether anything in it is deformed. 1 is ugly or "
        "broken, 2 weak, 3 ordinary, 4 good, 5 outstanding. Give one sentence of reasons and then the grade as <Score>n</Score>.",
        read_grade(r"<Score>" + NUMBER + r"\s*</Score>", 1.0, 5.0),
        5.0,
        {"max_tokens": 256, "temperature": 0.0},
    ),
}


def load(name: str, options: RewardServer = RewardServer()) -> Reward:  # noqa: B008  (frozen)
    """The judge "KIND@URL" or "KIND:MODEL@URL,URL", after a look at every endpoint.

    Raises:
      ValueError: an unknown kind, no URL, an endpoint that does not answer, or does not serve the model or serves several.
    """
    who, _, places = name.partition("@")
    kind, _, model = who.partition(":")
    if kind not in JUDGES:
        raise ValueError(f"unknown judge {kind!r}; known: {', '.join(JUDGES)}")
    urls = [check_url(name, place) for place in places.split(",")]
    models = {}

    def look(url: str, seconds: float) -> None:
        models[url] = _find_model(model, read_json(exchange("GET", f"{url}/models", seconds)))

    preflight(urls, look, f"vllm serve {model or 'MODEL'} (any server with an OpenAI-compatible API)")
    return as_reward(kind, urls, models, JUDGES[kind], options)


def _find_model(model: str, values: dict) -> str:
    try:
        served = [entry["id"] for entry in values["data"]]
    except (KeyError, TypeError) as error:
        raise ConnectionError("not an OpenAI-compatible endpoint: its /models lists none; does the URL end with /v1?") from error
    if model and model not in served:
        raise ConnectionError(f"serves {', '.join(served)}, not {model}")
    if not model and len(served) != 1:
        raise ConnectionError(f"serves {', '.join(served) or 'no model'}; name one, as in qwenvl:MODEL@URL")
    return model or served[0]


def as_reward(
    kind: str, urls: Sequence[str], models: dict[str, str], judge: Judge, options: RewardServer, backoff: tuple[float, float] = BACKOFF
) -> Reward:
    """A reward that asks judges, without the look at them.

    Args:
      kind: name of the reward, for messages.
      urls: of the endpoints.
      models: the model of each.
      judge: the question, and how answers are read.
      options: bounds, and what to do with requests that fail; one request is one image.
      backoff: see `http.ask`.

    Returns:
      The reward; grades over the judge's scale, not valid where the answer holds no grade.
    """

    def one(images: np.ndarray, prompts: list[str], metadata: list[dict], turn: int) -> tuple[np.ndarray, int]:
        messages = _messages(judge.question, prompts[0], images[0])

        def ask_one(url: str, seconds: float) -> float:
            body = json.dumps({"model": models[url], "messages": messages, **judge.options}).encode()
            values = read_json(exchange("POST", f"{url}/chat/completions", seconds, body, "application/json"))
            try:
                grade = judge.read(values["choices"][0])
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise ConnectionError("the answer is not that of an OpenAI-compatible endpoint") from error
            return math.nan if grade is None else grade / judge.scale

        score, failed = ask(urls, turn, ask_one, options, backoff)
        return np.array([score]), failed

    return in_batches(kind, one, options, per_call=1, workers=REQUESTS * len(urls))


def _messages(question: str, prompt: str, image: np.ndarray) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question.replace("{prompt}", prompt)}]
    return [{"role": "user", "content": content}]
