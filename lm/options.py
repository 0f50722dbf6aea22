"""Options of a verb as fields of a dataclass: `lm.commands.flags.add_option_flags` makes a flag of each."""

import dataclasses
from typing import Any


def option(help: str, metavar: str | None = None, default: object = None, **settings: object) -> Any:
    """Returns a field that is a flag.

    The type of the field decides which values the flag takes; lists have commas between items. A number is at least 1.

    Args:
        help: the text of --help.
        metavar: what --help calls the value.
        default: the value without the flag. It should be immutable.
        settings: for argparse. With `nargs` the field is an argument without a flag. With `action = 'append'` each
            flag gives one item. Two are not argparse's: `flag`, where it is not the name of the field, and `least`, the
            least value of a number.
    """
    return dataclasses.field(default=default, metadata={'help': help, 'metavar': metavar} | settings)
