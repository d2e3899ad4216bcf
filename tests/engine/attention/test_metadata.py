import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.attention.interface import AttentionMetadata
from tests.fakes import block_tables

CPU = torch.device("cpu")

sequences = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 20), st.lists(st.integers(0, 1000), min_size=1, max_size=6)), min_size=0, max_size=6
)


@given(sequences, st.integers(0, 3), st.booleans())
def test_what_was_packed_is_unpacked(batch: list[tuple[int, int, list[int]]], num_padding: int, has_image: bool) -> None:
    batch = sorted(batch, key=lambda sequence: sequence[0])
    query_lens = [new for new, _, _ in batch]
    context_lens = [new + old for new, old, _ in batch]
    tables_PN = block_tables([table for _, _, table in batch])
    rows = list(range(len(batch)))[::-1]
    starts = [sum(query_lens[:index]) for index in range(len(batch) + 1)]
    slots = [*range(starts[-1]), *[-1] * num_padding]
    key_stops = {0: 7} if has_image and slots else {}
    packed = AttentionMetadata.pack(slots, starts, context_lens, rows, tables_PN, num_decodes=query_lens.count(1), key_stops=key_stops)
    for metadata in (packed, AttentionMetadata.unpack(packed.packed, tables_PN)):
        assert metadata.slot_mapping_T.tolist() == slots
        assert metadata.query_start_loc.tolist() == starts
        assert metadata.context_lens_B.tolist() == context_lens
        assert metadata.num_sequences == len(batch)
        assert metadata.num_decodes == query_lens.count(1)
        assert metadata.max_query_len == max(query_lens, default=0)
        assert metadata.max_context_len == max(context_lens, default=0)
        assert metadata.table_rows_B.tolist() == rows
        if key_stops:
            assert metadata.key_stops_T is not None
            assert metadata.key_stops_T.tolist() == [7, *[0] * (len(slots) - 1)]
        else:
            assert metadata.key_stops_T is None
        for place, row in enumerate(rows):
            assert torch.equal(metadata.blocks_of(place), tables_PN[row])
        parts = (metadata.slot_mapping_T, metadata.query_start_loc, metadata.context_lens_B, metadata.table_rows_B)
        assert all(part.is_contiguous() and part.dtype == torch.int64 for part in parts)
