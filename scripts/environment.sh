# Sourced by ./run and ./test: makes .venv hold exactly one lock, quickly when it already does.
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
