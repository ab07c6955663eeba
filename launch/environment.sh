# Sourced by the other scripts: `environment [EXTRA]` installs the package, with that extra, into
# the active virtual environment or into .venv, and puts it on PATH. A second call does nothing.
environment() {
  local extra=${1:-} stamp wanted
  if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    VIRTUAL_ENV=$PWD/.venv
  fi
  export VIRTUAL_ENV PATH=$VIRTUAL_ENV/bin:$PATH
  python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "Python 3.11 or later is needed; PYTHON=/path/to/python3.11 $0 uses another one" >&2; exit 1; }
  stamp=$VIRTUAL_ENV/.xe_retrieval${extra:+-$extra}
  wanted=$(echo "$PWD" | cat - setup.py constraints.txt | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $VIRTUAL_ENV (once; about 2 GB)"
    pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}"
    echo "$wanted" > "$stamp"
  fi
}
