"""What SGLang's CPU engine imports from `sgl_kernel`, whose CPU build is on no package index.

Without Intel's AMX all layers run SGLang's own torch code. Two ops about the cache have a body here; the others belong
to speculative decoding, and raise.
"""

import ctypes

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(rows, table, starts, stops, slots, _length):
    """Write the slots of new tokens into each request's row of the token table."""
    taken = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = slots[taken : taken + stop - start].to(table.dtype)
        taken += stop - start


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    """Copy rows within each layer's cache, by slot."""
    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for base, step in zip(pointers.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + source * step, step) for _, source in pairs]
        for (target, _), row in zip(pairs, held, strict=True):
            ctypes.memmove(base + target * step, row, step)


def _missing(name):
    def op(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on the CPU")

    return op


for _name in ("fill_accept_out_cache_loc_cpu", "fill_bonus_tokens_cpu", "assign_draft_cache_locs_contiguous_cpu",
              "assign_extend_cache_locs_cpu", "build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu",
              "rotate_input_ids_cpu"):  # fmt: skip
    globals()[_name] = _missing(_name)
