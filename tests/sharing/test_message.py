from __future__ import annotations

import pytest

from fed_dp.errors import UploadRefused
from fed_dp.sharing.message import check_records, check_round


def test_a_site_cannot_change_how_many_records_it_has() -> None:
    assert check_records(10, announced=10) == 10
    for wrong in (11, -10, 10.0, "10", 10**12):
        with pytest.raises(UploadRefused, match="announced 10"):
            check_records(wrong, announced=10)


def test_an_upload_of_another_round_is_refused() -> None:
    check_round(3, asked=3)
    for wrong in (2, 4, "3", None):
        with pytest.raises(UploadRefused, match="asked for round 3"):
            check_round(wrong, asked=3)
