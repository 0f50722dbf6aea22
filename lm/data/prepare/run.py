"""`lm prepare`: `lm.data.prepare.stages.prepare`, whose failures become one line with a remedy."""

import concurrent.futures
import contextlib
import re
from collections.abc import Iterator

from lm.data.prepare.chain import prove
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.parts import WHOLE, Share
from lm.data.prepare.stages import prepare
from lm.errors import ConfigError, LmError, Preempted
from lm.signals import end_in_order, handle_signals


def run_prepare(config: PrepareConfig, path: str, share: Share = WHOLE, only_assemble: bool = False) -> None:
    """Makes the token store `path` as `config` describes it, or a share of it. Raises the errors of `prepare`, and
    MismatchError: the source is damaged, or has bad records and `prepare.strict` is set."""
    with _explaining(path):
        prepare(config, path, None, share, only_assemble)


def run_prepare_with_beam(config: PrepareConfig, path: str, flags: str) -> None:
    """Makes the token store `path` with Apache Beam, whose runner gets `flags`. Raises the errors of `run_prepare` and
    `prepare_with_beam`."""
    from lm.data.prepare.beam import prepare_with_beam

    with _explaining(path):
        prepare_with_beam(config, path, flags)


def run_prove(config: PrepareConfig, path: str, share: float) -> None:
    """Compares a share of the shards of the store `path` with their source. Raises the errors of `prove`."""
    with _explaining(path):
        prove(config, path, share)


@contextlib.contextmanager
def _explaining(path: str) -> Iterator[None]:
    """A block whose failures become one line with a remedy."""
    try:
        with handle_signals(end_in_order):
            yield
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
