"""The pairings that SGLang's functions need, from what its manager knows of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan import Pairing

from . import names, regions
from .names import Key, Model, NotToldError
from .peers import Peers
from .regions import Buffers


class Pairings:
    """What a planning manager pairs with. Goes before one of SGLang's managers in a list of base classes."""

    kv_args: Any
    peers: Peers
    pp_size: Any
    attn_tp_size: int
    decode_kv_args_table: dict[str, Any]

    def _flat(self) -> bool:
        """Whether KV is stored as one entry a layer."""
        raise NotImplementedError

    def _pool(self) -> dict[str, Any]:
        """Fields of `names.Model` that pools for NPUs set."""
        args = self.kv_args
        return {"groups": getattr(args, "kv_buf_groups", 1), "layers": getattr(args, "hidden_kv_layers", None)}

    def _model(self, flat: bool) -> Model:
        args = self.kv_args
        ratios = getattr(args, "mla_compression_ratios", None)
        return Model(
            len(args.kv_data_ptrs), args.num_draft_entries, tuple(args.kv_layer_ids), tuple(ratios) if ratios else None,
            args.prefill_start_layer, args.prefill_end_layer, self.pp_size or 1, flat,
            **self._pool(),
        )  # fmt: skip

    def _heads(self, dst_tp: int, dst_rank: int) -> tuple[Any, Any]:
        total = getattr(self.kv_args, "total_kv_head_num", 0) or self.kv_args.kv_head_num * self.attn_tp_size
        return (regions.rank_heads(total, self.attn_tp_size, self.kv_args.engine_rank),
                regions.rank_heads(total, dst_tp, dst_rank))  # fmt: skip

    def _pair_kv(self, session: str, pointers: list[int], layer_ids: Sequence[int], two: bool) -> Pairing:
        src, dst, model = self._kv_buffers(session, pointers, layer_ids, None)
        return regions.whole_pages(src, dst, model, two)

    def _kv_buffers(
        self,
        session: str,
        pointers: list[int],
        layer_ids: Sequence[int],
        each: int | None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Buffers, Buffers, Model]:
        """Both sides' KV buffers, named. `each`: bytes of decode's pages where it gives but one number."""
        args, model = self.kv_args, self._model(self._flat())
        mine, told = names.source(model), self.peers.told(session)
        if told is not None and [region.base for region in told.regions] != pointers:
            told = None
        if told is not None and mine is not None:
            theirs = [region.key for region in told.regions]
        else:
            theirs = names.destination(model, len(pointers), layer_ids)
        if mine is None:
            mine = [("entry", number) for number in range(model.count)]
        pages = [None] * len(pointers) if told is None else [region.num_pages for region in told.regions]
        registered = self.decode_kv_args_table.get(session)
        if not lengths and registered is not None and registered.dst_kv_ptrs is pointers:
            lengths = registered.dst_kv_item_lens
        if not lengths and each is not None:
            if len(set(args.kv_item_lens)) > 1:
                raise NotToldError("decode gives one page size for all KV entries, and prefill's differ")
            lengths = [each] * len(pointers)
        if not lengths:  # all that SGLang itself goes by: decode's pages are as large as prefill's
            own = dict(zip(mine, args.kv_item_lens, strict=True))
            lengths = [own.get(key, 1) for key in theirs]
        src = Buffers.own(mine, args.kv_data_ptrs, args.kv_item_lens, getattr(args, "kv_data_lens", None))
        return src, Buffers(theirs, pointers, lengths, pages), model

    def _state(self, keys: Sequence[Key], pointers: list[int], lengths: Sequence[int]) -> Buffers:
        """This side's buffers of the state component that has these pointers."""
        args = self.kv_args
        known = zip(args.state_data_ptrs, args.state_data_lens, strict=True)
        nbytes = next((sizes for mine, sizes in known if mine is pointers), None)
        return Buffers.own(keys, pointers, lengths, nbytes)

    def _pair_state(
        self,
        kind: Any,
        keys: Sequence[Key],
        other_keys: Sequence[Key],
        pointers: list[int],
        other_pointers: list[int],
        lengths: Sequence[int],
        other_lengths: Sequence[int] | None,
        flat: bool,
    ) -> Pairing:
        src = self._state(keys, pointers, lengths)
        own = dict(zip(keys, lengths, strict=True))
        if other_lengths is None or (not other_lengths and not flat):
            other_lengths = [own.get(key, 1) for key in other_keys]
        if len(other_lengths) != len(other_keys):
            raise NotToldError(f"decode gives {len(other_lengths)} page sizes for {len(other_keys)} entries of {kind}")
        dst = Buffers(other_keys, other_pointers, other_lengths, [None] * len(other_keys))
        # Layers that share their index with another hold none of their own: no byte moves.
        empty = {key for key, each in own.items() if not each}
        empty |= {key for key, each in zip(other_keys, other_lengths, strict=True) if not each and kind == "dsa"}
        return regions.whole_pages(src.without(empty.__contains__), dst.without(empty.__contains__), None, False)
