"""A copy whose tensors lie elsewhere than its table says; for every back end's copy_."""

from __future__ import annotations

import torch


def moved_copy() -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[int], list[torch.Tensor]]:
    """(table, read, written, homes, what read and written must hold afterwards).

    Two tensors that are read have homes that overlap: the first counts. One is read and written, by two copies; one is
    written alone, and read all the same; one has not been moved.
    """
    tensors = [torch.arange(64, dtype=torch.uint8) + 64 * k for k in range(3)]
    both, still = torch.arange(100, 164, dtype=torch.uint8), torch.arange(7, 71, dtype=torch.uint8)
    first, second, alone = tensors
    copy = both.clone()  # what a compiler hands over as written, while `both` is what was read
    read, written = [first, second, both, still], [copy, alone]
    homes = [1 << 20, (1 << 20) + 32, 1 << 30, still.data_ptr(), 1 << 30, (1 << 63) + 16 - (1 << 64)]
    top = (1 << 63) + 16 - (1 << 64)
    rows = [
        ((1 << 20) + 40, (1 << 30) + 1, 5),  # in the homes of both: from the first
        ((1 << 20) + 64, (1 << 30) + 10, 8),  # past the first: from the second, at 32
        ((1 << 30) + 20, top + 3, 7),  # from `both`, as it was
        (top + 40, (1 << 30) + 30, 6),  # from `alone`, which is not named as read
        (still.data_ptr() + 2, top + 50, 9),
    ]
    after = [tensor.clone() for tensor in (*read, *written)]
    into, into_alone = after[4], after[5]
    into[1:6], into[10:18], into[30:36] = first[40:45], second[32:40], alone[40:46]
    into_alone[3:10], into_alone[50:59] = both[20:27], still[2:11]
    return torch.tensor(rows).T.contiguous(), read, written, homes, after
