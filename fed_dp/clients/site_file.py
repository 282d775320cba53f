"""A deployed site's own file: what it is, where its records are, and the most it will do for a server.

No server can change it. Whatever a server asks for beyond it is refused, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fed_dp import plugins
from fed_dp.accounting import Budget, Guarantee, Ledger
from fed_dp.errors import ConfigError, SiteRefused
from fed_dp.experiment import Experiment, read_toml, validated
from fed_dp.experiment.plan import guarantee_of
from fed_dp.models.networks.pretrained import provide
from fed_dp.options import Count, Section
from fed_dp.sharing.update import MAX_ABS_VALUE

FILE, WITNESS = "site.toml", "ledger.last"
Names = Annotated[tuple[str, ...], Field(strict=False)]


def site_path(path: Path) -> Path:
    """Return where a site's file is: the path itself, or in the folder that it names."""
    return (path / FILE if path.is_dir() else path).absolute()


class OwnData(Section):
    """Where the site's records are: a folder as an experiment's data.path, of this site's records alone."""

    path: str
    friends: str | None = None  # a file in it that says who is friends with whom; no ε protects that


class OwnBudget(Section):
    """What the ledger was made with; a ledger that says otherwise is another one."""

    epsilon: float
    delta: float = 0.0


class Allow(Section):
    """The most that the site will do."""

    trainers: Names = Field(default_factory=lambda: plugins.built_in("trainer"))
    upload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # θ_u
    bound: Annotated[float, Field(gt=0, le=MAX_ABS_VALUE)] = MAX_ABS_VALUE  # γ
    plugins: Names = ()  # what of other packages it runs: names of components, or import paths
    without_noise: bool = False  # whether it takes part in what protects nobody
    claimed: bool = False  # whether in what its paper claims to be private, without a proof
    # What a round may cost in time and memory; and how many sites there may be.
    rounds: Count = 10_000
    clients: Count = 10_000
    local_epochs: Count = 100
    steps: Count = 10_000  # of a round
    total_steps: Count = 100_000  # of all rounds, whose cost must be added up
    width: Count = 4_096  # of a layer, of the classes, or of the inputs that the columns become
    least_epsilon: Annotated[float, Field(ge=0)] = 1e-3  # of an experiment: many small ones fill the ledger


class Share(Section):
    """What the server may learn beside the uploads. Neither is protected by noise."""

    records: bool = True  # their number; without it, all sites weigh the same
    metrics: bool = False  # scores on the site's own test records; the training loss where there is no noise
    scores: Count = 20  # how often it tells such scores in all, once for each experiment


class SiteFile(Section):
    """One site. Relative paths are relative to the file's own folder."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "site"
    client: Annotated[int, Field(ge=0)]  # its number in every experiment
    ledger: str = "ledger.sqlite"
    memory: str | None = None  # a folder for what it keeps between rounds; without it: while it runs
    server: str = ""  # host:port
    authority: str = "ca.crt"  # whose certificate the server must have
    key: str = "site.key"  # the site's own, by which the server knows it
    witness: str | None = None  # where the ledger's last entry is noted again; without it: beside the key
    heartbeat: Annotated[float, Field(ge=10, le=1800, strict=False)] = 10.0  # seconds
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # on loopback, between its own processes; 0: any
    encoders: Names = ()  # files of pre-trained encoders, which experiments name by their SHA-256
    data: OwnData | None = None
    budget: OwnBudget | None = None
    allow: Allow = Allow()
    share: Share = Share()

    @classmethod
    def read(cls, path: Path) -> SiteFile:
        """Read a site's file, or the one in a site's folder."""
        path = site_path(path)
        site = validated(cls, read_toml(path), where=str(path))
        named = {name for name in site.allow.trainers if ":" not in name}
        if unknown := named - set(plugins.names("trainer")):
            raise ConfigError(
                f"{path}: allow.trainers names {min(unknown)!r}; allowed: "
                f"{', '.join(plugins.names('trainer'))}"
            )
        home = path.parent
        found = {key: str(home / getattr(site, key)) for key in ("ledger", "authority", "key")}
        data = site.data
        if data is not None:
            data = data.model_copy(update={"path": str(home / Path(data.path).expanduser())})
        memory = None if site.memory is None else str(home / site.memory)
        noted = str(Path(found["key"]).with_name(WITNESS) if site.witness is None else home / site.witness)
        encoders = tuple(str(home / Path(each).expanduser()) for each in site.encoders)
        return site.model_copy(
            update={**found, "data": data, "memory": memory, "witness": noted, "encoders": encoders}
        )

    def opened(self) -> Ledger:
        """Return the ledger; its budget must be the one stated here."""
        ledger = Ledger(Path(self.ledger), witness=None if self.witness is None else Path(self.witness))
        if self.budget is not None:
            stated = Budget(self.budget.epsilon, self.budget.delta)
            if (sealed := ledger.read()[0].budget) != stated:
                raise SiteRefused(
                    f"ledger {self.ledger} was made for ε = {sealed.epsilon:g}, δ = {sealed.delta:g}; the "
                    f"site's file says {stated.epsilon:g}, {stated.delta:g}; nothing was sent"
                )
        return ledger

    def permit_code(self, tables: Mapping[str, Any]) -> None:
        """Refuse code that this file does not allow, before any of it is imported.

        A trainer must also be registered: the ledger names its guarantee, and is read by other processes.
        """
        for kind in plugins.GROUPS:
            table = tables.get(kind)
            named = table if isinstance(table, dict) else {"name": table}
            if "weights" in named and (sha256 := named.get("sha256")) not in self._provided():
                raise SiteRefused(
                    f"{kind}.sha256 = {sha256!r} is no file that this site names (encoders); nothing was sent"
                )
            allowed = {*self.allow.plugins, *(self.allow.trainers if kind == "trainer" else ())}
            for key in ("name", "factory", "loader"):
                value = named.get(key)
                if value is None or (key == "name" and value in plugins.built_in(kind)):
                    continue
                if key == "loader" or not isinstance(value, str) or value not in allowed:
                    raise SiteRefused(
                        f"{kind}.{key} = {value!r} is not a part of fed_dp: this site runs other code only "
                        "where its file names it (allow.plugins), and never to read records; nothing was sent"
                    )
                if kind == "trainer" and ":" in value:
                    raise SiteRefused(
                        f"trainer.name = {value!r}: a site runs trainers that are registered under a name "
                        "(entry point fed_dp.trainers); nothing was sent"
                    )
            options = named.get("options", {})
            given = options.values() if isinstance(options, dict) else [options]
            if strange := [value for value in given if not isinstance(value, int | float)]:
                raise SiteRefused(
                    f"{kind}.options hold {strange[0]!r}: to a factory of its own, a site passes numbers and "
                    "booleans alone; nothing was sent"
                )

    def _provided(self) -> list[Any]:
        """Offer the site's files of encoders, and return their SHA-256."""
        return [provide(Path(each)) for each in self.encoders]

    def permit(self, experiment: Experiment) -> None:
        """Refuse, by name, what this file does not allow. No record is looked at."""
        allow, trainer, strategy = self.allow, experiment.trainer.name, experiment.strategy
        guarantee, source = guarantee_of(experiment), experiment.privacy.noise_source
        self._permit_size(experiment)
        if trainer not in allow.trainers:
            raise SiteRefused(
                f"trainer.name = {trainer!r}: this site allows {', '.join(allow.trainers)}; nothing was sent"
            )
        if guarantee is None and not allow.without_noise:
            raise SiteRefused(
                f"trainer.name = {trainer!r} adds no noise: this site takes part in private experiments "
                "alone (allow.without_noise); nothing was sent"
            )
        if guarantee is not None and source != "secure":
            raise SiteRefused(
                f"privacy.noise_source = {source!r} is seeded: a deployed site draws from the "
                "operating system's entropy alone; allowed: 'secure'; nothing was sent"
            )
        self._permit_guarantee(experiment, guarantee)
        self._permit_files(experiment)
        declared = experiment.data.expected_records
        if declared is not None and self.share.records:
            raise SiteRefused(
                "data.expected_records is set: this site tells how many records it has (share.records), "
                "so that their number is not protected; nothing was sent"
            )
        record = guarantee is not None and guarantee.unit == "record"
        if record and declared is None and not self.share.records:
            raise SiteRefused(
                "data.expected_records is missing: this site does not tell how many records it has "
                "(share.records), and the noise in sums divided by their number would; nothing was sent"
            )
        share = strategy.upload_share(self.client)
        bound = MAX_ABS_VALUE if strategy.upload_bound is None else strategy.upload_bound
        if share > allow.upload_fraction:
            raise SiteRefused(
                f"strategy.upload_fraction = {share:g} (θ_u): this site shares at most "
                f"{allow.upload_fraction:g} (allow.upload_fraction); nothing was sent"
            )
        if bound > allow.bound:
            raise SiteRefused(
                f"strategy.bound = {bound:g} (γ): this site's values stay within {allow.bound:g} "
                "(allow.bound); nothing was sent"
            )

    def _permit_files(self, experiment: Experiment) -> None:
        """Refuse a file of friends that this site does not name: a server could ask which files there are."""
        asked = experiment.data.friends_file
        named = None if self.data is None else self.data.friends
        if asked is not None and asked != named:
            raise SiteRefused(
                f"data.friends = {asked!r}: this site opens a file of friends only where its own file "
                "names it (data.friends); nothing was sent"
            )

    def _permit_guarantee(self, experiment: Experiment, guarantee: Guarantee | None) -> None:
        """Refuse what is refuted, and what is only claimed unless this file allows it."""
        if guarantee is None or guarantee.status == "proved":
            return
        form = f"privacy.variant = {experiment.privacy.variant!r} is {guarantee.status} ({guarantee.reason})"
        if guarantee.status != "claimed":
            raise SiteRefused(f"{form}: no site releases what is refuted; nothing was sent")
        if not self.allow.claimed:
            raise SiteRefused(
                f"{form}: this site releases only what is proved (allow.claimed); nothing was sent"
            )

    def _permit_size(self, experiment: Experiment) -> None:
        """Refuse what would take more time or memory than the file allows."""
        asked: dict[str, tuple[float, str]] = {
            "rounds": (experiment.rounds, "rounds"),
            "clients.count": (experiment.clients.count, "clients"),
        }
        asked |= experiment.trainer.limits(experiment, client=self.client)
        asked |= {name: (size, "width") for name, size in experiment.data.sizes().items()}
        asked |= {f"model.{key}": (value, "width") for key, value in experiment.model.sizes.items()}
        for name, (value, key) in asked.items():
            if value > (most := getattr(self.allow, key)):
                raise SiteRefused(
                    f"{name} = {value:g}: this site allows at most {most:g} (allow.{key}); nothing was sent"
                )
        epsilon = experiment.privacy.budget_epsilon
        if epsilon is not None and epsilon < self.allow.least_epsilon:
            raise SiteRefused(
                f"privacy.budget_epsilon = {epsilon:g}: this site allows at least "
                f"{self.allow.least_epsilon:g} (allow.least_epsilon); nothing was sent"
            )
