"""The formula of each mechanism, in the file of its name; `base` and `tokens` hold the shared parts.

A formula is written once, over a namespace `xp` that is numpy, jax.numpy or torch. `lm export` ships the files that a
model needs; tests compute them in float64 and compare the fast paths with them. They import the standard library alone,
and use what the three namespaces share.
"""
