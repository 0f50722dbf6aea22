"""Gin files → typed, frozen dataclasses, strictly.

    experiment = load(['configs/models/small.gin'], ['train.steps = 1000'], root=Experiment)
    text = lm.config.text.dump(experiment)        # load of this text gives an equal experiment

Gin's own parser reads the files into statements, whose names are checked (`lm.config.read`). Each section is built once
from the statements that are in effect for it (`lm.config.resolve`). Afterwards every statement must have been used
(`lm.config.checks`). No state is kept or shared, so that any number of threads may load at once.
"""

import os
from collections.abc import Collection, Sequence
from typing import TypeVar

from lm.config.checks import check_used
from lm.config.read import read
from lm.config.resolve import map_sections, resolve
from lm.errors import ConfigError

T = TypeVar('T')


def load(
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    *,
    root: type[T],
    allow_imports: bool = False,
    base: str | None = None,
    leave_out: Collection[str] = (),
) -> T:
    """Resolves gin files and then gin parameters into a `root`. Of several values for one binding the last wins.

    Args:
        gin_files: paths or URLs (gs://…), in order; relative ones are looked for in the working directory, then in the
            project.
        gin_params: bindings such as 'train.steps = 1000'.
        allow_imports: permit `import` lines, which run code, and includes from anywhere.
        root: the dataclass to fill, whose fields are annotated with configurable classes.
        base: the config.gin of a run, read before all others. It must be sound on its own. Its bindings of nested
            configurables (mechanisms, sources) that the others replace are dropped silently.
        leave_out: bindings of `base` that do not count, such as 'mesh.processes'.

    Raises:
        ConfigError: one line that names file and line, the binding and a remedy.
    """
    for name, given in (('gin_files', gin_files), ('gin_params', gin_params)):
        if isinstance(given, str | os.PathLike):
            raise ConfigError(f'{name} = {str(given)!r}: must be a list, such as [{str(given)!r}]')
    if base is not None:
        alone = load([base], allow_imports=allow_imports, root=root)
        if not gin_files and not gin_params and not leave_out:
            return alone
    statements = read(gin_files, gin_params, allow_imports=allow_imports, base=base, leave_out=leave_out)
    bindings = {s.key: s for s in statements}
    built, calls = resolve(bindings, root)
    check_used(bindings, calls, set(map_sections(root).values()))
    return built
