"""Synthetic tasks, one file each. Importing this package registers all of them."""

from lm.tasks import associative_recall, induction_heads, selective_copying
from lm.tasks.base import Task, TaskStore

__all__ = ['Task', 'TaskStore', 'associative_recall', 'induction_heads', 'selective_copying']
