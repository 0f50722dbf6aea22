"""Compiling for devices that are described, with the program as the compiler wrote it."""

import pathlib
import tempfile
from typing import Any

OPTIONS = {'xla_dump_hlo_as_text': True, 'xla_syntax_sugar_async_ops': True}  # as `Compiled.as_text` writes it
FINAL = '*after_codegen.txt'


def compile_with_text(lowered: Any) -> tuple[Any, str]:
    """(the compiled program, its text). `lowered`: what `jax.jit(f).lower(…)` returns.

    The text is libtpu's own: it may be newer than jaxlib and say what jaxlib cannot read (seen with v6e and v7x), which
    `Compiled.as_text` then reports at length. Other compilers write none, and are asked that way.
    """
    with tempfile.TemporaryDirectory(prefix='lm_program_') as folder:
        compiled = lowered.compile(compiler_options=OPTIONS | {'xla_dump_to': folder})
        found = sorted(pathlib.Path(folder).glob(FINAL))
        return compiled, found[-1].read_text() if found else compiled.as_text()
