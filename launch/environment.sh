# Sourced by the other scripts: `environment [EXTRA]` installs the package, with that extra, into
# the active virtual environment or into .venv, and puts it on PATH. A second call does nothing.
# By uv if there is one, else by pip.
environment() {
  local extra=${1:-} stamp wanted
  if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
      if [ -z "${PYTHON:-}" ] && command -v uv > /dev/null; then
        uv venv --quiet --seed --python '>=3.11' .venv # fetches a Python if there is none
      else
        "${PYTHON:-python3}" -m venv .venv
      fi
    fi
    VIRTUAL_ENV=$PWD/.venv
  fi
  export VIRTUAL_ENV PATH=$VIRTUAL_ENV/bin:$PATH
  python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "Python 3.11 or later is needed; PYTHON=/path/to/python3.11 $0 uses another one" >&2; exit 1; }
  stamp=$VIRTUAL_ENV/.xe_retrieval${extra:+-$extra}
  wanted=$(echo "$PWD" | cat - setup.py constraints.txt | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $VIRTUAL_ENV, once; about 3 GB on disk, of which TensorFlow is 1.8"
    if command -v uv > /dev/null; then
      uv pip install -c constraints.txt -e ".${extra:+[$extra]}" # shows what it fetches by itself
    else # one line for each package that is fetched, with its size: minutes in silence look like a hang
      pip install --disable-pip-version-check --progress-bar=off -c constraints.txt -e ".${extra:+[$extra]}" |
        sed -un 's/^ *\(Downloading .*MB)\)$/  \1/p; /^Installing collected/s/:.*//p'
    fi
    echo "$wanted" > "$stamp"
  fi
}
