"""`densegrpo serve-rewards`: a reward behind HTTP, for scorers that want another machine, another GPU or another environment.

    GET  /health   {"status": "loading" | "ready" | "stopping", "reward", "version", "limits", ...}; code 200 when ready, else 503
    POST /score    a request of `wire`; its answer, or an error as {"error": "..."}:
                   400 unreadable, 401 token, 411 / 413 / 415 length, size, type, 422 refused by the reward, 500 the reward failed,
                   503 busy or not ready (with Retry-After), 504 not done within the asker's timeout

One thread calls the reward. Requests that wait are joined into one call as long as their images are of one size.
"""

import dataclasses
import hmac
import importlib.util
import ipaddress
import json
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from densegrpo_jax import rewards
from densegrpo_jax.rewards import known, wire
from densegrpo_jax.rewards.base import Reward, score

IDLE_SECONDS = 30.0  # a connection that sends nothing for so long is closed
UPLOAD_SECONDS = 60.0  # within which a request must have arrived
DRAIN_SECONDS = 2.0  # for which a refused request is still read, so that its sender sees the answer instead of a reset
CONNECTIONS = 128

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Server:
    """Serve a reward over HTTP. The token for any address but loopback is read from the environment: DENSEGRPO_REWARD_TOKEN."""

    reward: str
    """Name of a reward, such as geneval or pickscore:FOLDER; or FILE.py:FUNCTION, a reward function of yours."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, which needs a token."""
    port: int = 18085
    """Port; 0 takes a free one and prints it."""
    queue: int = 16
    """Requests taken at a time, waiting ones included; further ones are told to come again."""
    max_images: int = 256
    """Images in one request, and in one call of the reward."""
    max_megabytes: int = 256
    """Size of one request. Memory is bounded by queue x max_megabytes, twice over while images are unpacked."""
    grace: float = 60.0
    """Seconds that accepted requests get to finish after SIGTERM or Ctrl-C."""


def serve(server: Server) -> int:
    """Loads the reward, tests it on known images, serves until SIGTERM or Ctrl-C, and finishes what was accepted.

    Returns:
      0, or 1 where the grace period ended before the work.

    Raises:
      ValueError: bad options, a missing token, a reward that cannot be loaded or fails its self-test.
      OSError: the address cannot be taken.
    """
    for option in ("queue", "max_images", "max_megabytes"):
        if getattr(server, option) < 1:
            raise ValueError(f"{option} = {getattr(server, option)}: must be at least 1")
    if not 0 <= server.port <= 65535:
        raise ValueError(f"port = {server.port}: must be from 0 to 65535; 0 takes a free one")
    if not 0.0 <= server.grace < 1e6:
        raise ValueError(f"grace = {server.grace}: must be from 0 to 1e6 seconds")
    secret = wire.token()
    if secret is None and not is_loopback(server.host):
        raise ValueError(
            f"host = {server.host}: other machines can reach it, so a token is required; set {wire.TOKEN} here and for the trainer, "
            'such as: export DENSEGRPO_REWARD_TOKEN="$(openssl rand -hex 24)"'
        )
    load, name = _loader(server.reward)
    limits = wire.Limits(bytes=server.max_megabytes * 2**20, images=server.max_images)
    service = Service(name, limits, server.queue)
    with listen(service, server.host, server.port, secret) as http:
        address = f"http://{_bracketed(server.host)}:{http.server_address[1]}"
        print(f"loading reward {name} for {address}", flush=True)
        reward = load()
        print(known.self_test(name, reward), flush=True)
        stop = threading.Event()
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            service.start(reward)
            print(f"ready; in a config: rewards = ({f'{name}@{address}'!r},)", flush=True)
            stop.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)  # a second signal stops at once
        print("stopping: finishing the accepted requests", flush=True)
        left = service.stop(server.grace)
        print(f"stopped{f', {left} requests unfinished' if left else ''}; {service.summary()}", flush=True)
        return 1 if left else 0


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine; a name other than localhost is taken for one that can."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loader(reward: str) -> tuple[Callable[[], Reward], str]:
    """How a reward is loaded, and its name. FILE.py:FUNCTION is run as the user's own program, like a config."""
    file, colon, function = reward.rpartition(":")
    if not (colon and file.endswith(".py")):
        if "@" in reward:
            raise ValueError(f"reward {reward!r}: a server serves a reward of its own, not that of another server")
        return lambda: rewards.load_served(reward), reward.partition(":")[0]
    if not Path(file).is_file():
        raise ValueError(f"reward {reward!r}: there is no file {file}")

    def load() -> Reward:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            raise ValueError(f"{file} defines no function {function!r} (images, prompts, metadata) -> scores")
        return getattr(module, function)

    return load, function


# ---------------------------------------------------------------------------------------------------------------------
# Scoring: a queue and one thread


@dataclasses.dataclass(eq=False)
class _Job:
    request: wire.Request
    deadline: float
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    scores: Any = None
    error: Exception | None = None


class Service:
    """The queue of requests, and the thread that scores them.

    Attributes:
      name: of the reward.
      limits: of a request.
      status: "loading", "ready" or "stopping".
      accepted: requests that are waiting or being scored.
      counts: of what happened so far.
    """

    def __init__(self, name: str, limits: wire.Limits, queue: int):
        self.name, self.limits, self.status = name, limits, "loading"
        self._queue, self.accepted, self._last_seconds = queue, 0, 1.0
        self._waiting: list[_Job] = []
        self._changed = threading.Condition()
        self.counts = {"requests": 0, "images": 0, "calls": 0, "busy": 0, "failed": 0, "expired": 0}

    def start(self, reward: Reward) -> None:
        """Begins to take requests."""
        threading.Thread(target=self._run, args=(reward,), name="scorer", daemon=True).start()
        self.status = "ready"

    def stop(self, grace: float) -> int:
        """Takes no more requests and waits for those that were accepted; returns how many are left after `grace` seconds."""
        with self._changed:
            self.status = "stopping"
            self._changed.wait_for(lambda: self.accepted == 0, grace)
            return self.accepted

    def summary(self) -> str:
        """What was done, in words."""
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())

    def enter(self) -> int | None:
        """Reserves a place in the queue: None if there is one, else after how many seconds to come again."""
        with self._changed:
            if self.status == "ready" and self.accepted < self._queue:
                self.accepted += 1
                self.counts["requests"] += 1
                return None
            self.counts["busy"] += 1
            return min(30, max(1, math.ceil(self._last_seconds)))

    def leave(self) -> None:
        """Gives the place back, when the answer has been sent."""
        with self._changed:
            self.accepted -= 1
            self._changed.notify_all()

    def score(self, request: wire.Request) -> tuple[np.ndarray, np.ndarray]:
        """Scores [N] and which are valid [N]; waits for its turn.

        Raises:
          TimeoutError: not done within the asker's timeout. Exception: whatever the reward raised.
        """
        job = _Job(request, time.monotonic() + request.timeout)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        if not job.done.wait(request.timeout):
            self.counts["expired"] += 1
            raise TimeoutError(f"not scored within the {request.timeout:g} s that the asker waits")
        if job.error is not None:
            raise job.error
        return job.scores

    def _run(self, reward: Reward) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                jobs = self._take()
            began = time.monotonic()
            self._score(reward, [job for job in jobs if began < job.deadline])  # nobody waits for the rest any more
            self._last_seconds = time.monotonic() - began

    def _take(self) -> list[_Job]:
        """The request that has waited longest, and those that can be scored with it."""
        taken, images = [], 0
        for job in list(self._waiting):
            shape = job.request.images.shape
            if not taken or (shape[1:] == taken[0].request.images.shape[1:] and images + shape[0] <= self.limits.images):
                taken.append(job)
                images += shape[0]
                self._waiting.remove(job)
        return taken

    def _score(self, reward: Reward, jobs: list[_Job]) -> None:
        if not jobs:
            return
        images = np.concatenate([job.request.images for job in jobs]) if len(jobs) > 1 else jobs[0].request.images
        prompts, metadata = ([entry for job in jobs for entry in getattr(job.request, part)] for part in ("prompts", "metadata"))
        self.counts["calls"] += 1
        try:
            scores = score(self.name, reward, images, prompts, metadata)
        except Exception as error:  # whatever a scorer raises is the answer to its request, not the end of the server
            if len(jobs) > 1:  # one request must not spoil the others
                for job in jobs:
                    self._score(reward, [job])
                return
            log.exception("reward %s failed on %d images", self.name, len(images))
            self.counts["failed"] += 1
            jobs[0].error = error
            jobs[0].done.set()
            return
        self.counts["images"] += len(images)
        ends = np.cumsum([len(job.request.images) for job in jobs])[:-1]
        for job, value, valid in zip(jobs, np.split(scores.value, ends), np.split(scores.valid, ends)):
            job.scores = value, valid
            job.done.set()


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


def listen(service: Service, host: str, port: int, secret: str | None) -> "_Http":
    """Answers HTTP on an address, on threads of its own, until the context ends.

    Raises:
      OSError: the address cannot be taken.
    """
    try:
        http = _Http((host, port), service, secret)
    except OSError as error:
        raise OSError(f"cannot listen on {_bracketed(host)}:{port}: {error.strerror or error}; give another --port or --host") from error
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True).start()
    return http


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], service: Service, secret: str | None):
        self.service, self.secret = service, None if secret is None else f"Bearer {secret}".encode()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the name of the host up, which can take seconds
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection of %s broke", client_address, exc_info=True)

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "densegrpo", ""
    timeout = IDLE_SECONDS

    def log_message(self, form: str, *args: Any) -> None:
        log.debug("%s " + form, self.client_address[0], *args)

    def do_GET(self) -> None:
        if not self._authorised():
            return
        if self.path != "/health":
            self._answer(404, {"error": "there are GET /health and POST /score"})
            return
        service = self.server.service
        self._answer(
            200 if service.status == "ready" else 503,
            {
                "status": service.status,
                "reward": service.name,
                "version": wire.VERSION,
                "limits": service.limits._asdict(),
                "accepted": service.accepted,
                "counts": service.counts,
            },
        )

    def do_POST(self) -> None:
        service, length = self.server.service, self.headers.get("Content-Length", "")
        if not self._authorised():
            return
        if self.path != "/score":
            self._refuse(404, "there are GET /health and POST /score")
        elif self.headers.get("Content-Type") != wire.CONTENT_TYPE:
            self._refuse(415, f"Content-Type must be {wire.CONTENT_TYPE}")
        elif not (length.isascii() and length.isdigit() and len(length) < 16):
            self._refuse(411, "Content-Length must say how many bytes come")
        elif int(length) > service.limits.bytes:
            self._refuse(413, f"the request has {length} bytes, at most {service.limits.bytes} are taken")
        elif (seconds := service.enter()) is not None:
            self._refuse(503, f"{'busy' if service.status == 'ready' else service.status}; come again", {"Retry-After": str(seconds)})
        else:
            try:
                self._score(int(length))
            finally:
                service.leave()

    def _score(self, length: int) -> None:
        service = self.server.service
        body = self._read(length, UPLOAD_SECONDS)
        if len(body) < length:
            self.close_connection = True
            self._answer(400, {"error": f"{len(body)} of {length} bytes came within {UPLOAD_SECONDS:g} s"})
            return
        try:
            request = wire.decode(body, service.limits)
        except ValueError as error:
            self._answer(400, {"error": str(error)})
            return
        del body
        began = time.monotonic()
        try:
            value, valid = service.score(request)
        except Exception as error:  # the reward's own
            code = 504 if isinstance(error, TimeoutError) else 422 if isinstance(error, ValueError) else 500
            self._answer(code, {"error": f"{type(error).__name__}: {error}"[:500]})
            return
        scores = [float(score) if good else None for score, good in zip(value, valid)]
        self._answer(200, {"reward": service.name, "scores": scores, "seconds": round(time.monotonic() - began, 4)})

    def _authorised(self) -> bool:
        secret, given = self.server.secret, self.headers.get("Authorization", "").encode("latin-1", "replace")
        if secret is None or hmac.compare_digest(given, secret):
            return True
        self._refuse(401, f"wrong or missing token; set {wire.TOKEN} to that of the server", {"WWW-Authenticate": "Bearer"})
        return False

    def _refuse(self, code: int, error: str, headers: dict[str, str] | None = None) -> None:
        """An error before the body was read. The rest of it is let in for a moment and dropped."""
        self.close_connection = True
        self._answer(code, {"error": error}, headers)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._read(self.server.service.limits.bytes, DRAIN_SECONDS, keep=False)

    def _read(self, length: int, seconds: float, keep: bool = True) -> bytearray:
        """Up to `length` bytes, in so many seconds."""
        body, left, deadline = bytearray(), length, time.monotonic() + seconds
        with suppress(TimeoutError):
            while left and (rest := deadline - time.monotonic()) > 0.0:
                self.connection.settimeout(min(rest, IDLE_SECONDS))
                part = self.rfile.read1(min(left, 2**20))
                if not part:
                    break
                left -= len(part)
                if keep:
                    body += part
        self.connection.settimeout(IDLE_SECONDS)
        return body

    def _answer(self, code: int, values: dict, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(values).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
