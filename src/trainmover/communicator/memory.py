"""Raw views of tensors: bytes to send from and receive into, plain tensors to compute on.

The views carry no reference to their tensor: whoever makes one keeps the tensor alive. They
bypass autograd on purpose, as Gloo does: version counters, `requires_grad` and inference mode
of the user's tensor play no part in a collective.
"""

from __future__ import annotations

import ctypes
from typing import Final, cast

import torch

_WRITABLE: Final = 0x200

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object

_EMPTY: Final = memoryview(bytearray(0))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Writable bytes of a contiguous CPU tensor."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return _EMPTY
    return cast(memoryview, _from_memory(tensor.data_ptr(), nbytes, _WRITABLE))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """One-dimensional alias of a contiguous tensor's memory, free of autograd."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=tensor.dtype)
    return torch.frombuffer(bytes_of(tensor), dtype=tensor.dtype)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its memory can be used as it is, else a contiguous copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


def write_back(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a dense stand-in's values into the (strided) user's tensor."""
    with torch.inference_mode():  # the only mode that may write inference tensors, too
        target.detach().copy_(source.view(target.shape))
