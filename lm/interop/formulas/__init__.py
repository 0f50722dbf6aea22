"""The formula of each mechanism in PyTorch, in the file of its name; `base` and `tokens` hold the shared parts.

`lm export` copies the files that a model needs. Nothing here imports them, because they need PyTorch.
"""
