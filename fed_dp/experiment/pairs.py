"""Which trainers, networks, strategies and data go together, and which keys each pair takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fed_dp.experiment.schema import Experiment

# What each network takes beside its name; a builder's own defaults hold for what is not given.
MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "small-mlp": (),
    "small-cnn": (),
    "dssgd-mlp": (),
    "dssgd-cnn-mnist": (),
    "dssgd-cnn-svhn": (),
    "unit-linear": (),
    "random-features": ("features", "gamma"),
    "private-pca": ("components", "features", "gamma", "layers"),
    "scattering": ("components", "whitening"),
    "scattering-random": ("features",),
    "scattering-linear": (),
    "patch-filters": ("filters", "components", "whitening", "layers"),
    "behaviour-linear": (),
    "patch-behaviour": ("filters",),
    "patch-cnn": ("filters",),
    "auto-encoder": ("hidden", "layers"),
    "dpah": ("hidden", "layers"),
    "cdbn": ("filters", "hidden"),
    "cdbn-behaviour": ("filters",),
}
# Which networks a trainer of the functional mechanism fits, proved and as its paper has it.
FUNCTIONAL_MODELS = {
    "dpa": (
        (
            "unit-linear",
            "random-features",
            "private-pca",
            "scattering",
            "scattering-random",
            "behaviour-linear",
        ),
        ("auto-encoder", "dpah"),
    ),
    "pcdbn": (("patch-filters", "patch-behaviour"), ("cdbn", "cdbn-behaviour")),
}
BEHAVIOUR_MODELS = ("dpah", "cdbn-behaviour", "behaviour-linear", "patch-behaviour")
BEHAVIOUR_DATA = ("health-daily", "health-weekly", "lifesnaps-windows")
PAPER_MODELS = tuple(name for _, paper in FUNCTIONAL_MODELS.values() for name in paper)
STATISTICS_MODELS = tuple(name for proved, _ in FUNCTIONAL_MODELS.values() for name in proved)
_PROVED_KEYS = ("encoder_share", "cross", "ridge", "local_steps")
_PAPER_KEYS = ("truncate", "learning_rate", "batch_size", "local_epochs", "approximation", "degree")


def check_pair(experiment: Experiment) -> None:
    """Refuse a trainer with a network it does not fit, and keys of the form that it has not."""
    trainer: Any = experiment.trainer
    model, strategy = experiment.model, experiment.strategy
    if trainer.name not in FUNCTIONAL_MODELS:
        if (encoded := model.name in STATISTICS_MODELS) or model.name in PAPER_MODELS:
            owner = next(t for t, (p, q) in FUNCTIONAL_MODELS.items() if model.name in p + q)
            hint = "; for gradients: scattering-linear, patch-cnn" if encoded else ""
            raise ValueError(
                f"model.name = {model.name!r}: expected with trainer.name = {owner!r}, not "
                f"{trainer.name!r}{hint}"
            )
        if strategy.name == "statistics":
            raise ValueError(
                f"strategy.name = 'statistics': trainer.name = {trainer.name!r} has no statistics; "
                "allowed: dpa, pcdbn"
            )
        return
    proved, paper = FUNCTIONAL_MODELS[trainer.name]
    if model.name not in proved + paper:
        raise ValueError(
            f"model.name = {model.name!r}: trainer.name = {trainer.name!r} fits {', '.join(proved)}, and "
            f"as its paper has it, {', '.join(paper)}"
        )
    of_paper = model.name in paper
    for key in _PROVED_KEYS if of_paper else _PAPER_KEYS:
        field = type(trainer).model_fields.get(key)
        if field is not None and getattr(trainer, key) != field.default:
            raise ValueError(
                f"trainer.{key} is set, but model.name = {model.name!r} does not use it; "
                f"{', '.join(proved if of_paper else paper)} would"
            )
    if of_paper and trainer.perturb and not trainer.truncate:
        raise ValueError(
            "trainer.truncate = false: the exact objective has no finite number of coefficients to "
            "perturb; allowed with trainer.perturb = false"
        )
    if strategy.name == "statistics" and of_paper:
        raise ValueError(
            f"strategy.name = 'statistics': model.name = {model.name!r} has none; allowed: "
            f"{', '.join(proved)}"
        )
    if not of_paper and experiment.rounds <= model.learnt:
        raise ValueError(
            f"rounds = {experiment.rounds}: model.name = {model.name!r} is released in {model.learnt + 1} "
            f"stages, one a round; expected at least {model.learnt + 1}"
        )
    if strategy.name == "dssgd" and not of_paper:
        if model.learnt:
            raise ValueError(
                f"model.name = {model.name!r}: strategy.name = 'dssgd' adds up what sites upload, but "
                "the moments that its encoder is made of must be averaged; allowed: scattering-random, "
                "random-features, unit-linear"
            )
        if strategy.exchange not in ("round_robin", "random_order"):
            raise ValueError(
                f"strategy.exchange = {strategy.exchange!r}: every site goes as far as its statistics "
                "ask, so they must go in turn; allowed: round_robin, random_order"
            )
    if trainer.encoder_share * model.learnt >= 1:
        raise ValueError(
            f"trainer.encoder_share = {trainer.encoder_share:g}: {model.learnt} learnt layers leave "
            f"nothing for the head; expected below {1 / model.learnt:g}"
        )
    if trainer.name == "pcdbn" and trainer.approximation in ("piecewise", "printed"):
        if trainer.degree != type(trainer).model_fields["degree"].default:
            raise ValueError(
                f"trainer.degree = {trainer.degree}: trainer.approximation = "
                f"{trainer.approximation!r} has its own"
            )
    if model.name in BEHAVIOUR_MODELS and experiment.data.name not in BEHAVIOUR_DATA:
        raise ValueError(
            f"data.name = {experiment.data.name!r}: model.name = {model.name!r} needs records of behaviour; "
            f"allowed: {', '.join(BEHAVIOUR_DATA)}"
        )
