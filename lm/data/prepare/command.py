"""The `lm prepare` command."""

import concurrent.futures
from typing import Any

from lm.data.prepare.stages import prepare
from lm.errors import ConfigError, LmError, Preempted


def main(experiment: Any, _: Any) -> int:
    """Prepares `experiment.data.path` (DataConfig) as `experiment.prepare` (PrepareConfig) says.

    Raises:
        ConfigError: something is wrong or missing in the configuration, or the store exists with another one.
        MismatchError: the source is damaged, or has bad records and `prepare.strict` is set.
    """
    try:
        prepare(experiment.prepare, experiment.data.path)
    except concurrent.futures.process.BrokenProcessPool:
        raise LmError(
            'a worker process was killed, most likely for want of memory; run the same command again (finished shards '
            'are kept), with fewer --processes'
        ) from None
    except ImportError as error:  # of what reads gs:// and s3://
        raise ConfigError(f'{" ".join(str(error).split())[:300]}: install it and run the same command again') from None
    except OSError as error:
        place = f'{error.filename}: ' if error.filename else ''
        raise LmError(
            f'{place}{error.strerror or error}; mend that and run the same command again: finished shards are kept'
        ) from None
    except KeyboardInterrupt:
        raise Preempted('stopped; the same command goes on from here') from None
    except ValueError as error:
        if 'RESOURCE_EXHAUSTED' in str(error) or 'PERMISSION_DENIED' in str(error) or 'No space left' in str(error):
            raise LmError(f'{experiment.data.path}: {str(error).split(" [")[0]}; run it again when mended') from None
        raise
    return 0
