"""A server's own files: server.toml, which its operator edits, and sites.toml, which provisioning writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fed_dp.deploy.authority import public_bytes
from fed_dp.errors import ConfigError
from fed_dp.experiment import read_toml, validated
from fed_dp.options import Section, Words
from fed_dp.server.discovery import MAX_RECORDS

FILE, SITES = "server.toml", "sites.toml"
Port = Annotated[int, Field(ge=1, le=65535)]


class ServerData(Section):
    """Where the server's own records are: test.* and, for experiments that want any, public.*."""

    path: str = "data"


class ServerFile(Section):
    """One server. Paths are relative to the file's own folder."""

    host: str = "0.0.0.0"  # where it listens for sites
    port: Port = 9092
    control_port: Port = 9093  # for its operator, on loopback alone
    join_timeout: Annotated[float, Field(gt=0, strict=False)] = (
        600.0  # seconds to wait for sites at the start
    )
    restarts: Annotated[int, Field(ge=0)] = 3  # of a run that stops again and again without finishing a round
    max_records: Annotated[int, Field(ge=1)] = MAX_RECORDS  # that a site may announce: its weight in a mean
    track: Words = ()  # "tensorboard", "mlflow": where the curves of runs are also written
    data: ServerData = ServerData()


class ServerHome:
    """A server's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = (folder.parent if folder.name == FILE else folder).absolute()
        self.file = validated(ServerFile, read_toml(self.folder / FILE), where=str(self.folder / FILE))
        if self.file.port == self.file.control_port:
            raise ConfigError(f"{self.folder / FILE}: port and control_port are both {self.file.port}")

    @property
    def runs(self) -> Path:
        """Where its run folders are."""
        return self.folder / "runs"

    @property
    def data(self) -> Path:
        """Where its own records are."""
        return self.folder / self.file.data.path

    @property
    def control(self) -> str:
        """The address of Flower's Control API: on loopback."""
        return f"127.0.0.1:{self.file.control_port}"

    def sites(self) -> dict[str, int]:
        """Return the client number of every site, by name."""
        return read_sites(self.folder)

    def keys(self) -> dict[bytes, tuple[int, str]]:
        """Return whose public key is whose; a site that was revoked has none."""
        return {
            public_bytes(path): (client, name)
            for name, client in self.sites().items()
            if not (path := self.folder / "sites" / f"{name}.pub").with_suffix(".revoked").is_file()
        }


def read_sites(folder: Path) -> dict[str, int]:
    """Read which sites there are."""
    tables = read_toml(folder / SITES)
    if not all(type(client) is int for client in tables.values()):
        raise ConfigError(f"{folder / SITES}: expected a line NAME = NUMBER for every site")
    if sorted(tables.values()) != list(range(len(tables))):
        raise ConfigError(f"{folder / SITES}: expected the numbers 0 to {len(tables) - 1}, each once")
    return dict(sorted(tables.items(), key=lambda item: item[1]))
