# Sourced by ./run and ./test: makes .venv hold exactly one lock, quickly when it already does, and
# fetches what pages and their tests need.
# Usage: prepare requirements/NAME.lock

find_python() {
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "veilstream needs Python 3.11 or newer; none was found (set PYTHON to one)" >&2
  return 1
}

# A lock is in place if the stamp of it, or of a lock that contains it, is the current one.
current() {
  [ -x .venv/bin/python ] && [ -f .venv/veilstream.stamp ] &&
    [ "$(cat .venv/veilstream.stamp)" = "$(wanted "$1")" ]
}

wanted() {
  echo "$PWD"
  cat "$1" pyproject.toml | cksum
}

prepare() {
  lock=$1
  if current "$lock" || current requirements/test.lock; then
    return 0
  fi
  if [ "$lock" = requirements/run.lock ] && current requirements/docs.lock; then
    return 0
  fi
  python=$(find_python)
  if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
    echo "== creating .venv with $("$python" --version)" >&2
    rm -rf .venv
    "$python" -m venv .venv
  fi
  rm -f .venv/veilstream.stamp
  echo "== installing $lock (once; a minute or two)" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --no-deps --no-build-isolation --editable . >&2
  wanted "$lock" >.venv/veilstream.stamp
}

# The chart library of report.html, once; without npm reports draw plainer charts.
fetch_charts() {
  [ -f src/veilstream/reports/page/vendor/uplot.js ] || .venv/bin/python scripts/fetch_npm.py uplot ||
    echo "== report.html draws plain charts until npm can fetch the library" >&2
}

# Chromium and its driver for tests/browser: what is there, else the system's package where we may.
prepare_browser() {
  if { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null; then
    :
  elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "== installing chromium and chromium-driver" >&2
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
      echo "== they cannot be installed; browser tests will not run" >&2
  else
    echo "== no Chromium: browser tests will not run (install chromium and chromium-driver)" >&2
  fi
  .venv/bin/python scripts/fetch_npm.py axe-core || echo "== no axe-core: its tests will not run" >&2
}
