"""How Sphinx builds the site: `scripts/docs.sh`."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'docs' / 'extensions'), str(ROOT)]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import lm  # noqa: E402

project = 'lm'
author = 'The authors of lm'
copyright = author
version = release = lm.__version__

extensions = ['myst_nb', 'lm_reference']
exclude_patterns = ['_build', 'extensions', 'notebooks/[!R]*.md']  # the text forms of notebooks
myst_enable_extensions = ['colon_fence', 'deflist']
nb_execution_mode = 'off'  # scripts/notebooks.py executes them
myst_heading_anchors = 4
suppress_warnings = ['myst.header']  # pages that README files fill begin with a lower heading
highlight_language = 'none'
smartquotes = False
nitpicky = True

html_theme = 'sphinx_book_theme'
html_title = 'lm'
html_static_path = ['_static']
html_css_files = ['site.css']
html_copy_source = html_show_sourcelink = False
html_theme_options = {'show_navbar_depth': 1, 'show_toc_level': 2, 'home_page_in_toc': True, 'navbar_persistent': []}
