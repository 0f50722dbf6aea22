"""`lm prepare`: the failures of its functions become one line with a remedy."""

import concurrent.futures
import re
from collections.abc import Callable
from typing import Any

from lm.data.prepare.config import PrepareConfig
from lm.errors import ConfigError, LmError, Preempted
from lm.signals import end_in_order, handle_signals


def run(function: Callable[..., Any], config: PrepareConfig, path: str, *arguments: Any) -> None:
    """Calls a function of this package for the store `path`. Raises the errors of the function as LmError."""
    try:
        with handle_signals(end_in_order):
            function(config, path, *arguments)
    except concurrent.futures.process.BrokenProcessPool:
        raise LmError(
            'a worker process was killed, most likely for want of memory; run the same command again (finished shards '
            'are kept), with fewer --processes'
        ) from None
    except ImportError as error:  # of what reads gs:// and s3://
        raise ConfigError(f'{" ".join(str(error).split())[:300]}: install it and run the same command again') from None
    except OSError as error:
        what = f'{error.filename}: {error.strerror}' if error.filename else error.strerror or error
        if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
            raise ConfigError(
                f'{what}; something of another kind is needed there: move it away, or name another data.path or source'
            ) from None
        raise LmError(f'{what}; mend that and run the same command again: finished shards are kept') from None
    except KeyboardInterrupt:
        raise Preempted('stopped; the same command goes on from here') from None
    except ValueError as error:
        reason, _, detail = str(error).partition(' [')
        if not re.match('[A-Z_]{5,}: ', reason):  # a status of TensorStore
            raise
        kind = ConfigError if 'directory' in f'{reason}{detail}' else LmError
        raise kind(f'{path}: {reason}; run it again when mended') from None
