"""Rewards on servers of `densegrpo serve-rewards`: "geneval@http://host:18085", several servers after a comma.

Nothing here waits without bound: one exchange ends at its deadline whatever the other side does, a batch of images after attempts x
timeout seconds with all tries and waits. What fails then stops the run or is masked and counted, as `reward_server.on_failure` says.
"""

import ipaddress
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from densegrpo_jax.config import RewardServer
from densegrpo_jax.rewards import base, wire
from densegrpo_jax.rewards.base import Reward

PREFLIGHT_SECONDS = 8.0
BACKOFF = 0.5, 10.0  # seconds after a first failure, doubled with each further one; and at most
PATIENCE = 600.0  # seconds without one answer after which "mask" stops the run as "fail" does

log = logging.getLogger(__name__)


class Rejected(ValueError):
    """The server understood, and will not do it: asking again is of no use."""


class Busy(ConnectionError):
    """The server asks to come again after `seconds`."""

    def __init__(self, reason: str, seconds: float):
        super().__init__(reason)
        self.seconds = seconds


class Reply(NamedTuple):
    """status and body of an answer, and after how many seconds to come again, if it says so."""

    status: int
    body: bytes
    retry_after: float | None


# ---------------------------------------------------------------------------------------------------------------------
# One exchange, and several tries of it


def exchange(method: str, url: str, seconds: float, body: bytes | None = None, content_type: str | None = None) -> Reply:
    """One HTTP request. It carries the token of the environment, follows no redirects and uses no proxy.

    Args:
      method, url: of the request.
      seconds: within which the whole answer must have come; then the connection is cut.
      body, content_type: what is sent.

    Raises:
      TimeoutError: no whole answer in that time. ConnectionError: no connection, or one that broke, or an answer beyond the limit.
    """
    parts, deadline = urlsplit(url), time.monotonic() + seconds
    connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(parts.hostname, parts.port, timeout=seconds)
    headers = {"Connection": "close", "Accept": "application/json"}
    if secret := wire.token():
        headers["Authorization"] = f"Bearer {secret}"
    if content_type:
        headers["Content-Type"] = content_type
    cut = threading.Event()
    timer = None
    try:
        connection.timeout /= max(1, len(socket.getaddrinfo(parts.hostname, connection.port, type=socket.SOCK_STREAM)))
        connection.connect()
        link = connection.sock

        def expire() -> None:  # timeouts of sockets are for each read: a server that trickles would keep us for ever
            cut.set()
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(0.0, deadline - time.monotonic()), expire)
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, parts.path or "/", body, headers)
        except (BrokenPipeError, ConnectionResetError):
            if cut.is_set():
                raise
            # a refusal before the end of the body: the answer is there
        response = connection.getresponse()
        data = response.read(wire.REPLY_LIMIT + 1)
        after = response.headers.get("Retry-After", "")
    except (OSError, HTTPException) as error:
        if cut.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no whole answer within {seconds:g} s") from error
        raise ConnectionError(str(error.strerror if isinstance(error, OSError) and error.strerror else error) or repr(error)) from error
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()
    if cut.is_set():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    if len(data) > wire.REPLY_LIMIT:
        raise ConnectionError(f"an answer of more than {wire.REPLY_LIMIT} bytes")
    if response.length:
        raise ConnectionError(f"the answer ends {response.length} bytes before its end")
    return Reply(response.status, data, float(after) if after.isascii() and after.isdigit() else None)


def read_json(reply: Reply) -> dict:
    """The object in an answer of code 200.

    Raises:
      Busy: code 429 or 503. Rejected: another one of 400 to 499. ConnectionError: any other code, or not a JSON object.
    """
    if reply.status == 200:
        try:
            values = json.loads(reply.body)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"the answer is not JSON: {_shown(reply.body)}") from error
        if not isinstance(values, dict):
            raise ConnectionError(f"the answer is not a JSON object: {_shown(reply.body)}")
        return values
    try:
        reason = json.loads(reply.body)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        reason = _shown(reply.body)
    reason = f"code {reply.status}: {reason}"
    if reply.status in (429, 503):
        raise Busy(reason, BACKOFF[0] if reply.retry_after is None else reply.retry_after)
    if 400 <= reply.status < 500:
        raise Rejected(reason)
    raise ConnectionError(reason)


def _shown(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace"))


def ask(urls: Sequence[str], turn: int, ask_one: Callable[[str, float], Any], options: RewardServer, backoff=BACKOFF) -> Any:
    """Asks one server after the other until one answers.

    Args:
      urls: of the servers.
      turn: which of them comes first.
      ask_one: (url, seconds) -> result. What it raises decides: Busy is waited out, which is not a try; Rejected strikes the server
        off; any other OSError is a try that failed.
      options: the bounds.
      backoff: seconds of the first and of the longest wait, made after every server had its turn.

    Returns:
      The result, and how many tries failed before it.

    Raises:
      ConnectionError: none of the tries succeeded, or attempts x timeout seconds are over; with the last reason of each server.
    """
    deadline = time.monotonic() + options.attempts * options.timeout
    left, failed, reasons = [*urls[turn % len(urls) :], *urls[: turn % len(urls)]], 0, {}
    while left and failed < options.attempts:
        wait = backoff[1]
        for url in list(left):
            rest = deadline - time.monotonic()
            if rest <= 0.0 or failed >= options.attempts:
                break
            try:
                return ask_one(url, min(options.timeout, rest)), failed
            except Busy as busy:
                reasons[url], wait = str(busy), min(wait, max(busy.seconds, backoff[0]))
            except Rejected as error:
                reasons[url] = str(error)
                left.remove(url)
            except OSError as error:
                failed += 1
                wait = min(wait, backoff[0] * 2.0 ** (failed - 1))
                if rest >= options.timeout or url not in reasons:  # that a cut last try was too short says nothing
                    reasons[url] = str(error)
        rest = deadline - time.monotonic()
        if rest <= 0.0:
            break
        if left and failed < options.attempts:
            time.sleep(min(wait * random.uniform(0.5, 1.0), rest))
    raise ConnectionError("; ".join(f"{url}: {reason}" for url, reason in reasons.items()))


# ---------------------------------------------------------------------------------------------------------------------
# The reward


def load(name: str, options: RewardServer = RewardServer()) -> Reward:  # noqa: B008  (frozen)
    """The reward "NAME@URL" or "NAME@URL,URL", after a look at every server.

    Raises:
      ValueError: no URL, a server that is not ready or serves another reward or refuses the token; with the command that starts it.
    """
    kind, _, places = name.partition("@")
    urls = [check_url(name, place) for place in places.split(",")]
    preflight(urls, lambda url, seconds: _look(kind, options.batch, url, seconds), f"densegrpo serve-rewards --reward {kind}")
    return as_reward(kind, urls, options)


def check_url(name: str, place: str) -> str:
    """The URL of a server, without a slash at its end.

    Raises:
      ValueError: not http or https, no host, a wrong port, or with a password or a query in it.
    """
    place = place.strip()
    try:
        parts = urlsplit(place)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.username or parts.password or parts.query or parts.fragment:
        hint = f"; a token goes into {wire.TOKEN}" if good else ""
        raise ValueError(f"reward {name.partition('@')[0]!r}: expected NAME@http://HOST:PORT, several after a comma{hint}")
    return place.rstrip("/")


def preflight(urls: Sequence[str], look: Callable[[str, float], None], command: str) -> None:
    """Looks at all servers at once, for less than ten seconds in all.

    Args:
      urls: of the servers.
      look: (url, seconds) -> None, or raises what is wrong.
      command: that starts one, without its address.

    Raises:
      ValueError: naming each server that is not there, why, and how to start it.
    """

    def reason(url: str) -> str | None:
        try:
            look(url, PREFLIGHT_SECONDS)
        except (OSError, ValueError) as error:
            return f"{url}: {error}"
        return None

    with ThreadPoolExecutor(len(urls)) as pool:
        bad = [(url, found) for url, found in zip(urls, pool.map(reason, urls)) if found]
    if bad:
        parts = urlsplit(bad[0][0])
        place = f" --port {parts.port}" if parts.port else ""
        with suppress(ValueError):
            if ipaddress.ip_address(parts.hostname).is_loopback:
                place += "" if parts.hostname == "127.0.0.1" else f" --host {parts.hostname}"
        raise ValueError(f"no reward server that can be used at {'; '.join(found for _, found in bad)}. To start one: {command}{place}")


def _look(kind: str, batch: int, url: str, seconds: float) -> None:
    values = read_json(exchange("GET", f"{url}/health", seconds))
    if values.get("status") != "ready" or values.get("version") != wire.VERSION:
        raise ConnectionError(f"not a ready reward server of protocol {wire.VERSION}: {json.dumps(values)[:200]}")
    if values.get("reward") != kind:
        raise ConnectionError(f"serves the reward {values.get('reward')!r}")
    if values["limits"]["images"] < batch:
        raise ConnectionError(f"takes {values['limits']['images']} images in a request, and reward_server.batch is {batch}")


def as_reward(kind: str, urls: Sequence[str], options: RewardServer, backoff: tuple[float, float] = BACKOFF) -> Reward:
    """A reward that asks servers, without the look at them.

    Args:
      kind: name of the reward, as the servers know it.
      urls: of the servers; batches go round among them.
      options: batch, bounds, and what to do with failures.
      backoff: see `ask`.

    Returns:
      The reward. Its attribute `counts` says how many requests were made, how many tries failed, and how many images had no score.
    """

    def batch(images: np.ndarray, prompts: list[str], metadata: list[dict], turn: int) -> tuple[np.ndarray, int]:
        def ask_one(url: str, seconds: float) -> np.ndarray:
            body = wire.encode(images, prompts, metadata, seconds)
            return _scores(kind, len(prompts), read_json(exchange("POST", f"{url}/score", seconds, body, wire.CONTENT_TYPE)))

        return ask(urls, turn, ask_one, options, backoff)

    return in_batches(kind, batch, options, per_call=options.batch, workers=2 * len(urls))


def _scores(kind: str, count: int, values: dict) -> np.ndarray:
    """The scores of an answer, NaN where there is none."""
    scores = values.get("scores")
    if values.get("reward") != kind:
        raise ConnectionError(f"the answer is of the reward {values.get('reward')!r}")
    if not isinstance(scores, list) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        raise ConnectionError(f"the answer has {got} for {count} images")
    if not all(value is None or type(value) in (int, float) for value in scores):
        raise ConnectionError("the answer has scores that are not numbers")
    return np.array([np.nan if value is None else value for value in scores], np.float64)


def in_batches(kind: str, batch: Callable, options: RewardServer, per_call: int, workers: int) -> Reward:
    """A host reward that scores batches on threads, with failures treated as `options` says.

    Args:
      kind: name, for messages.
      batch: (images [n, H, W, 3], prompts, metadata, turn) -> scores [n] with NaN where there are none, and failed tries; may raise
        OSError.
      options: whether a failure stops the run.
      per_call: images in a batch.
      workers: batches at a time.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=kind)
    counts = {"requests": 0, "failed_tries": 0, "unscored": 0}
    lock, last_answer = threading.Lock(), time.monotonic()

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        nonlocal last_answer
        images, count = np.asarray(images), len(prompts)
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != count:
            raise ValueError(f"expected uint8 images [{count}, H, W, 3], one a prompt, got {images.dtype} {images.shape}")

        def one(start: int) -> tuple[np.ndarray, int] | OSError:
            part = slice(start, start + per_call)
            with lock:
                turn = counts["requests"]
                counts["requests"] += 1
            try:
                return batch(images[part], list(prompts[part]), list(metadata[part]), turn)
            except OSError as error:
                return error

        values, errors = np.full(count, np.nan), []
        starts = range(0, count, per_call)
        for start, result in zip(starts, pool.map(one, starts)):
            if isinstance(result, OSError):
                errors.append(result)
                continue
            last_answer = time.monotonic()
            values[start : start + per_call], failed = result
            with lock:
                counts["failed_tries"] += failed
        valid = ~np.isnan(values)
        with lock:
            counts["unscored"] += int((~valid).sum())
        if errors:
            what = f"reward {kind!r}: {len(errors)} of {len(starts)} requests failed; the first: {errors[0]}"
            silent = time.monotonic() - last_answer
            if options.on_failure == "fail":
                raise ConnectionError(what)
            if silent > PATIENCE:
                raise ConnectionError(f"{what} (no answer for {silent:.0f} s)")
            log.warning("%s", what)
        return values, valid

    marked = base.host(reward, workers)
    marked.counts = counts
    return marked
