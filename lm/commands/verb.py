"""The contract of a verb."""

import argparse
import dataclasses
from collections.abc import Callable

Call = Callable[[], int | None]
"""The work of a verb: a function with typed arguments, all bound. It returns an exit code; None means 0."""


@dataclasses.dataclass(frozen=True)
class Verb:
    """One `lm VERB`.

    Its file states it, and `lm.commands.find_verbs` adds the name of the file and its functions.

    Attributes:
        place: `lm --help` lists the verbs in the order of these numbers.
        help: one line.
        example: a command that works.
        name: the word on the command line.
        add_flags: adds the flags to the parser.
        make_call: parsed flags → the call that does the work. It imports what the work needs, reads the configuration
            and refuses wrong flags; it writes nothing. No function below it sees the parsed flags.
        exit_codes: lines of `lm VERB --help` about exit codes that only this verb has.
        resumes: SIGTERM ends the verb with the exit code of what may be run again, at any moment.
        only_prints: the verb ends when nobody reads its output. Other verbs go on, since their results lie elsewhere.
    """

    place: int
    help: str
    example: str
    name: str = ''
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    make_call: Callable[[argparse.Namespace], Call] = lambda arguments: lambda: None
    exit_codes: str = ''
    resumes: bool = False
    only_prints: bool = False
