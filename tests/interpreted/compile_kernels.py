"""Compiles every kernel for a GPU, which this machine need not have: python compile_kernels.py cuda 90 32.

Prints, for each kernel, the registers and memory it uses. Exits with 1 where a kernel spills registers to memory.
"""

import re
import subprocess
import sys
import tempfile

import torch  # noqa: F401 (Triton's signatures name its types)
import triton
from kvplan.triton_kernels import copy, descriptors, pages, plan, runs, scan
from kvplan.triton_kernels.launch import TILED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CONSTANTS = {"TILE": copy.TILE, "LANES": copy.LANES, "TAIL": True}
SPECIAL = {"bad": "*u64", "heads": "*i8"}  # pointers to other than int64
IDS = {  # parameters that point to int32 or int64
    "page_indices_kernel": ("slots",),
    **dict.fromkeys(("check_kernel", "mark_pages_kernel", "place_pieces_kernel"), ("pages",)),
}
OPTIONAL = {"page_indices_kernel": ("rows", "lengths"), "count_tiles_kernel": ("count",)}


def variants(kernel, block):
    """(types, constants) for each way to call a kernel: with 32-bit or 64-bit ids, with optional tensors or without."""
    name = kernel.fn.__name__
    types, constants = {}, {}
    for param in kernel.params:
        types[param.name] = "constexpr" if param.is_constexpr else param.annotation_type or "*i64"
        if param.is_constexpr:
            constants[param.name] = {**CONSTANTS, "BLOCK": block}[param.name]
    types |= {name: kind for name, kind in SPECIAL.items() if name in types}
    ids = [param for param in IDS.get(name, ()) if param in types]
    optional = [param for param in OPTIONAL.get(name, ()) if param in types]
    for kind in ("*i32", "*i64") if ids else ("*i64",):
        given = types | dict.fromkeys(ids, kind)
        yield given, constants
        if optional:
            yield given | dict.fromkeys(optional, "constexpr"), constants | dict.fromkeys(optional)


def kernels():
    for module in (scan, pages, runs, descriptors, plan, copy):
        for name, value in vars(module).items():
            if name.endswith("_kernel") and value.fn.__module__ == module.__name__:
                yield name, value


def facts(built):
    """(registers and memory that a compiled kernel uses, bytes or registers spilled)."""
    if "cubin" in built.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
        return found, found["STACK"] + found["LOCAL"]
    words = ("vgpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = {word: int(re.search(rf"\.{word}:\s*(\d+)", built.asm["amdgcn"]).group(1)) for word in words}
    return found, found["vgpr_spill_count"] + found["private_segment_fixed_size"]


def main(backend: str, arch: str, warp_size: str) -> int:
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    spilled = 0
    for name, kernel in kernels():
        launch = pages.PLACES if kernel is pages.check_kernel else TILED
        for types, constants in variants(kernel, launch["BLOCK"]):
            source = ASTSource(kernel, types, constants)
            built = triton.compile(source, target=target, options={"num_warps": launch["num_warps"]})
            found, spills = facts(built)
            print(f"{name}: {found}")
            spilled += spills
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
