from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fed_dp.data import File, fetch, read
from fed_dp.data.files import home, verified
from fed_dp.errors import DataCorrupt, DataError, DataMissing

CONTENT = b"the published bytes"
FILE = File("a.bin", hashlib.sha256(CONTENT).hexdigest(), "http://127.0.0.1:1/a.bin")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "a.bin").write_bytes(CONTENT)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_fetch_brings_a_checked_file_once(mirror: str, tmp_path: Path) -> None:
    said: list[str] = []
    path = fetch(tmp_path / "data", FILE, mirror=mirror, report=said.append)
    assert path.read_bytes() == CONTENT
    fetch(tmp_path / "data", FILE, mirror="http://127.0.0.1:1", report=said.append)
    assert "checksum good" in said[0]
    assert "already there" in said[1]


def test_a_file_of_a_sister_folder_is_fetched_into_it(mirror: str, tmp_path: Path) -> None:
    sister = File("../sister/a.bin", FILE.sha256)
    path = fetch(tmp_path / "data" / "own", sister, mirror=mirror)
    assert path == tmp_path / "data" / "sister" / "a.bin"
    assert verified(tmp_path / "data" / "own", sister) == path


def test_fetch_keeps_nothing_of_a_wrong_download(mirror: str, tmp_path: Path) -> None:
    (tmp_path / "mirror" / "a.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(DataCorrupt, match="nothing was kept"):
        fetch(tmp_path / "data", FILE, mirror=mirror)
    assert list((tmp_path / "data").iterdir()) == []


def test_fetch_offline_says_in_one_line_what_to_put_where(tmp_path: Path) -> None:
    for wanted in (FILE, File("b.bin", None)):
        with pytest.raises(DataError) as caught:
            fetch(tmp_path / "data", wanted)
        assert f"put it at {tmp_path / 'data' / wanted.name}" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "data").iterdir())


def test_a_file_must_be_there_and_be_the_published_one(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"a\.bin is missing.*FED_DP_DATA"):
        verified(tmp_path, FILE)
    (tmp_path / "a.bin").write_bytes(CONTENT[:5])
    with pytest.raises(DataCorrupt, match=r"a\.bin is not the published file.*5 bytes"):
        verified(tmp_path, FILE)


def test_the_home_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FED_DP_DATA", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("FED_DP_DATA")
    assert home().parts[-2:] == ("fed_dp", "data")


def test_a_truncated_data_set_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataCorrupt, match=r"train-images-idx3-ubyte\.gz is not the published file"):
        read("mnist", tmp_path)
