"""Processes that take turns on one device: each holds its compiled steps, and times some of them on request.

A request is a line of JSON on a worker's standard input, {"do": name, …}. The reply is a line of JSON on its standard
output. Whatever a library prints there goes to standard error instead.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        hidden: the width of a gated feed-forward layer.
    """

    layers: int
    width: int
    heads: int
    head_dim: int
    hidden: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class Column:
    """One way to compute a training step.

    Attributes:
        framework: 'jax' or 'torch'.
        kind: 'lm', 'by_hand', 'nanogpt' or 'lm_in_torch'.
        shape: of the model.
        attention: the mechanism of `lm`, a name or a gin file; of PyTorch, the backend: 'flash' or 'cudnn'.
        gin_file: the model of `lm`.
        gin_params: further settings of `lm`.
        microbatch_tokens: the most tokens at a time, unless one sequence is longer.
        compiler_options: for XLA, by name.
        logit_bytes: the most bytes of float32 logits that `lm` holds at a time; None: its default.
    """

    name: str
    framework: str
    kind: str
    shape: Shape | None = None
    attention: str = 'softmax'
    gin_file: str = ''
    gin_params: tuple[str, ...] = ()
    microbatch_tokens: int = 16_384
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logit_bytes: int | None = None

    @classmethod
    def read(cls, found: dict[str, Any]) -> 'Column':
        """Returns the column that `dataclasses.asdict` made a dict of."""
        shape = found['shape'] and Shape(**found['shape'])
        return cls(**{**found, 'shape': shape, 'gin_params': tuple(found['gin_params'])})


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of a step.

    Attributes:
        context: tokens per window.
        tokens: per step.
    """

    context: int
    tokens: int

    def rows(self, microbatch_tokens: int) -> int:
        """Returns the windows of a microbatch: the most that divide the windows of a step."""
        windows = self.tokens // self.context
        most = max(1, microbatch_tokens // self.context)
        return max(n for n in range(1, windows + 1) if windows % n == 0 and n <= most)


class Worker:
    """A process that serves one framework.

    Args:
        python: the interpreter.
        module: calls `serve`.
        environment: variables that the worker gets, besides this process's variables.
    """

    def __init__(self, python: str, module: str, environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [python, '-m', module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a request; `receive` waits for its reply. A dead process is noticed there."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self) -> Any:
        """Waits for the reply to the oldest request. Raises RuntimeError if the worker failed or died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f'the process ended with code {self._process.wait()}')
        reply = json.loads(line)
        if 'error' in reply:
            raise RuntimeError(reply['error'])
        return reply['result']

    def ask(self, do: str, **arguments: Any) -> Any:
        """Sends a request and waits for its reply."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def read_clock(device: str) -> float:
    """Returns seconds: of this process's processors where they are the device, else of the clock."""
    return time.process_time() if device == 'cpu' else time.perf_counter()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answers requests until the standard input ends."""
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
