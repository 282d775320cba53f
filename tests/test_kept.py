from __future__ import annotations

from fed_dp.kept import Kept


def test_the_values_used_longest_ago_go_first() -> None:
    kept: Kept[str] = Kept(10)
    kept.put(1, "a", 4)
    kept.put(2, "b", 4)
    assert kept.get(1) == "a"
    kept.put(3, "c", 4)  # 12 bytes: 2 was used before 1
    assert [kept.get(key) for key in (1, 2, 3)] == ["a", None, "c"]


def test_a_value_that_is_put_again_counts_once_and_one_that_is_too_large_is_kept_alone() -> None:
    kept: Kept[str] = Kept(10)
    for _ in range(5):
        kept.put(1, "a", 4)
    kept.put(2, "b", 6)
    assert kept.get(1) == "a"
    kept.put(3, "large", 50)
    assert [kept.get(key) for key in (1, 2, 3)] == [None, None, "large"]
