"""Names for SGLang's KV buffers: what lies in each entry of `kv_data_ptrs`, so that peers are paired by name and layer.

SGLang sends pointers without names. What they mean follows from what is known of both sides: layer ids, the compression
ratios of DeepSeek-V4, the layers of a pipeline stage, how many entries belong to a draft model. Where that does not
tell, `NotToldError` says what is missing. Entries are taken in order only where both sides hold as many of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

Key = tuple[str, int]  # name and layer of a region


class NotToldError(ValueError):
    """What SGLang says of two sides does not tell which buffer belongs to which."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What a prefill process knows of its KV buffers (SGLang's KVArgs).

    Attributes:
        count: entries of `kv_data_ptrs`.
        draft: how many of them, the last, belong to a draft model.
        layer_ids: the layer of each entry; empty where the pool does not say.
        ratios: compression of each layer of the whole model, for DeepSeek-V4's pools; else None.
        start, end: the layers [start, end) of this pipeline stage; `end` is None where the pool does not say.
        stages: pipeline stages of this side.
        flat: one entry a layer (latent attention, or one buffer for all); else all K entries, then all V entries.
        groups: entries of a layer in Ascend's flat pools, where all entries of one kind lie behind one another: latent
            KV, rope keys and perhaps index keys.
        layers: layers of the whole model, for these pools; None where the pool does not say.
        npu: whether DeepSeek-V4's pools are those for Ascend.
        state_apart: whether the state of C4 layers is a component of its own, and no part of "swa".
    """

    count: int
    draft: int
    layer_ids: tuple[int, ...]
    ratios: tuple[int, ...] | None
    start: int
    end: int | None
    stages: int
    flat: bool
    groups: int = 1
    layers: int | None = None
    npu: bool = False
    state_apart: bool = False


def by_layer_ids(layer_ids: Sequence[int]) -> list[Key]:
    """K and V of a layer share its id: the first is `kv.0`, the second `kv.1`, ..."""
    seen: Counter[int] = Counter()
    keys = []
    for layer in layer_ids:
        keys.append((f"kv.{seen[layer]}", layer))
        seen[layer] += 1
    return keys


def compressed(ratios: Sequence[int], start: int, end: int, count: int, npu: bool = False) -> list[Key] | None:
    """DeepSeek-V4's entries of layers [start, end), or None where `count` entries fit none of its pools.

    One pool a layer: C4 KV, C4 indexer, C128 KV. With fp8 in two pools, rope entries follow each KV group. On Ascend
    (`npu`): C4 KV, C4 indexer and its scales; C128 KV is a state component there.
    """
    c4 = [layer for layer in range(start, min(end, len(ratios))) if ratios[layer] == 4]
    c128 = [layer for layer in range(start, min(end, len(ratios))) if ratios[layer] == 128]
    kv, indexer, long = ([(name, layer) for layer in layers]
                         for name, layers in (("c4_kv", c4), ("c4_indexer", c4), ("c128_kv", c128)))  # fmt: skip
    if npu:
        scales = [("c4_indexer_scale", layer) for layer in c4]
        return kv + indexer + scales if count == 3 * len(c4) else None
    if count == len(kv) + len(indexer) + len(long):
        return kv + indexer + long
    rope, long_rope = [("c4_rope", layer) for layer in c4], [("c128_rope", layer) for layer in c128]
    if count == len(kv) + len(rope) + len(indexer) + len(long) + len(long_rope):
        return kv + rope + indexer + long + long_rope
    return None


def drafts(count: int) -> list[Key]:
    """Names of the entries of a draft model."""
    return [("draft", number) for number in range(count)]


def source(model: Model) -> list[Key] | None:
    """The names of a prefill process's entries, or None where only their number is known."""
    targets = model.count - model.draft
    if model.layer_ids:
        return by_layer_ids(model.layer_ids) if len(model.layer_ids) == model.count else None
    if model.ratios:
        found = None if model.end is None else compressed(model.ratios, model.start, model.end, targets, model.npu)
        return None if found is None else found + drafts(model.draft)
    if model.flat and (model.groups == 1 or (model.stages == 1 and not _is_grouped(model))):
        return [("kv", model.start + number) for number in range(targets)] + drafts(model.draft)
    if model.flat:
        found = grouped(targets // model.groups, model.groups, model.start) if _is_grouped(model) else None
        return None if found is None else found + drafts(model.draft)
    layers = targets // 2
    if targets % 2 or (model.stages > 1 and model.end is not None and model.end - model.start != layers):
        return None
    return halves(layers, model.start) + drafts(model.draft)


def _is_grouped(model: Model) -> bool:
    """Whether each layer has an entry in each group. Index keys may be left out of layers that share another's."""
    layers, rest = divmod(model.count - model.draft, model.groups)
    held = model.layers if model.stages == 1 else None if model.end is None else model.end - model.start
    return model.groups > 1 and not rest and held in (None, layers)


def grouped(layers: int, groups: int, start: int = 0) -> list[Key]:
    """All entries of the first kind, then all of the second, ..."""
    return [(f"kv.{group}", start + number) for group in range(groups) for number in range(layers)]


def halves(layers: int, start: int = 0) -> list[Key]:
    """All K entries, then all V entries."""
    return [(name, start + number) for name in ("k", "v") for number in range(layers)]


def destination(model: Model, count: int, layer_ids: Sequence[int]) -> list[Key]:
    """The names of a decode process's `count` entries, as far as the prefill process can know them.

    Raises:
        NotToldError: what is known does not tell.
    """
    if bool(layer_ids) != bool(model.layer_ids):
        raise NotToldError(f"only the {'decode' if layer_ids else 'prefill'} side says which layer each KV entry is of")
    if layer_ids:
        if len(layer_ids) != count:
            raise NotToldError(f"decode names the layers of {len(layer_ids)} KV entries, and registered {count}")
        return by_layer_ids(layer_ids)
    mine = source(model)
    if count == model.count:  # the same stage, or the whole model on both sides
        return mine if mine is not None else [("entry", number) for number in range(count)]
    if mine is None:
        raise NotToldError(
            f"prefill has {model.count} KV entries and decode {count}: what is known of the pool does not say which "
            f"belong together"
        )
    if model.ratios:
        return _whole_compressed(model, count)
    if model.flat and _is_grouped(model):
        return _whole_grouped(model, count)
    if model.flat:
        # Layers in order, then draft entries. Without draft entries here, decode's own are never written.
        return [("kv", number) for number in range(count - model.draft)] + drafts(model.draft)
    if model.stages > 1:
        raise NotToldError(
            f"prefill is a pipeline stage with K and V of {(model.count - model.draft) // 2} layers and decode has "
            f"{count} entries: it is not known how many layers decode has, so not where its V entries begin. With "
            f"kvplan on the decode side as well it is"
        )
    layers = (model.count - model.draft) // 2
    if count < 2 * layers or (model.draft and count != model.count):
        raise NotToldError(f"prefill has K and V of {layers} layers and {model.draft} draft entries, decode {count}")
    return halves(layers, model.start) + drafts(count - 2 * layers)


def _whole_grouped(model: Model, count: int) -> list[Key]:
    """Decode holds the whole model, and perhaps draft entries that the prefill side lacks."""
    layers = model.layers if model.stages > 1 else (model.count - model.draft) // model.groups
    whole = None if layers is None else layers * model.groups
    of_draft = 0 if whole is None else count - whole
    if (
        whole is None
        or of_draft < 0
        or (model.stages > 1 and of_draft % model.groups)
        or (model.draft and of_draft != model.draft)
    ):
        raise NotToldError(
            f"prefill has {model.count} KV entries, {model.draft} of them of a draft model, and decode {count}; the "
            f"whole model has {layers} layers of {model.groups}"
        )
    return grouped(whole // model.groups, model.groups) + drafts(of_draft)


def _whole_compressed(model: Model, count: int) -> list[Key]:
    """Decode holds the whole model, and perhaps draft entries that the prefill side lacks."""
    ratios = model.ratios or ()
    two_pools = any(name == "c4_rope" or name == "c128_rope" for name, _ in source(model) or ())
    c4, c128 = ratios.count(4), ratios.count(128)
    whole = 3 * c4 if model.npu else 3 * c4 + 2 * c128 if two_pools else 2 * c4 + c128
    found = compressed(ratios, 0, len(ratios), whole, model.npu)
    if count < whole or found is None or (model.draft and count - whole != model.draft):
        raise NotToldError(
            f"prefill has {model.count} KV entries, {model.draft} of them of a draft model, and decode {count}; the "
            f"whole model has {whole}"
        )
    return found + drafts(count - whole)


def of_decode(count: int, draft: int, layer_ids: Sequence[int], ratios: Sequence[int] | None, flat: bool,
              **pool: Any) -> list[Key]:  # fmt: skip
    """The names of a decode process's own entries, as it tells them itself. It holds the whole model.

    `pool`: further fields of `Model`.

    Raises:
        NotToldError: what is known does not tell.
    """
    model = Model(count, draft, tuple(layer_ids), tuple(ratios) if ratios else None, 0,
                  len(ratios) if ratios else None, 1, flat, **pool)  # fmt: skip
    keys = source(model)
    if keys is None:
        raise NotToldError(f"{count} KV entries, {draft} of them of a draft model, fit no pool that is known")
    return keys


def of_state(model: Model, kind: str | None, count: int, other: int, ids: Sequence[int], other_ids: Sequence[int],
             ) -> tuple[list[Key], list[Key]]:  # fmt: skip
    """The names of both sides' entries of a state component.

    Args:
        model: the prefill process's. `flat` says how this component is stored.
        kind: SGLang's word for the component, such as "swa"; None for KV itself.
        count, other: entries of the prefill and of the decode side.
        ids, other_ids: the layer of each, empty where they are not said.

    Raises:
        NotToldError: what is known does not tell.
    """
    if ids and other_ids:
        if (len(ids), len(other_ids)) != (count, other):
            raise NotToldError(f"{len(ids)} and {len(other_ids)} layer ids for {count} and {other} entries of {kind}")
        return by_layer_ids(ids), by_layer_ids(other_ids)
    if (ids or other_ids) and model.stages > 1:
        raise NotToldError(f"only one side says which layer each entry of {kind} is of")
    if count == other:
        same = [("entry", number) for number in range(count)]
        return same, same
    if model.flat and model.ratios and model.end is not None:
        mine = _compressed_state(model, kind, model.start, model.end, count)
        whole = _compressed_state(model, kind, 0, len(model.ratios), other)
        if mine is not None and whole is not None:
            return mine, whole
    elif model.flat and not model.ratios and model.groups == 1:
        return [("kv", model.start + number) for number in range(count)], [("kv", number) for number in range(other)]
    elif not model.flat and model.stages == 1 and count < other and not model.draft:
        # Decode has more at the end, for a draft model that this side lacks.
        return [("entry", number) for number in range(count)], [("entry", number) for number in range(other)]
    raise NotToldError(
        f"prefill has {count} entries of {kind} and decode {other}: it is not known which belong together"
    )


def _compressed_state(model: Model, kind: str | None, start: int, end: int, count: int) -> list[Key] | None:
    """DeepSeek-V4's state entries of layers [start, end): windows, then compressor and indexer state of C4 layers."""
    ratios = model.ratios or ()
    of = {ratio: [layer for layer in range(start, end) if ratios[layer] == ratio] for ratio in (4, 128)}
    if kind == "c128_state":
        keys = [("c128_state", layer) for layer in of[128]]
    elif kind == "dsv4_c128":
        keys = [("c128_kv", layer) for layer in of[128]]
    elif kind == "dsv4_c4_state":
        keys = [(name, layer) for name in ("c4_state", "c4_indexer_state") for layer in of[4]]
    elif kind == "swa_ring" or (kind == "swa" and model.state_apart):
        keys = [("window", layer) for layer in range(start, end)]
    elif kind == "swa":
        windows = count - 2 * len(of[4])  # the last layers may have none
        if not 0 <= windows <= end - start:
            return None
        keys = [("window", start + number) for number in range(windows)]
        keys += [(name, layer) for name in ("c4_state", "c4_indexer_state") for layer in of[4]]
    else:
        return None
    return keys if len(keys) == count else None
