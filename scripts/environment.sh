#!/usr/bin/env bash
# Sets up a library that runs in a Python of its own: environment.sh UV PYTHON VENV LOCK [PIP_ARGUMENT...]
# PYTHON: the interpreter to make it with; empty: any 3.12 or 3.13 ($LIBRARY_PYTHON names one), printed by `environment.sh --find`.
# LOCK: every package that uv, at UV, installs. PIP_ARGUMENTs: what pip installs before. What else is in VENV stays.
set -euo pipefail

find_python() {
  local candidate
  for candidate in ${LIBRARY_PYTHON:+"$LIBRARY_PYTHON"} python3.12 python3.13 \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13}.*/bin/python python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.12 or 3.13 was found; install one, or name it: make ... LIBRARY_PYTHON=PATH" >&2
  return 1
}

if [[ "$1" == "--find" ]]; then
  find_python
  exit
fi
uv="$1" venv="$3" lock="$4"
if [[ -n "$(ls -A "$venv" 2>/dev/null)" && ! -f "$venv/pyvenv.cfg" ]]; then
  echo "'$venv' is there and is no virtual environment; remove it, or choose another place" >&2
  exit 1
fi
python="${2:-$(find_python)}"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "set-up: creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
echo "set-up: installing $lock into $venv"
if (($# > 4)); then
  "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input install "${@:5}"
fi
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --requirement "$lock"
