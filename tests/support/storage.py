"""A real server of object storage, and between it and its clients a proxy that fails as one is told."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Bucket:
    """What clients reach, and how it fails.

    Attributes:
        url: of the bucket.
        fault: given the method and path of a request, "500", "404", "cut" (in the middle of the answer), "spoil" (one
            bit of it), "hang" (until `release` is set), or None.
        asked: method, path and range of each request.
    """

    def __init__(self, port):
        self.url = "s3://bucket"
        self.fault = lambda method, path: None
        self.asked = []
        self.release = threading.Event()
        bucket = self

        class Proxy(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                bucket.asked.append((self.command, self.path, self.headers.get("Range")))
                fault = bucket.fault(self.command, self.path)
                if fault == "hang":
                    bucket.release.wait(300)
                if fault in ("500", "404"):
                    code = b"InternalError" if fault == "500" else b"NoSuchKey"
                    self.answer(int(fault), {}, b"<Error><Code>%s</Code></Error>" % code)
                    return
                there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                there.request(self.command, self.path, body, dict(self.headers))
                got = there.getresponse()
                data = got.read()
                there.close()
                headers = dict(got.getheaders())
                if fault == "spoil":
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                    headers = {name: value for name, value in headers.items() if "checksum" not in name}
                self.answer(got.status, headers, data, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

            def answer(self, status, headers, data, *, cut=False):
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", headers.get("content-length"))
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.wfile.flush()
                    self.close_connection = True

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def failing(self, fault):
        self.fault, self.asked = fault, []
        try:
            yield self.asked
        finally:
            self.fault = lambda method, path: None


def only(what, pattern, times=1_000_000):
    """A fault of requests whose path matches, so many times."""
    left = [times]

    def fault(method, path):
        if not re.search(pattern, f"{method} {path}") or not left[0]:
            return None
        left[0] -= 1
        return what

    return fault


@contextmanager
def serving():
    """Start the server, on a port of its choice, with one bucket."""
    command = [sys.executable, "-m", "moto.server", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        port = next(int(match[1]) for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        bucket = Bucket(port)
        there = http.client.HTTPConnection("127.0.0.1", port)
        there.request("PUT", "/bucket")
        assert there.getresponse().status == 200
        there.close()
        yield bucket
        bucket.close()
    finally:
        server.terminate()
        server.wait()
