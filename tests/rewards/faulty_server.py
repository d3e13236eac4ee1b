"""A reward server with every fault there is, one a path; a process of its own, with nothing but the standard library.

`python faulty_server.py` prints its port and serves until it is killed. http://127.0.0.1:PORT/hung is a server that hangs, and so on.
"""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOCK, SEEN = threading.Lock(), {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, code, body, headers=(), claim=None):
        self.send_response(code)
        for name, value in (("Content-Length", str(len(body) if claim is None else claim)), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        fault = self.path.split("/")[1]
        health = {"status": "ready", "reward": "mean", "version": 1, "limits": {"images": 64}}
        strange = {"loading": ("status", "loading"), "other": ("reward", "other"), "new": ("version", 2), "few": ("limits", {"images": 1})}
        health |= [strange[fault]] if fault in strange else []
        if fault == "deaf":
            time.sleep(60)
        self.send(200, b"hello" if fault == "web" else json.dumps(health).encode())

    def do_POST(self):
        fault = self.path.split("/")[1]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        count = len(json.loads(body[: body.index(b"\n")])["prompts"])
        with LOCK:
            SEEN[fault] = SEEN.get(fault, 0) + 1
            seen = SEEN[fault]
        scores = [0.25] * count
        if fault == "sick":  # something else each time
            fault = ("good", "error", "nan", "short", "null", "html", "hung", "cut")[seen % 8]
        if fault == "hung":
            time.sleep(60)
        elif fault == "trickle":
            self.send(200, b"", claim=10_000)
            for _ in range(1000):
                self.wfile.write(b" ")
                time.sleep(0.05)
        elif fault == "cut":
            self.send(200, b'{"reward": "mean"', claim=1000)
            self.close_connection = True
        elif fault == "dead":
            os._exit(1)
        elif fault == "html":
            self.send(200, b"<html>sign in first</html>")
        elif fault == "array":
            self.send(200, b"[0.25]")
        elif fault == "nothing":
            self.send(200, b"{}")
        elif fault == "huge":
            self.send(200, b'{"reward": "mean", "scores": [' + b"0," * 10**6 + b"0]}")
        elif fault == "error" or (fault == "flaky" and seen % 2):
            self.send(500, b'{"error": "CUDA out of memory"}')
        elif fault == "refusing":
            self.send(422, b'{"error": "no such tag"}')
        elif fault == "busy" or (fault == "full" and seen < 3):
            self.send(503, b'{"error": "busy"}', [("Retry-After", "0")])
        elif fault == "moved":
            self.send(302, b"", [("Location", "/good/score")])
        else:
            time.sleep(0.2 if fault == "slow" else 0.0)
            scores = {"short": scores[1:], "long": [*scores, 0.25], "texts": ["0.25"] * count, "flags": [True] * count}.get(fault, scores)
            first = {"nan": float("nan"), "inf": float("inf"), "null": None}
            scores = [first[fault], *scores[1:]] if fault in first else scores
            name = "other" if fault == "swapped" else "mean"
            self.send(200, json.dumps({"reward": name, "scores": scores}).encode())


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    print(server.server_address[1], flush=True)
    server.serve_forever()
