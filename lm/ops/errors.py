"""The error that every operation raises."""


class OperationError(ValueError):
    """A call that an operation cannot compute. The message names the argument, its value and the remedy."""
