"""How Sphinx makes the site of docs/; docs/build_site.py starts it."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "src"))

from veilstream import __version__  # noqa: E402 - from this clone

project = "veilstream"
author = "the authors of veilstream"
copyright = "the authors of veilstream, Apache-2.0"  # noqa: A001 - Sphinx asks for this name
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images", "results"]
html_theme = "furo"
html_title = f"veilstream {__version__}"
html_static_path = ["style"]
html_css_files = ["site.css"]
smartquotes = False  # two hyphens are an option, not a dash
html_theme_options = {"navigation_with_keys": True}

# Anchors as code hosts make them, so that a link works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

# Notebooks are kept without results, and run when the site is built. A cell that fails is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
default_role = "code"
napoleon_use_rtype = False


def _plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Docstrings are written to be read as they are: bars and stars in them are no markup."""
    for index, line in enumerate(lines):
        if not line.lstrip().startswith((":", "..")):
            lines[index] = re.sub(r"(?<![`\w])([|*_])(?=\w)|(?<=\w)([|*])(?!\w)", r"\\\1\2", line)


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", _plain, priority=100)
