"""Finds the files that ship with the project: `configs/…` and `data/….gin`, in a checkout as in a wheel."""

import pathlib

import lm

PACKAGE = pathlib.Path(lm.__file__).resolve().parent


def project_root() -> pathlib.Path:
    """Returns the folder that holds `configs` and `data`: the checkout, or the copy that setup.py puts into a wheel."""
    copy = PACKAGE / '_project'
    return copy if copy.is_dir() else PACKAGE.parent
