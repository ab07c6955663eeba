#!/usr/bin/env bash
# Formatter check, linter and the whole test suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment test

ruff format --check .
ruff check .
python -m pytest --numprocesses=2 --dist=worksteal "$@"
