"""Pre-training language models on TPUs with attention that the user selects."""

__version__ = '0.1.0'
