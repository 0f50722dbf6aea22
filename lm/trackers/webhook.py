"""A message by HTTP when a run ends, for a chat room or a program that restarts it."""

import base64
import datetime
import json
import logging
import os
import re
import socket
import urllib.parse
import urllib.request

from lm.config.configurable import configurable, field
from lm.secrets import Secret, reveal
from lm.text import make_visible
from lm.trackers.base import RunFacts, Tracker, TrackerWriter

SECONDS = 10.0
"""The longest wait for the other side."""


VARIABLE = re.compile(r'\$(?:(\w+)|\{(\w+)\})')

log = logging.getLogger(__name__)


def _check_url(url: str) -> str | None:
    # A variable inside an address would send its value, such as a key, to a server that a stranger's file names.
    if '$' in url and not VARIABLE.fullmatch(url):
        return "must be one environment variable such as '$LM_WEBHOOK', or an address without any"
    good = url.startswith(('http://', 'https://', '$'))
    return None if good else "must begin with http:// or https://, or be an environment variable such as '$LM_WEBHOOK'"


@configurable('webhook', resume=True)
class Webhook(Tracker):
    """POST of JSON: event (done, preempted, diverged, wrong results, failed), run, run_dir, step, message, host, time,
    text."""

    url: str = field(
        default='$LM_WEBHOOK',
        check=_check_url,
        secret=True,
        help="'$NAME' of the environment; or an address, which no file keeps: config.gin has '$LM_WEBHOOK' then",
    )

    def open(self, run: RunFacts) -> TrackerWriter:
        url = reveal(self.url)
        if not url.startswith(('http://', 'https://')):
            raise ValueError(f'webhook.url = {self.url!r}: the environment has no such variable; set it')
        if isinstance(self.url, Secret):
            # The file may be a stranger's.
            host = make_visible(urllib.parse.urlsplit(url).netloc.rpartition('@')[2])
            log.warning(
                'webhook.url: %s gets a message when this run ends, as the configuration says; no file keeps the '
                'address: set %s before a resume',
                host,
                self.url.removeprefix('$'),
            )
        return _Messages(url, run)


def make_request(url: str, body: bytes) -> urllib.request.Request:
    """Returns a POST of JSON. A name and a password in the address become a header: urllib takes them for a host."""
    parts, headers = urllib.parse.urlsplit(url), {'Content-Type': 'application/json'}
    user, _, host = parts.netloc.rpartition('@')
    if user:
        plain = urllib.parse.unquote(user).encode()
        headers['Authorization'] = f'Basic {base64.b64encode(plain).decode()}'
    return urllib.request.Request(parts._replace(netloc=host).geturl(), body, headers, method='POST')


class _Messages(TrackerWriter):
    def __init__(self, url: str, run: RunFacts):
        self._url, self._run = url, run

    def event(self, kind: str, step: int, message: str) -> None:
        body = {
            'event': kind,
            'run': self._run.name,
            'run_dir': os.fspath(self._run.path),
            'step': step,
            'message': message,
            'host': socket.gethostname(),
            'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            'text': f'{self._run.name}: {kind} at step {step}' + ('' if kind == 'done' else f': {message}'),
        }
        request = make_request(self._url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass
