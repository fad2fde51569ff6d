#!/usr/bin/env bash
# Sets up a library that Treadle runs in a Python of its own: library_env.sh VENV REQUIREMENT...
# `library_env.sh --find` prints the interpreter that it would take, and fails where there is none. $LIBRARY_PYTHON names one.
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
venv="$1"
if [[ -n "$(ls -A "$venv" 2>/dev/null)" && ! -f "$venv/pyvenv.cfg" ]]; then
  echo "'$venv' is there and is no virtual environment; remove it, or choose another place" >&2
  exit 1
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # an environment that is whole keeps what else is in it
  python="$(find_python)"
  echo "set-up: creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
echo "set-up: installing ${*:2} into $venv (500 MB, a minute or two, once)"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input install --no-compile "${@:2}"
