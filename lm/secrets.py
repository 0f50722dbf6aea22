"""Values that no file, log or page may show, such as the address of a webhook.

A field with `secret=True` takes '$NAME', a variable of the environment. It also takes the value itself, and then
configurations, texts and messages show '$NAME' in its place.
"""

import logging
import os
from typing import ClassVar


class Secret(str):
    """A secret as texts show it: '$NAME', the variable that holds it in other processes. `reveal` gives the value."""

    known: ClassVar[dict[str, str]] = {}
    """Value → '$NAME' of all secrets of this process."""
    _value: str

    @classmethod
    def hide(cls, value: str, variable: str) -> 'Secret':
        """Returns `value` as a secret that shows `variable`, such as '$LM_WEBHOOK'."""
        secret = cls(variable)
        secret._value = value
        cls.known[value] = variable
        return secret

    def reveal(self) -> str:
        return self._value


def reveal(value: str) -> str:
    """Returns the value of a field that is a secret; a variable that is not set stays as it is."""
    return value.reveal() if isinstance(value, Secret) else os.path.expandvars(value)


def redact(text: str) -> str:
    """Returns `text` with '$NAME' in the place of each secret of this process."""
    for value, variable in Secret.known.items():
        text = text.replace(value, variable)
    return text


def hide_secrets(record: logging.LogRecord) -> bool:
    """Takes the secrets out of a line of the log; a filter of its handler."""
    if Secret.known:
        record.msg, record.args = redact(record.getMessage()), ()
    return True


def list_variables() -> dict[str, str]:
    """Returns variable → value of the secrets of this process, for the environment of a process that it starts."""
    return {variable.removeprefix('$'): value for value, variable in Secret.known.items()}
