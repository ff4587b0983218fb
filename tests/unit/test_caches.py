"""How tables share row caches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.gpu.caches import TABLES_PER_CACHE_MAX, WAYS, plan
from tierd.types import RowFormat, TableKind, TableSpec


def table(group: str, row_bytes: int = 264) -> TableSpec:
    return TableSpec(
        name="t",
        kind=TableKind.TENSOR,
        layer=0,
        rows=10,
        dim=row_bytes,
        row_bytes=row_bytes,
        row_format=RowFormat.RAW,
        group=group,
        tensors=("x",),
    )


def test_two_groups_share_evenly() -> None:
    (made,) = plan([table("layer 1"), table("layer 14")], 1000)
    assert made.quotas == {0: 16, 1: 16}
    assert made.sets == 32  # 1000 slots in whole sets of 32


def test_a_group_has_one_share_together() -> None:
    (made,) = plan([table("a"), table("b"), table("b"), table("b")], 64)
    assert made.quotas == {0: 16, 1: 6, 2: 5, 3: 5}


def test_row_sizes_have_caches_of_their_own() -> None:
    made = plan([table("a", 264), table("b", 320), table("a", 264)], 640)
    assert [(cache.row_bytes, cache.sets, cache.quotas) for cache in made] == [
        (264, 20, {0: 16, 2: 16}),
        (320, 20, {1: 32}),
    ]


def test_thirty_tables_get_four_caches() -> None:
    made = plan([table("g") for _ in range(30)], 30 * 320)
    assert [len(cache.quotas) for cache in made] == [8, 8, 7, 7]
    assert [cache.sets for cache in made] == [80, 80, 70, 70]
    assert set().union(*(cache.quotas.values() for cache in made)) == {4, 5}


@pytest.mark.parametrize("cache_rows", [1, 31, 32, 33])
def test_the_smallest_caches(cache_rows: int) -> None:
    (made,) = plan([table("g")], cache_rows)
    assert made.sets == -(-cache_rows // WAYS)


@given(
    tables=st.lists(
        st.builds(table, st.sampled_from("abcd"), st.sampled_from([264, 320])), max_size=64
    ),
    cache_rows=st.integers(1, 1 << 24),
)
def test_every_table_can_always_claim_a_slot(tables: list[TableSpec], cache_rows: int) -> None:
    made = plan(tables, cache_rows)
    assert sorted(index for cache in made for index in cache.quotas) == list(range(len(tables)))
    for cache in made:
        assert sum(cache.quotas.values()) == WAYS
        assert min(cache.quotas.values()) >= 1
        assert len(cache.quotas) <= TABLES_PER_CACHE_MAX
        assert {tables[index].row_bytes for index in cache.quotas} == {cache.row_bytes}
    for row_bytes in {made_table.row_bytes for made_table in tables}:
        sets = [cache.sets for cache in made if cache.row_bytes == row_bytes]
        assert cache_rows <= sum(sets) * WAYS < cache_rows + len(sets) * WAYS
