"""Bytes of tensors: views without a copy where memory allows it, digests, version counters.

Decides how a tensor becomes bytes (row-major order of its elements, in the machine's byte order)
and what a digest is. Does not decide which tensors belong to the state.
"""

from __future__ import annotations

from typing import Final

import torch
import xxhash
from torch.distributed.tensor import DTensor

DIGEST_MASK: Final = (1 << 63) - 1
"""Digests are 63 bits wide so that they travel as positive signed 64-bit gate flags."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's bytes: a DTensor's local shard, else the tensor itself."""
    if isinstance(tensor, DTensor):
        # Not to_local(): that is an autograd view for parameters and would wait on async results.
        return tensor._local_tensor
    return tensor


def byte_view(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's own memory as bytes; None where it is not one contiguous block on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    flat = tensor.detach().view(-1).view(torch.uint8)
    return flat.numpy().data


def byte_copy(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a copy unless `byte_view` can serve it."""
    view = byte_view(tensor)
    if view is not None:
        return view
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.view(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> int:
    """63-bit xxh3 of the tensor's bytes."""
    return xxhash.xxh3_64_intdigest(byte_copy(tensor)) & DIGEST_MASK


def bytes_digest(data: bytes | bytearray | memoryview) -> int:
    """63-bit xxh3 of plain bytes."""
    return xxhash.xxh3_64_intdigest(data) & DIGEST_MASK


def fold_digests(digests: list[tuple[str, int]]) -> int:
    """One 63-bit digest of named digests, order included."""
    text = "\n".join(f"{name}={digest:x}" for name, digest in digests)
    return bytes_digest(text.encode())


def tensor_version(tensor: torch.Tensor) -> int:
    """torch's counter of in-place writes; -1 for inference tensors, which have none.

    Writes through `.data`, numpy or another process do not count.
    """
    return -1 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensor objects that are the same elements of the same memory."""
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    return (
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
