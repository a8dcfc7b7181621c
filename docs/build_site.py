"""Build the documentation's site from docs/, and serve it on this machine.

    ./run docs                     build it, then serve it at http://127.0.0.1:8000
    ./run docs --port 8001         at another port
    ./run docs --build DIR         only build it, into DIR

Warnings are errors. What is built loads nothing from another host.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def build(out: Path) -> int:
    """Write the site into ``out``.

    Returns:
        Sphinx's exit code: 0 only if it had nothing to warn of.

    """
    from sphinx.cmd.build import main as sphinx_build

    with tempfile.TemporaryDirectory(prefix="veilstream-site-trees-") as trees:
        os.environ["IPYTHONDIR"] = str(_kernel_settings(Path(trees)))
        return sphinx_build(["-b", "html", "-W", "--keep-going", "-q", "-d", trees, str(DOCS), str(out)])


def _kernel_settings(folder: Path) -> Path:
    """Notebooks run without the user's own settings, and without a remark on loopback."""
    profile = folder / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
    return profile.parent


def server_of(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of a folder, for callers of this machine and no others; port 0 takes a free one."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


def serve(folder: Path, port: int) -> None:
    """Answer until interrupted."""
    with server_of(folder, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def main() -> int:
    """Build, then serve unless only a build is wanted."""
    parser = argparse.ArgumentParser(prog="./run docs", description="The documentation's site.")
    parser.add_argument("--build", metavar="DIR", type=Path, help="only build it, into DIR")
    parser.add_argument("--port", type=int, default=8000, help="to serve it at; 0 takes a free one")
    options = parser.parse_args()
    if options.build is not None:
        return build(options.build)
    with tempfile.TemporaryDirectory(prefix="veilstream-site-") as folder:
        failed = build(Path(folder))
        if not failed:
            serve(Path(folder), options.port)
        return failed


if __name__ == "__main__":
    raise SystemExit(main())
