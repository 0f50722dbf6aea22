"""The checks of several runs, each under its name."""

from collections.abc import Mapping

from lm.check.check import CheckOptions, run_check
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.text import format_count


def run_checks(experiments: Mapping[str, Experiment], options: CheckOptions) -> None:
    """Prints the needs of each run below its name.

    Raises the errors of `run_check` with the name of the run, and ConfigError, after all, if some do not pass.
    """
    failed = {}
    for i, (name, experiment) in enumerate(experiments.items()):
        print(f'{chr(10) if i else ""}point {i} of {len(experiments)}: {name}', flush=True)
        try:
            run_check(experiment, options)
        except ConfigError as error:
            failed[name] = error
            print(f'not passed: {error}', flush=True)
    if failed:
        name, error = next(iter(failed.items()))
        raise ConfigError(f'{format_count(len(failed), "point")} of {len(experiments)} did not pass: {name}: {error}')
