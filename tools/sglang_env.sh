#!/bin/sh
# .venv-sglang: SGLang 0.5.23, what its servers need on a CPU, Mooncake, and kvplan as it lies here. 6.3 GB, kept.
# It is brought up to date whenever this file has changed. Where SGLang names one version of a package, it is that one.
set -eu
cd "$(dirname "$0")/.."
d=.venv-sglang
for tool in g++ cmake; do
  command -v $tool >/dev/null || { echo "$tool is missing. Type: apt-get install -y g++ cmake" >&2; exit 1; }
done
if ! cmp -s tools/sglang_env.sh $d/ready; then
  echo "== $d: SGLang 0.5.23 for a CPU (6.3 GB)"
  "${PYTHON:-python3}" -m venv $d
  pip="$d/bin/python -m pip install --quiet --disable-pip-version-check"
  $pip torch==2.14.1 torchvision==0.29.1 'setuptools>=77' wheel 'pytest>=8' numpy pyzmq requests aiohttp msgspec orjson \
    psutil pydantic fastapi uvicorn packaging pybase64 pillow tqdm IPython prometheus_client dill gguf \
    transformers==5.19.0 tokenizers==0.23.2 apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 compressed-tensors==0.18.0 \
    openai==2.8.0
  # Last, and without what they require: most of SGLang's requirements are for GPUs.
  $pip --no-deps sglang==0.5.23 mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl-cu12==1.5.1 xgrammar==0.2.7 \
    uvloop partial_json_parser setproctitle einops
  sh tools/libibverbs.sh
  site=$($d/bin/python -c 'import site; print(site.getsitepackages()[0])')
  echo "$PWD/tests/sglang/real/site" >"$site/kvplan_sglang_cpu.pth" # a plugin that lets SGLang's servers run on a CPU
  $d/bin/python -m compileall -q -j 2 "$site/sglang/srt" "$site/sglang/kernels" || true # imports are slow otherwise
  $d/bin/python -W ignore -c "import sglang.srt.disaggregation.mooncake.conn"
  cp tools/sglang_env.sh $d/ready
fi
$d/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
