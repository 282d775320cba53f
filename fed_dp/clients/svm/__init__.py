"""The private support vector machine with an RBF kernel: hybrid and private, in one release of the weights.

Reference: Li, Xiong, Ohno-Machado, Jiang, "Privacy Preserving RBF Kernel SVM", 2014.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fed_dp.accounting.guarantee import Guarantee
from fed_dp.clients.functional import sites_per_model, step_of
from fed_dp.experiment.components import AuditSetup, Limit, TrainerOptions

if TYPE_CHECKING:
    from fed_dp.clients.trainer import Trainer
    from fed_dp.experiment.plan import ReleasePlan
    from fed_dp.experiment.schema import Experiment
    from fed_dp.mechanisms.support_vector import SvmNoise
    from fed_dp.models import FlatNetwork, NetworkSpec

MAX_RECORDS = 1_000_000  # of a site, where they are not known yet
PROVED = Guarantee(
    "svm",
    "proved",
    "record",
    "replace one",
    "output perturbation (Rubinstein et al. 2012; Chaudhuri et al. 2011): ½‖w‖² + (C/n) Σ smoothed "
    "hinge with ‖z‖ ≤ 1 is 1-strongly convex, so that one record moves w by at most 2C/n, and by as "
    "much more as the accuracy of a fixed number of steps allows; several one-vs-rest problems share "
    "the budget",
)
PAPER = Guarantee(
    "svm_paper",
    "proved",
    "record",
    "replace one",
    "Algorithm 1 of Li et al. 2014 with C divided by n: its Laplace noise of scale 2^2.5 C √D/(n ε) "
    "is twice what the sensitivity 2C/n asks for",
)
AS_PRINTED = Guarantee(
    "svm_as_printed",
    "refuted",
    "record",
    "replace one",
    "Eq. 3 of Li et al. 2014 as printed does not divide C by n, but the noise is: one record moves w "
    "by up to 2C, which costs nε/2",
)


class Svm(TrainerOptions):
    """½‖w‖² + (C/n) Σ hinge, solved, then noise on w; once."""

    name: Literal["svm"] = "svm"
    # C; auto: from the number of records and the noise (mechanisms/support_vector.py: default_cost)
    cost: Literal["auto"] | Annotated[float, Field(ge=1e-3, le=1e6)] = "auto"
    frequencies: Literal["public", "random"] = "public"  # ρ: fitted to public records (hybrid), or drawn
    noise: Literal["auto", "gamma", "laplace", "gaussian"] = "auto"  # gaussian with a delta, else gamma
    perturb: bool = True  # false: no noise, no privacy

    needs = "kernel"
    guarantees = (PROVED, PAPER, AS_PRINTED)
    variants = ("paper", "paper_as_printed")
    divides_by_records = True

    @property
    def private(self) -> bool:
        """Whether it adds noise."""
        return self.perturb

    def guarantee(self, experiment: Experiment) -> Guarantee:
        """Proved; refuted where C is not divided by n."""
        return {"proved": PROVED, "paper": PAPER, "paper_as_printed": AS_PRINTED}[experiment.privacy.variant]

    def noise_kind(self, experiment: Experiment) -> SvmNoise:
        """Return which noise the weights get."""
        privacy = experiment.privacy
        if privacy.variant != "proved":
            return "paper"
        if self.noise != "auto":
            return self.noise
        if privacy.delta is not None:
            return "gaussian"
        return "laplace" if privacy.noise_source == "secure" else "gamma"

    def cost_for(
        self, experiment: Experiment, *, records: int, features: int = 2, problems: int = 1
    ) -> float:
        """Return C of a site of so many (public) records; of fewer features or problems, `auto` is larger."""
        if self.cost != "auto":
            return self.cost
        from fed_dp.experiment.plan import noise_spec
        from fed_dp.mechanisms.support_vector import default_cost, score_noise

        if not self.private:
            return default_cost(records=records)
        one = score_noise(
            kind=self.noise_kind(experiment),
            noise_value=noise_spec(self.release_plan(experiment, client=0, size=0).release).value,
            records=records,
            problems=problems,
            features=features,
        )
        return default_cost(records=records, score_noise=one / math.sqrt(sites_per_model(experiment)))

    def decided(self, experiment: Experiment, *, records: int, network: NetworkSpec) -> dict[str, float]:
        """Return C, where the rule decides it."""
        if self.cost != "auto":
            return {}
        if not self.private:
            return {"trainer.cost": self.cost_for(experiment, records=records)}
        from fed_dp.models.kernel import KernelMachine

        machine = network.build()
        assert isinstance(machine, KernelMachine)  # by check
        head = machine.head
        cost = self.cost_for(
            experiment, records=records, features=head.in_features, problems=head.out_features
        )
        return {"trainer.cost": cost}

    def release_plan(self, experiment: Experiment, *, client: int, size: int) -> ReleasePlan:
        """One release of the weights for the whole budget."""
        from fed_dp.accounting import Gaussian, Laplace, Release
        from fed_dp.experiment.plan import ReleasePlan, budget_of, one_multiplier

        budget = budget_of(experiment)
        assert budget is not None  # by check_privacy
        release: Release = Laplace(budget.epsilon)
        if self.noise_kind(experiment) == "gaussian":
            release = Gaussian(one_multiplier(budget))
        name, source = self.guarantee(experiment).name, experiment.privacy.noise_source
        return ReleasePlan(release, name, source, (release,))

    def fits_to_public(self, experiment: Experiment) -> bool:
        """Fit the frequencies to public records, if the machine is hybrid."""
        return self.frequencies == "public" and not experiment.model.holds_records

    def network_options(self, experiment: Experiment) -> dict[str, int]:
        """Return how many records a machine holds that consists of them."""
        return {"records": experiment.data.public_records} if experiment.model.holds_records else {}

    def check(self, experiment: Experiment) -> None:
        """Refuse a hybrid machine without public records; of records, whatever is not for public ones."""
        if experiment.model.holds_records:
            if self.private:
                raise ValueError(
                    f"model.name = {experiment.model.name!r} consists of the records that it is trained on: "
                    "expected with trainer.perturb = false and strategy.name = 'public'"
                )
            if self.is_set("frequencies"):
                raise ValueError(
                    f"trainer.frequencies = {self.frequencies!r}: model.name = {experiment.model.name!r} has "
                    "the kernel itself, and no frequencies"
                )
        if self.frequencies == "public" and not experiment.data.has_public:
            raise ValueError(
                "trainer.frequencies = 'public' needs public records: set data.public_records, or "
                "data.public_data = 'digits'"
            )

    def check_noise(self, experiment: Experiment) -> None:
        """Refuse noise that does not go together with the privacy that is asked for."""
        privacy = experiment.privacy
        if experiment.mechanism is None:
            if self.is_set("noise"):
                raise ValueError(f"trainer.noise = {self.noise!r}: trainer.perturb = false adds no noise")
            if privacy != type(privacy)():
                raise ValueError("trainer.perturb = false adds no noise: no privacy key can hold")
            return
        if experiment.noisy_part is not self or privacy.budget_epsilon is None:
            return
        if privacy.variant != "proved" and (self.noise != "auto" or privacy.delta is not None):
            raise ValueError(
                f"privacy.variant = {privacy.variant!r}: the paper's noise is Laplace noise of its own "
                "scale; expected without trainer.noise and privacy.delta"
            )
        if self.noise != "auto" and (self.noise == "gaussian") != (privacy.delta is not None):
            expected = "with" if self.noise == "gaussian" else "without"
            raise ValueError(f"trainer.noise = {self.noise!r}: expected {expected} privacy.delta")
        if privacy.noise_source == "secure" and self.noise == "gamma":
            raise ValueError(
                "trainer.noise = 'gamma': no exact sampler is known to us; with privacy.noise_source = "
                "'secure', allowed: laplace, gaussian"
            )

    def limits(self, experiment: Experiment, *, client: int) -> dict[str, Limit]:
        """Limit steps of the solver, which follow from C and the number of records."""
        from fed_dp.mechanisms.support_vector import steps

        declared = experiment.data.expected(client)
        counts = [2**k for k in range(MAX_RECORDS.bit_length())] + [MAX_RECORDS]
        most = max(
            steps(cost=self.cost_for(experiment, records=count), records=count, expected=count)
            for count in (counts if declared is None else [declared])
        )
        return {"steps for trainer.cost": (most, "steps")}

    def build(self, experiment: Experiment, net: FlatNetwork, plan: ReleasePlan | None) -> Trainer:
        """Return the trainer."""
        from fed_dp.clients.svm.trainer import ExactTrainer, SvmTrainer
        from fed_dp.models.kernel import KernelMachine

        machine = net.network
        if not isinstance(machine, KernelMachine):
            return ExactTrainer(net, cost=partial(self.cost_for, experiment))
        head = machine.head
        return SvmTrainer(
            net,
            cost=partial(self.cost_for, experiment, features=head.in_features, problems=head.out_features),
            release=None if plan is None else plan.release,
            kind=self.noise_kind(experiment),
            step=step_of(experiment),
            as_printed=self.variant(experiment) == "paper_as_printed",
            fixed_steps=experiment.private,
        )

    @classmethod
    def audits(cls) -> Mapping[str, Mapping[str, AuditSetup]]:
        """All records inside the margin: none moves w by more."""
        setup = AuditSetup(
            records=200,
            data={"name": "digits", "public_records": 100},
            model={"name": "rbf", "features": 20},
            trainer={"name": "svm", "cost": 0.002},
        )
        return {"svm": dict.fromkeys(("proved", *cls.variants), setup)}
