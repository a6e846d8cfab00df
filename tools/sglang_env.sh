#!/bin/sh
# .venv-sglang: SGLang 0.5.23, what its servers need on a CPU, Mooncake, and kvplan as it lies here. About 6 GB, kept.
set -eu
cd "$(dirname "$0")/.."
d=.venv-sglang
if [ ! -f $d/ready ]; then
  echo "== $d: SGLang 0.5.23 for a CPU (about 6 GB)"
  "${PYTHON:-python3}" -m venv $d
  pip="$d/bin/python -m pip install --quiet --disable-pip-version-check"
  $pip torch==2.14.1 torchvision==0.29.1 setuptools wheel cmake pytest
  $pip --no-deps sglang==0.5.23 mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl-cu12==1.5.1 uvloop openai sniffio \
    partial_json_parser setproctitle einops xgrammar
  $pip numpy pyzmq requests aiohttp msgspec orjson psutil pydantic fastapi uvicorn packaging pybase64 pillow tqdm IPython \
    prometheus_client transformers dill apache-tvm-ffi sentencepiece compressed_tensors gguf
  sh tools/libibverbs.sh
  site=$($d/bin/python -c 'import site; print(site.getsitepackages()[0])')
  echo "$PWD/tests/sglang/real/site" >"$site/kvplan_sglang_cpu.pth"
  $d/bin/python -m compileall -q -j 2 "$site/sglang/srt" "$site/sglang/kernels" || true # imports are slow otherwise
  $d/bin/python -c "import sglang.srt.disaggregation.mooncake.conn"
  touch $d/ready
fi
$d/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
