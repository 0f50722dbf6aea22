"""A server of the Hugging Face Hub for tests: data sets are folders of this machine."""

import contextlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator

REVISION = '0' * 40


@contextlib.contextmanager
def hub(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Serves the data sets in folder/OWNER/NAME; yields the environment in which programs find the server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self):
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            if found := re.fullmatch(r'/api/datasets/([^/]+/[^/]+)/tree/[^/]+/?(.*)', path):
                self._list(folder / found[1], folder / found[1] / found[2])
            elif found := re.fullmatch(r'/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?', path):
                exists = (folder / found[1]).is_dir()
                self._answer({'id': found[1], 'sha': REVISION, 'siblings': []} if exists else None)
            elif found := re.fullmatch(r'/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)', path):
                self._send_file(folder / found[1] / found[2])
            else:
                self._answer(None)

        do_HEAD = do_GET

        def _list(self, root: pathlib.Path, place: pathlib.Path) -> None:
            if not place.is_dir():
                return self._answer(None)
            return self._answer(
                [
                    {
                        'type': 'directory' if path.is_dir() else 'file',
                        'path': path.relative_to(root).as_posix(),
                        'oid': REVISION,
                        'size': 0 if path.is_dir() else path.stat().st_size,
                    }
                    for path in sorted(place.iterdir())
                ]
            )

        def _send_file(self, path: pathlib.Path) -> None:
            if not path.is_file():
                return self._answer(None)
            content = path.read_bytes()
            if wanted := re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range', '')):
                return self._send(206, content[int(wanted[1]) : int(wanted[2]) + 1])
            return self._send(200, content)

        def _answer(self, value: object) -> None:
            if value is None:
                self._send(404, b'{"error": "not found"}', {'X-Error-Code': 'RepoNotFound'})
            else:
                self._send(200, json.dumps(value).encode())

        def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in {'Content-Length': str(len(content)), 'ETag': '"x"', **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != 'HEAD':
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HUB_DISABLE_TELEMETRY': '1'}
        server.shutdown()
