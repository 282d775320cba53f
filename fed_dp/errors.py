"""Everything fed_dp raises on purpose. Each message is one line that a user can act on.

FedDpError
├── ConfigError          an experiment file, an override or a flag is wrong
├── DataError            a data set is unusable
│   ├── DataMissing      its files are not where they should be
│   └── DataCorrupt      a file is there but is not what it should be
├── PartitionError       the records cannot be divided as asked
├── ModelError           the network does not fit the data or the trainer
├── PrivacyError         a fault on the privacy path: nothing was sent
│   ├── BudgetExceeded   the site's budget cannot pay for the next release
│   ├── LedgerFault      the site's ledger is missing, damaged, rolled back or cannot be written
│   └── SiteRefused      the site's own file does not allow what the server asks for
├── UploadRefused        what a site sent is not a valid upload; the server state is untouched
├── DeployError          a server or a site cannot be set up, reached or trusted
└── RunError             a run cannot start or go on
    ├── EmptyRound       nobody uploaded in a round, or fewer than its quorum
    ├── ResourceError    more CPUs or GPUs were asked for than Ray has
    └── ResumeError      there is nothing to resume, or it belongs to another experiment
"""

from __future__ import annotations


class FedDpError(Exception):
    """Base of all errors that are the user's to read; never a programming mistake."""


class ConfigError(FedDpError):
    """An experiment, an override or a flag is wrong."""


class DataError(FedDpError):
    """A data set is unusable."""


class DataMissing(DataError):
    """The files of a data set are not where they should be."""


class DataCorrupt(DataError):
    """A file is there, but it is truncated, altered or of another format."""


class PartitionError(FedDpError):
    """The records cannot be divided among the clients as asked."""


class ModelError(FedDpError):
    """The network does not fit the data, or the trainer cannot use it."""


class PrivacyError(FedDpError):
    """A fault on the privacy path. Nothing was sent."""


class BudgetExceeded(PrivacyError):
    """The site's privacy budget cannot pay for the next release. Nothing was sent."""


class LedgerFault(PrivacyError):
    """The site's ledger is missing, damaged, rolled back or cannot be written. Nothing was sent."""


class SiteRefused(PrivacyError):
    """The site's own file does not allow what the server asks for. Nothing was sent."""


class UploadRefused(FedDpError):
    """What a site sent is not a valid upload. The server state is untouched."""


class DeployError(FedDpError):
    """A server or a site cannot be set up, reached or trusted."""


class RunError(FedDpError):
    """A run cannot start or cannot go on."""


class EmptyRound(RunError):
    """Nobody uploaded in a round, or fewer than its quorum: there is nothing to learn from."""


class ResourceError(RunError):
    """More CPUs or GPUs were asked for than Ray has."""


class ResumeError(RunError):
    """There is nothing to resume, or it belongs to another experiment."""
