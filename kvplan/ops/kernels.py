"""Compiled device code: what nvcc made when kvplan was built, or what NVRTC makes of the same files at first use."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[1]
FATBIN = _PACKAGE / "kernels.fatbin"

# NVRTC has no C++ library; this is all of <cstdint> that csrc/ uses.
_CSTDINT = """
#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INT64_MAX 0x7fffffffffffffffLL
#define UINT64_MAX 0xffffffffffffffffULL
"""

_loaded: torch.Tensor | None = None  # the driver reads the image for as long as it is in use


def load(backend: str) -> None:
    """Make the kernels of `backend` ("cuda" or "cupy") the ops of CUDA tensors.

    The driver is given them when the first of them runs. But NVRTC must know the GPU, so "cupy" starts CUDA here.

    Raises:
        ImportError: CuPy or its NVRTC is not usable.
        RuntimeError: the kernels do not compile.
    """
    global _loaded
    image = FATBIN.read_bytes() if backend == "cuda" else compiled(torch.cuda.get_device_capability())
    _loaded = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    torch.ops.kvplan.load_kernels(_loaded)


def sources() -> dict[str, str]:
    """Name (as included) and text of every file of device code; "kernels.cu" is the one to compile."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):  # installed; in the source tree
        if (folder / "cuda" / "kernels.cu").exists():
            files = [*folder.glob("*.h"), *(folder / "cuda").glob("*.h"), *(folder / "cuda").glob("*.cu*")]
            return {path.name: path.read_text() for path in files}
    raise ImportError("kvplan was installed without its device code")


def compiled(capability: tuple[int, int]) -> bytes:
    """A cubin of all kernels for one compute capability, made by NVRTC through CuPy; kept for the next process.

    Raises:
        ImportError: CuPy or its NVRTC is not usable.
        RuntimeError: NVRTC refuses the code, with its log.
    """
    from cupy.cuda import nvrtc

    files = sources()
    arch = f"sm_{capability[0]}{capability[1]}"
    version = ".".join(str(part) for part in nvrtc.getVersion())
    stamp = hashlib.sha256("\0".join([arch, version, _CSTDINT, *sorted(files), *sorted(files.values())]).encode())
    kept = _cache() / f"{stamp.hexdigest()[:32]}.cubin"
    if kept.exists():
        return kept.read_bytes()
    image = _compile(nvrtc, files, arch)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:  # whole, or not there
            file.write(image)
        Path(file.name).replace(kept)
    except OSError:
        pass  # compiled again by the next process
    return image


def _compile(nvrtc, files: dict[str, str], arch: str) -> bytes:  # type: ignore[no-untyped-def]
    headers = {"cstdint": _CSTDINT}
    for name, text in files.items():
        # NVRTC looks names up as they are included, and files of device code include the folder above.
        headers[name] = headers[f"../{name}"] = text
    texts = [text.encode() for text in headers.values()]
    names = [name.encode() for name in headers]
    program = nvrtc.createProgram(files["kernels.cu"], "kernels.cu", texts, names)
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}", "-std=c++17", "-default-device"])
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile the kernels: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplan"
