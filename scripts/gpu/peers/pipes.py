"""A process that answers requests over pipes: {"do": name, …} in a line of JSON, and a reply in another line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


class WorkerFailed(RuntimeError):
    """The worker's answer is an error, or it ended."""


class PipeWorker:
    """A process that serves one library.

    Args:
        python: the interpreter.
        module: calls `serve`.
        environment: variables besides the caller's own.
    """

    def __init__(self, python: str, module: str, **environment: str):
        self._process = subprocess.Popen(
            [python, '-m', module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a request, whose reply `receive` returns. `receive` also reports a process that ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self) -> Any:
        """Waits for the next reply. Raises WorkerFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f'the process ended with code {self._process.wait()}')
        reply = json.loads(line)
        if 'error' in reply:
            raise WorkerFailed(reply['error'])
        return reply['result']

    def ask(self, do: str, **arguments: Any) -> Any:
        """Sends a request and waits for its reply. Raises WorkerFailed."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answers requests until the standard input ends. What libraries print goes to the standard error."""
    replies = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {'result': handlers[request.pop('do')](**request)}
        except Exception as error:
            reply = {'error': describe(error)}
        replies.write(json.dumps(reply) + '\n')
        replies.flush()


def describe(error: BaseException) -> str:
    """Returns an error in one short line."""
    return f'{type(error).__name__}: {error}'.replace('\n', ' ')[:400]
