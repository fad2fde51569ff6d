"""Writing a safetensors file from tensors that arrive one at a time, so that at most one is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, described: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write a file of all `tensors`, with the dtypes and shapes of `described`, in any order of arrival.

    As in safetensors' own files, wider dtypes come first, so that each tensor is aligned. Raises OSError.
    """
    names = sorted(described, key=lambda name: (-described[name].element_size(), name))
    ends = accumulate((described[name].numel() * described[name].element_size() for name in names), initial=0)
    offsets = dict(zip(names, pairwise(ends), strict=True))
    header = {
        "__metadata__": metadata,
        **{
            name: {
                "dtype": _NAMES[described[name].dtype],
                "shape": list(described[name].shape),
                "data_offsets": list(place),
            }
            for name, place in offsets.items()
        },
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            start, _ = offsets.pop(name)
            file.seek(8 + len(text) + start)
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    assert not offsets, f"{sorted(offsets)} did not come"
