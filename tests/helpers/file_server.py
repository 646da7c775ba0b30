"""A small web server on this machine that serves files, well or badly."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """Files by path, and how they are served. `cuts`: bytes after which the next connections end."""

    files: dict[str, bytes]
    resumes: bool = True
    announces_length: bool = True
    cuts: list[int] = field(default_factory=list)
    status: int = 200
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range of every request
    url: str = ""


@contextmanager
def serve(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            span = self.headers.get("Range")
            server.asked.append((self.path, span))
            content = server.files.get(self.path)
            if server.status != 200 or content is None:
                self.send_error(server.status if server.status != 200 else 404)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1]) if span and server.resumes else 0
            if start and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if server.announces_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start:]
            self.wfile.write(rest[: server.cuts.pop(0)] if server.cuts else rest)

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
