"""DLPack import that refuses the inputs on which torch would end the process.

The format is that of dlpack.h (https://github.com/dmlc/dlpack). A capsule "dltensor" holds a DLManagedTensor, which
begins with a DLTensor. A capsule "dltensor_versioned" holds a DLManagedTensorVersioned, with the DLTensor after
32 bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

_CPU = 1  # DLDeviceType kDLCPU
_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # null where the array is compact
        ("byte_offset", ctypes.c_uint64),
    )


class _Guarded:
    """An array whose capsules are looked at before torch gets them: torch ends the process on a negative stride."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        capsule = self._array.__dlpack__(**arguments)
        name = _name_of(capsule)
        if name not in _OFFSETS:
            raise BufferError(f"the capsule is called {name!r}, which is none of DLPack's names")
        tensor = _DLTensor.from_address(_pointer_of(capsule, name) + _OFFSETS[name])
        strides = [tensor.strides[axis] for axis in range(tensor.ndim)] if tensor.strides else []
        if any(stride < 0 for stride in strides):
            raise BufferError(f"its strides are {strides}, and torch takes no negative one: pass a copy of it")
        return capsule


def from_dlpack(array: Any) -> np.ndarray | torch.Tensor:
    """A view of `array`: a NumPy array where it is on the CPU, else a tensor.

    Raises:
        Exception: whatever the other library, NumPy or torch raises. BufferError for a negative stride on a GPU.
    """
    if int(array.__dlpack_device__()[0]) == _CPU:
        return np.from_dlpack(array)
    return torch.from_dlpack(_Guarded(array))
