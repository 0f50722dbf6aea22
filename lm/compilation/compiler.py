"""Compiling for devices that are described, with the program as the compiler wrote it."""

import dataclasses
import pathlib
import tempfile
from typing import Any

from lm.compilation.memory import ProgramMemory, program_memory

OPTIONS = {'xla_dump_hlo_as_text': True, 'xla_syntax_sugar_async_ops': True}  # as `Compiled.as_text` writes it
FINAL = '*after_codegen.txt'
REPORT = '*memory-usage-report.txt'


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program, its text (what `HloProgram` reads), and its memory; None where the compiler says nothing of that."""

    executable: Any
    text: str
    memory: ProgramMemory | None


def compile_with_text(lowered: Any) -> CompiledProgram:
    """Compiles what `jax.jit(f).lower(…)` returns.

    The text is libtpu's own: it may be newer than jaxlib and say what jaxlib cannot read (seen with v6e and v7x), which
    `Compiled.as_text` then reports at length. Other compilers write none, and are asked that way.
    """
    with tempfile.TemporaryDirectory(prefix='lm_program_') as folder:
        executable = lowered.compile(compiler_options=OPTIONS | {'xla_dump_to': folder})
        text, report = (_last(pathlib.Path(folder), pattern) for pattern in (FINAL, REPORT))
        return CompiledProgram(executable, text or executable.as_text(), program_memory(executable, report))


def _last(folder: pathlib.Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    return found[-1].read_text() if found else ''
