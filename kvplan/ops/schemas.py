"""The torch ops' schemas, tags and fakes. They are there without the compiled extension."""

from __future__ import annotations

import torch

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_DYNAMIC = (*_TAGS, torch.Tag.dynamic_output_shape)
_SCHEMAS = {
    "plan(Tensor tables, Tensor pages, int[] windows) -> (Tensor table, Tensor info)": _DYNAMIC,
    "plan_into(Tensor tables, Tensor pages, int[] windows, Tensor(a!) info) -> Tensor table": _DYNAMIC,
    "prepare(Tensor tables, int[] windows, int num_pages) -> (Tensor job, Tensor status)": _DYNAMIC,
    "plan_(Tensor tables, Tensor job, Tensor pages, SymInt[] sizes, Tensor(a!) table, Tensor(b!) info) -> ()": _TAGS,
    "page_indices(Tensor slots, SymInt page_size, Tensor? rows=None, Tensor? lengths=None)"
    " -> (Tensor pages, Tensor bad)": _TAGS,
    "check_pages(Tensor pages, int limit, bool distinct) -> Tensor": _TAGS,
    "find_runs(Tensor src, Tensor dst, Tensor? indptr=None) -> (Tensor runs, Tensor run_indptr)": _TAGS,
    "expand(Tensor entries, Tensor runs, Tensor indptr, Tensor steps, SymInt capacity)"
    " -> (Tensor table, Tensor count)": _TAGS,
    "copy_(Tensor table, Tensor? count, Tensor[] read, Tensor(a!)[] written, SymInt[] homes) -> ()": _TAGS,
    "first_collision(Tensor ranges, Tensor others) -> Tensor": _TAGS,
    "pack(Tensor table, SymInt[] cuts, bool read, SymInt piece, Tensor edges)"
    " -> (Tensor copies, Tensor merged, Tensor pieces, Tensor info)": _DYNAMIC,
    "load_kernels(Tensor image) -> ()": _TAGS,
    "set_num_threads(int threads) -> ()": _TAGS,
}

_library = torch.library.Library("kvplan", "DEF")
for _schema, _tags in _SCHEMAS.items():
    _library.define(_schema, tags=_tags)

# A copy that names nothing it writes must not be dropped for that.
torch.fx.node.has_side_effect(torch.ops.kvplan.copy_.default)


@torch.library.register_fake("kvplan::plan")
def _(tables, pages, windows):  # type: ignore[no-untyped-def]
    context = torch.library.get_ctx()
    table = tables.new_empty((3, context.new_dynamic_size()))
    return table, tables.new_empty(context.new_dynamic_size())


@torch.library.register_fake("kvplan::plan_into")
def _(tables, pages, windows, info):  # type: ignore[no-untyped-def]
    return tables.new_empty((3, torch.library.get_ctx().new_dynamic_size()))


@torch.library.register_fake("kvplan::prepare")
def _(tables, windows, num_pages):  # type: ignore[no-untyped-def]
    return tables.new_empty(torch.library.get_ctx().new_dynamic_size()), tables.new_empty(5)


@torch.library.register_fake("kvplan::plan_")
def _(tables, job, pages, sizes, table, info):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("kvplan::page_indices")
def _(slots, page_size, rows=None, lengths=None):  # type: ignore[no-untyped-def]
    columns = (slots.shape[-1] + page_size - 1) // page_size
    if slots.dim() == 1:
        return slots.new_empty(columns, dtype=torch.int64), slots.new_empty(1, dtype=torch.int64)
    requests = slots.shape[0] if rows is None else rows.shape[0]
    return slots.new_empty((requests, columns), dtype=torch.int64), slots.new_empty(requests, dtype=torch.int64)


@torch.library.register_fake("kvplan::check_pages")
def _(pages, limit, distinct):  # type: ignore[no-untyped-def]
    return pages.new_empty(3, dtype=torch.int64)


@torch.library.register_fake("kvplan::find_runs")
def _(src, dst, indptr=None):  # type: ignore[no-untyped-def]
    return src.new_empty((3, src.shape[0])), src.new_empty(2 if indptr is None else indptr.shape[0])


@torch.library.register_fake("kvplan::expand")
def _(entries, runs, indptr, steps, capacity):  # type: ignore[no-untyped-def]
    return entries.new_empty((3, capacity)), entries.new_empty(1)


@torch.library.register_fake("kvplan::copy_")
def _(table, count, read, written, homes):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("kvplan::first_collision")
def _(ranges, others):  # type: ignore[no-untyped-def]
    return ranges.new_empty(1)


@torch.library.register_fake("kvplan::pack")
def _(table, cuts, read, piece, edges):  # type: ignore[no-untyped-def]
    context = torch.library.get_ctx()
    copies, merged, pieces = (table.new_empty((3, context.new_dynamic_size())) for _ in range(3))
    return copies, merged, pieces, table.new_empty(len(cuts) + 1)


@torch.library.register_fake("kvplan::load_kernels")
def _(image):  # type: ignore[no-untyped-def]
    return None
