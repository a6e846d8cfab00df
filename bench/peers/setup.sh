#!/bin/sh
# An environment of its own, .venv-peers, with what SGLang's Mooncake planner imports on a CPU. About 6 GB.
set -eu
cd "$(dirname "$0")/../.."
[ -f .venv-peers/ready ] && exit 0
echo "== .venv-peers: SGLang 0.5.23 and what its planner imports (about 6 GB)"
"${PYTHON:-python3}" -m venv .venv-peers
pip=".venv-peers/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.14.1 torchvision==0.29.1
$pip --no-deps sglang==0.5.23
$pip numpy pyzmq requests aiohttp msgspec orjson psutil pydantic fastapi uvicorn packaging pybase64 pillow tqdm IPython \
  prometheus_client transformers dill apache-tvm-ffi sentencepiece compressed_tensors gguf
.venv-peers/bin/python -c "import sglang.srt.disaggregation.mooncake.conn"
touch .venv-peers/ready
