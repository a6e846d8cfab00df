#!/bin/sh
# Installs dist/'s wheel into a fresh environment of each Python named that is here, and uses it from another folder. Then builds
# the source distribution in the first of them, and uses that. Says which Pythons were not here. At least one must be.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
wheel=$(ls "$root"/dist/kvplan-*.whl)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/use.py" <<'P'
import sys
import zipfile

import torch

import kvplan
from kvplan import Layout, Region
from kvplan.ops import backend

prefill, decode = torch.arange(8 * 16).view(8, 16), torch.zeros(12, 16, dtype=torch.int64)
src = Layout([Region.from_tensor(prefill, "kv", layer=0)], page_size=4)
dst = Layout([Region.from_tensor(decode, "kv", layer=0, space="host")], page_size=4)
plan = kvplan.pair(src, dst).plan([5, 6, 2], {"host": [7, 8, 1]})
kvplan.execute(plan)
assert torch.equal(decode[[7, 8, 1]], prefill[[5, 6, 2]]) and len(plan) == 2
assert backend.EXTENSION.exists() and "site-packages" in kvplan.__file__, kvplan.__file__
for path in sys.argv[1:]:
    names = zipfile.ZipFile(path).namelist()
    assert not [name for name in names if "libtorch" in name or "libc10" in name], names
print(f"   Python {sys.version.split()[0]}, torch {torch.__version__}, kvplan {kvplan.__version__}: right")
P
# No RUNPATH, or a relative one: a path of the machine that built it must not be there.
mkdir "$work/out" && cd "$work/out" && python3 -m zipfile -e "$wheel" .
if readelf -d kvplan/_C.so | grep -E 'R(UN)?PATH' | grep -v '\[\$ORIGIN'; then
  echo "the wheel's library has an absolute RUNPATH" >&2
  exit 1
fi
tried=""
for python in "${@:-python3}"; do
  "$python" -c '' 2>/dev/null || { echo "== $python: not here"; continue; }
  echo "== $python: $(basename "$wheel")"
  "$python" -m venv "$work/env-$python"
  pip="$work/env-$python/bin/python -m pip --quiet --disable-pip-version-check"
  $pip install torch==2.13.0 "$wheel"
  (cd "$work/out/.." && "env-$python/bin/python" use.py "$wheel")
  tried="$tried $python"
done
test -n "$tried" || { echo "none of $* is here" >&2; exit 1; }
sdist=$(ls "$root"/dist/kvplan-*.tar.gz 2>/dev/null) || exit 0
first=${tried# }
first=${first%% *}
echo "== $first: $(basename "$sdist")"
pip="$work/env-$first/bin/python -m pip --quiet --disable-pip-version-check"
$pip install 'setuptools>=77' wheel
$pip install --no-build-isolation --no-deps --force-reinstall "$sdist"
(cd "$work" && "env-$first/bin/python" use.py)
