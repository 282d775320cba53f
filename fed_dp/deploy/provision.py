"""Provisioning: from a list of names to an authority, a server's folder and a start kit for every site.

FOLDER/authority   the authority's key and certificate: kept by whoever runs the federation, off line
FOLDER/server      goes to the server: certificate and key, the sites' public keys, server.toml
FOLDER/sites/NAME  goes to that site: the authority's certificate, the site's own key, its ledger, site.toml
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography import x509

from fed_dp.accounting import Budget, Ledger
from fed_dp.deploy import authority
from fed_dp.deploy.server_file import FILE, SITES, read_sites
from fed_dp.errors import ConfigError, DeployError
from fed_dp.runs.folder import write_atomically
from fed_dp.server.discovery import MAX_RECORDS

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
LONGEST = 3652  # days


@dataclass(frozen=True, slots=True)
class Plan:
    """What to provision."""

    sites: tuple[str, ...]
    budget: Budget
    host: str = "localhost"  # where sites find the server
    port: int = 9092
    control_port: int = 9093
    days: int = 825  # of the server's certificate; the authority's lasts ten years

    def __post_init__(self) -> None:
        for name in self.sites:
            if not NAME.fullmatch(name):
                raise ConfigError(f"--sites: {name!r}: expected small letters, digits and dashes")
        if repeated := [name for name in self.sites if self.sites.count(name) > 1]:
            raise ConfigError(f"--sites names {repeated[0]!r} twice")
        if not self.sites:
            raise ConfigError("--sites: expected names, separated by commas")
        check_days(self.days)
        if not HOST.fullmatch(self.host):
            raise ConfigError(f"--host {self.host!r}: expected a name or an IPv4 address, without a port")
        for key in ("port", "control_port"):
            if not 1 <= (value := getattr(self, key)) <= 65535:
                raise ConfigError(f"--{key.replace('_', '-')} {value}: expected 1 to 65535")


def provision(folder: Path, plan: Plan) -> tuple[list[str], list[str]]:
    """Make what is not there yet; return the names of new sites and of those that were left as they are."""
    home, server = folder / "authority", folder / "server"
    try:
        _begin(home, server, plan)
        known = read_sites(server) if (server / SITES).is_file() else {}
        new = [name for name in plan.sites if name not in known]
        for name in new:
            client = len(known)
            _kit(folder, name, client, _address(server, plan), plan.budget)
            known[name] = client
            write_atomically(server / SITES, _sites_file(known))
    except FileExistsError as error:
        raise DeployError(
            f"{error.filename} is there already, and nothing is replaced: remove it first"
        ) from None
    except OSError as error:
        raise DeployError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return new, [name for name in plan.sites if name not in new]


def renew(folder: Path, *, days: int) -> Path:
    """Issue a new server certificate, for the same names, in place of the old one."""
    check_days(days)
    home, server = folder / "authority", folder / "server"
    if not (home / "ca.key").is_file():
        raise DeployError(f"{home / 'ca.key'} is missing: only who has it can issue certificates")
    old = authority.read_certificate(server / "server.crt")
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(name.value) for name in names]
    fresh = server / ".renewed"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    authority.issue_server(home, fresh, hosts=hosts, days=days)
    for name in ("server.key", "server.crt"):
        (fresh / name).replace(server / name)
    fresh.rmdir()
    return server / "server.crt"


def revoke(server: Path, name: str) -> None:
    """Take a site's key from the server: when it is restarted, it lets the site in no more."""
    _known(server, name)
    try:
        (server / "sites" / f"{name}.pub").rename(server / "sites" / f"{name}.revoked")
    except FileNotFoundError:
        raise ConfigError(f"site {name!r} was revoked before") from None


def rekey(folder: Path, name: str) -> Path:
    """Give a site a new key, under its old name and number; return the new private key."""
    server, kit = folder / "server", folder / "sites" / name
    _known(server, name)
    kit.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = kit / ".site.key"
    fresh.unlink(missing_ok=True)
    authority.make_site_key(fresh, kit / "site.pub")
    shutil.copyfile(kit / "site.pub", server / "sites" / f"{name}.pub")
    (server / "sites" / f"{name}.revoked").unlink(missing_ok=True)
    return fresh.replace(kit / "site.key")


def _known(server: Path, name: str) -> None:
    if name not in (known := read_sites(server)):
        raise ConfigError(f"site {name!r} is not known; known: {', '.join(known)}")


def check_days(days: int) -> None:
    """Refuse how long no certificate can be valid."""
    if not 1 <= days <= LONGEST:
        raise ConfigError(f"--days {days}: expected 1 to {LONGEST}")


def _begin(home: Path, server: Path, plan: Plan) -> None:
    """Make the authority and the server's folder, once."""
    if not home.is_dir():
        partial = home.with_name(".authority")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, mode=0o700)
        authority.make_authority(partial, days=LONGEST)
        partial.rename(home)
    if not server.is_dir():
        partial = server.with_name(".server")
        shutil.rmtree(partial, ignore_errors=True)
        for path in (partial, partial / "sites", partial / "data"):
            path.mkdir(mode=0o700)
        hosts = list(dict.fromkeys([plan.host, "localhost", "127.0.0.1"]))
        authority.issue_server(home, partial, hosts=hosts, days=plan.days)
        shutil.copyfile(home / "ca.crt", partial / "ca.crt")
        (partial / FILE).write_text(_server_toml(plan))
        partial.rename(server)


def _kit(folder: Path, name: str, client: int, address: str, budget: Budget) -> None:
    """Make a site's kit; it appears whole, or not at all."""
    place = folder / "sites" / name
    if place.exists():
        raise FileExistsError(17, "exists", str(place))
    partial = place.with_name(f".{name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    authority.make_site_key(partial / "site.key", partial / "site.pub")
    shutil.copyfile(folder / "authority" / "ca.crt", partial / "ca.crt")
    Ledger.create(partial / "ledger.sqlite", site=name, budget=budget)
    (partial / "ledger.sqlite").chmod(0o600)
    (partial / "site.toml").write_text(_site_toml(name, client, address, budget))
    (partial / "START").write_text(
        "# at the site, after data.path in site.toml is set:\nfed-dp deploy check . && fed-dp deploy site .\n"
    )
    shutil.copyfile(partial / "site.pub", folder / "server" / "sites" / f"{name}.pub")
    partial.rename(place)


def _address(server: Path, plan: Plan) -> str:
    """Return where sites find the server: as it was provisioned first."""
    text = (server / "ADDRESS").read_text().strip() if (server / "ADDRESS").is_file() else ""
    if not text:
        text = f"{plan.host}:{plan.port}"
        (server / "ADDRESS").write_text(text + "\n")
    return text


def _sites_file(known: dict[str, int]) -> bytes:
    return (
        "# written by fed-dp deploy init: each site's number in every experiment\n" + tomli_w.dumps(known)
    ).encode()


def _server_toml(plan: Plan) -> str:
    listen = "127.0.0.1" if plan.host in ("localhost", "127.0.0.1") else "0.0.0.0"
    return f"""# The server's own file.
host = "{listen}"             # where it listens for sites; they find it at {plan.host}:{plan.port}
port = {plan.port}
control_port = {plan.control_port}            # for its operator, on loopback alone
join_timeout = 600             # seconds to wait for sites when a run begins
restarts = 3                   # of a run that stops again and again without finishing a round
max_records = {MAX_RECORDS}         # that a site may announce: so much it can weigh in a mean

[data]
path = "data"                  # the server's own records: test.csv (or .npz, …) and, if wanted, public.csv
"""


def _site_toml(name: str, client: int, address: str, budget: Budget) -> str:
    return f'''# This site's own file: no server can change or exceed it.
name = "{name}"
client = {client}                     # this site's number in every experiment
server = "{address}"
authority = "ca.crt"           # whose certificate the server must have
key = "site.key"               # by which the server knows this site: keep it secret
ledger = "ledger.sqlite"       # what this site has spent: back it up, never put an older copy back
memory = "memory"              # what it keeps between rounds; never sent
heartbeat = 10                 # seconds; twice that without one, and the server takes this site for dead

[data]
path = "data"                  # the folder of this site's records: train.csv (or .npz, …), test.csv
# friends = "friends.csv"      # a file in it that says who is friends with whom; no ε protects that

[budget]                       # what the ledger was made with; another budget is another ledger
epsilon = {budget.epsilon!r}
delta = {budget.delta!r}

[allow]                        # the most this site does; a server that asks for more is refused
trainers = ["sgd", "psgd", "dpa", "pcdbn", "adlm", "ilm", "svm", "dpme", "filter-priority"]
upload_fraction = 1.0          # θ_u
bound = 1000.0                 # γ
without_noise = false          # whether it takes part in experiments that protect nobody
claimed = false                # whether in experiments whose privacy their paper claims and nobody has proved
rounds = 10000                 # these bound the time and memory that an experiment takes here
clients = 10000
local_epochs = 100
steps = 10000                  # of a round
total_steps = 100000           # of all rounds
width = 4096                   # of a layer, of the classes, or of the inputs
least_epsilon = 0.001          # of an experiment: many small ones fill the ledger

[share]                        # what the server learns beside uploads; no noise protects it
records = true                 # their number; without it, all sites weigh the same
metrics = false                # scores on this site's own test records
'''
