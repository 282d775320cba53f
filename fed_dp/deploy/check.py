"""What can be known before a site begins: its records, ledger, key and clock, and whom it would talk to."""

from __future__ import annotations

import email.utils
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fed_dp.accounting.statement import standing
from fed_dp.clients.site_file import SiteFile
from fed_dp.deploy import authority
from fed_dp.errors import DeployError, FedDpError, LedgerFault
from fed_dp.experiment import Experiment
from fed_dp.experiment.federation import at_site
from fed_dp.mechanisms import SecureNoise

TIMEOUT = 10.0  # seconds to wait for the server
MAX_CLOCK_AHEAD, MAX_CLOCK_BEHIND = 5.0, 300.0  # seconds: Flower refuses a site whose clock is further off
Finding = tuple[str, bool, str]  # what was looked at, whether it is good, what was found


class NotThere(DeployError):
    """The server does not answer now; it may later."""


def check_site(site: SiteFile) -> list[str]:
    """Refuse a site that cannot work; return warnings. The server is not asked."""
    authority.check_site_key(Path(site.key))
    warning = authority.check_dates(
        authority.read_certificate(Path(site.authority)), f"the authority's certificate {site.authority}"
    )
    _records(site)
    site.opened().read()
    if Path(site.ledger).stat().st_mode & 0o077:
        raise DeployError(f"{site.ledger} can be read by others: chmod 600 {site.ledger}")
    SecureNoise()
    _address(site)
    return [warning] if warning else []


def check_connection(site: SiteFile) -> float:
    """Refuse a server that is not this federation's; return by how many seconds its clock is behind ours."""
    host, port = _address(site)
    try:
        context = ssl.create_default_context(cafile=site.authority)
    except (OSError, ssl.SSLError) as error:
        raise DeployError(f"{site.authority} is not a certificate: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    try:
        connection.request("POST", "/v1/fleet/")
        response = connection.getresponse()
        response.read()
        ahead = time.time() - _date(response.getheader("date"))
    except ssl.SSLCertVerificationError as error:
        raise DeployError(_explained(site, host, port, error)) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise NotThere(f"the server at {site.server} hung up ({error.reason or error})") from None
    except ssl.SSLError as error:
        raise DeployError(
            f"the server at {site.server} speaks no TLS ({error.reason or error}): a site never talks in "
            "plain text"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise NotThere(f"the server at {site.server} does not answer ({error})") from None
    finally:
        connection.close()
    if ahead > MAX_CLOCK_AHEAD:
        raise DeployError(
            f"this site's clock is {ahead:.0f} s ahead of the server's, which refuses more than "
            f"{MAX_CLOCK_AHEAD:g}: set it"
        )
    if -ahead > MAX_CLOCK_BEHIND:
        raise DeployError(
            f"this site's clock is {-ahead:.0f} s behind the server's, which refuses more than "
            f"{MAX_CLOCK_BEHIND:g}: set it"
        )
    return ahead


def findings(site: SiteFile, experiment: Experiment | None) -> Iterator[Finding]:
    """Look at everything, one after the other; a fault does not hide the next."""
    yield _look("key", lambda: _key(site))
    yield _look("authority", lambda: _until(authority.read_certificate(Path(site.authority)), site.authority))
    yield _look("ledger", lambda: _ledger(site))
    yield _look("noise", _noise)
    yield _look("data", lambda: _data(site, experiment))
    yield _look("server", lambda: _clock(check_connection(site), site.server))
    if experiment is not None:
        yield _look("policy", lambda: _policy(site, experiment))


def _look(what: str, looking: Callable[[], str]) -> Finding:
    try:
        return what, True, looking()
    except FedDpError as error:
        return what, False, str(error)


def _key(site: SiteFile) -> str:
    authority.check_site_key(Path(site.key))
    return f"{site.key}, secret"


def _noise() -> str:
    SecureNoise()
    return "the operating system's entropy, exact samplers"


def _until(certificate: x509.Certificate, path: str) -> str:
    warning = authority.check_dates(certificate, f"the authority's certificate {path}")
    return warning or f"{path}, valid until {certificate.not_valid_after_utc:%Y-%m-%d}"


def _ledger(site: SiteFile) -> str:
    account, entries = site.opened().read()
    if account.site != site.name:
        raise LedgerFault(f"ledger {site.ledger} is that of site {account.site!r}, not of {site.name!r}")
    budget = account.budget
    spent = f"spent ε = {account.spent_text} of {budget.epsilon:g}, δ = {budget.delta:g}"
    stands = f"; {standing(entry.event for entry in entries)}" if entries else ""
    return f"whole, {len(entries)} charges; {spent}{stands}"


def _records(site: SiteFile) -> Path:
    """Return the folder of the site's records."""
    if site.data is None:
        raise DeployError("data.path is not set: where are this site's records?")
    if not (path := Path(site.data.path)).is_dir():
        raise DeployError(f"data.path = {site.data.path!r}: no such folder")
    return path


def _data(site: SiteFile, experiment: Experiment | None) -> str:
    path = _records(site)
    if experiment is None:
        return f"{path} is there; with --experiment FILE it is read and checked"
    found = at_site(experiment, path=path, client=site.client, strict=True)
    told = found.dataset
    tests = f"{len(told.test)} test records" if found.tested else "no test records"
    return f"{len(told.train)} training records, {tests}, of shape {told.shape}"


def _policy(site: SiteFile, experiment: Experiment) -> str:
    site.permit(experiment)
    return f"this site takes part in {experiment.name}"


def _clock(ahead: float, server: str) -> str:
    return f"{server} answers, with this federation's certificate; clocks differ by {abs(ahead):.0f} s"


def _address(site: SiteFile) -> tuple[str, int]:
    host, _, port = site.server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DeployError(f"server = {site.server!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _date(header: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(header or "").timestamp()
    except (TypeError, ValueError):
        return time.time()


def _explained(site: SiteFile, host: str, port: int, error: ssl.SSLCertVerificationError) -> str:
    """Say what is wrong with a server's certificate, having looked at it."""
    what = f"the certificate of the server at {site.server}"
    try:
        loose = ssl.create_default_context()
        loose.check_hostname, loose.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((host, port), TIMEOUT) as plain:
            with loose.wrap_socket(plain, server_hostname=host) as secure:
                shown = x509.load_der_x509_certificate(secure.getpeercert(True) or b"")
        authority.check_issued(shown, authority.read_certificate(Path(site.authority)), what)
        authority.check_dates(shown, what, now=datetime.now(UTC))
    except DeployError as found:
        return str(found)
    except (OSError, ValueError):
        pass
    return f"{what} is not valid: {error.verify_message}"
