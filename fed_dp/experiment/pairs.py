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
    "class-sums": (),
    "relevant-pixels": (),
    "relevant-scattering": ("features",),
    "adlm-cnn": ("filters", "hidden"),
    "rbf": ("features", "width"),
}
RELEVANCE_MODELS = ("class-sums", "relevant-pixels", "relevant-scattering")
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
    "adlm": (RELEVANCE_MODELS, ("adlm-cnn",)),
    "ilm": (RELEVANCE_MODELS, ("adlm-cnn",)),
}
DIGIT_DATA = ("mnist", "mnist-32", "mnist-writers", "svhn")
BEHAVIOUR_MODELS = ("dpah", "cdbn-behaviour", "behaviour-linear", "patch-behaviour")
BEHAVIOUR_DATA = ("health-daily", "health-weekly", "lifesnaps-windows")
PAPER_MODELS = tuple(dict.fromkeys(name for _, paper in FUNCTIONAL_MODELS.values() for name in paper))
STATISTICS_MODELS = tuple(dict.fromkeys(name for proved, _ in FUNCTIONAL_MODELS.values() for name in proved))
# What else than 'proved' a mechanism comes as.
VARIANTS: dict[str, tuple[str, ...]] = {
    "sparse_vector": ("paper", "paper_as_printed"),
    "dpa": ("paper", "paper_as_printed", "paper_as_released"),
    "pcdbn": ("paper",),
    "adlm": ("paper", "paper_as_released"),
    "ilm": ("paper", "paper_as_released"),
    "svm": ("paper", "paper_as_printed"),
}
_PROVED_KEYS = ("encoder_share", "cross", "ridge", "local_steps")
_PAPER_KEYS = (
    "truncate", "learning_rate", "batch_size", "local_epochs", "approximation", "degree",
    "relevance_share", "label_share", "relevance_epochs",
)  # fmt: skip


def check_pair(experiment: Experiment) -> None:
    """Refuse a trainer with a network it does not fit, and keys of the form that it has not."""
    trainer: Any = experiment.trainer
    model, strategy, data = experiment.model, experiment.strategy, experiment.data
    if (model.name == "rbf") != (trainer.name == "svm"):
        raise ValueError(
            f"model.name = {model.name!r}, trainer.name = {trainer.name!r}: 'rbf' and 'svm' go together"
        )
    _check_together(experiment)
    there = data.public_records or data.public_data
    if not there and (
        experiment.fits_to_public or (trainer.name == "adlm" and model.name in RELEVANCE_MODELS)
    ):
        what = "trainer.frequencies = 'public'" if trainer.name == "svm" else "trainer.name = 'adlm'"
        raise ValueError(
            f"{what} needs public records: set data.public_records, or data.public_data = 'digits'"
        )
    if experiment.fits_to_public and getattr(strategy, "download_fraction", 1.0) != 1.0:
        raise ValueError(
            f"strategy.download_fraction = {strategy.download_fraction!r}: what is fitted to public records "  # type: ignore[union-attr]
            "comes from the server, whole; allowed: 1.0"
        )
    if data.public_data and data.name not in DIGIT_DATA:
        raise ValueError(
            f"data.public_data = {data.public_data!r}: data.name = {data.name!r} are no images of digits; "
            f"allowed with {', '.join(DIGIT_DATA)}"
        )
    if data.public_data and not experiment.fits_to_public:
        raise ValueError(
            f"data.public_data = {data.public_data!r}: model.name = {model.name!r} with trainer.name = "
            f"{trainer.name!r} is not fitted to public records"
        )
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
                f"allowed: {', '.join(FUNCTIONAL_MODELS)}"
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
        if _given(trainer, key):
            raise ValueError(
                f"trainer.{key} is set, but model.name = {model.name!r} does not use it; "
                f"{', '.join(proved if of_paper else paper)} would"
            )
    unused: tuple[str, ...] = _PROVED_KEYS if model.name == "class-sums" else ()
    if of_paper and not trainer.perturb:
        unused = ("relevance_share", "label_share", "relevance_epochs")
    elif trainer.name == "ilm":
        unused = (*unused, "relevance_epochs")
    for key in unused:
        if _given(trainer, key):
            raise ValueError(
                f"trainer.{key} is set, but model.name = {model.name!r} with trainer.name = {trainer.name!r}"
                f"{'' if trainer.perturb else ', trainer.perturb = false,'} does not use it"
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


def _given(trainer: Any, key: str) -> bool:
    """Return whether a key of the trainer is there and is not as it would be anyway."""
    field = type(trainer).model_fields.get(key)
    return field is not None and getattr(trainer, key) != field.default


def check_privacy(experiment: Experiment) -> None:
    """Refuse a privacy key that nothing holds to, and a mechanism without what it needs."""
    trainer: Any = experiment.trainer
    privacy, strategy, mechanism = experiment.privacy, experiment.strategy, experiment.mechanism
    _check_expected(experiment)
    if mechanism is None:
        if trainer.name == "svm" and _given(trainer, "noise"):
            raise ValueError(f"trainer.noise = {trainer.noise!r}: trainer.perturb = false adds no noise")
        if getattr(trainer, "perturb", None) is False and privacy != type(privacy)():
            raise ValueError("trainer.perturb = false adds no noise: no privacy key can hold")
        for key, default in type(privacy)().model_dump().items():
            if (value := getattr(privacy, key)) != default:
                raise ValueError(
                    f"privacy.{key} = {value!r}: trainer.name = {trainer.name!r} adds no noise, so it "
                    "cannot hold; allowed with trainer.name = 'psgd', 'dpa', 'pcdbn', 'adlm', 'ilm' or "
                    "'svm', or with strategy.selection = 'sparse_vector' or 'random_mask'"
                )
        return
    key, name = mechanism
    if key != "trainer.name" and hasattr(trainer, "perturb"):
        raise ValueError(
            f"{key} = {name!r}: trainer.name = {trainer.name!r} has a privacy of its own "
            "(trainer.perturb); allowed: largest_values, random_with_threshold"
        )
    if key != "trainer.name" and trainer.name == "psgd":
        raise ValueError(
            f"{key} = {name!r}: trainer.name = {trainer.name!r} is private already, and selecting what "
            "is private costs nothing; allowed: largest_values, random_with_threshold"
        )
    needs_delta = name in ("psgd", "random_mask")
    for part in ("budget_epsilon", *(("delta",) if needs_delta else ())):
        if getattr(privacy, part) is None:
            raise ValueError(
                f"privacy.{part} is missing: {key} = {name!r} needs privacy.budget_epsilon > 0"
                + (" and 0 < privacy.delta < 1" if needs_delta else "")
            )
    others = VARIANTS.get(name, ())
    if privacy.variant != "proved" and privacy.variant not in others:
        has = f"has 'proved'{''.join(f', {other!r}' for other in others)}" if others else "has only 'proved'"
        raise ValueError(f"privacy.variant = {privacy.variant!r}: {key} = {name!r} {has}")
    if name in FUNCTIONAL_MODELS:
        _check_paper_form(experiment)
    elif name == "svm":
        _check_svm(experiment)
    if privacy.noise_source == "secure" and getattr(trainer, "gradients", "") == "ghost":
        raise ValueError(
            "trainer.gradients = 'ghost': sums of gradients that are never written down cannot be made "
            "exact; with privacy.noise_source = 'secure', allowed: auto, hooks"
        )
    if getattr(strategy, "split", "lyu") != "lyu" and privacy.variant != "proved":
        raise ValueError(
            f"strategy.split = {strategy.split!r}: privacy.variant = {privacy.variant!r} has its own"  # type: ignore[union-attr]
        )


def _check_expected(experiment: Experiment) -> None:
    """Refuse a declared number of records that nothing is divided by, or that some client has not."""
    declared, mechanism = experiment.data.expected_records, experiment.mechanism
    if declared is None:
        return
    told = list(declared) if isinstance(declared, tuple) else declared
    if mechanism is None or mechanism[0] != "trainer.name" or experiment.model.name in PAPER_MODELS:
        raise ValueError(
            f"data.expected_records = {told}: nothing is divided by it; allowed where a trainer adds noise "
            "in its proved form: psgd, dpa, pcdbn, adlm, ilm, svm"
        )
    if isinstance(declared, tuple) and len(declared) != experiment.nodes:
        raise ValueError(
            f"data.expected_records = {told}: expected one number, or one for each of "
            f"{experiment.nodes} clients"
        )


def _check_together(experiment: Experiment) -> None:
    """Refuse a block of clients where each is trained alone."""
    trainer: Any = experiment.trainer
    if experiment.clients.together in ("auto", 1):
        return
    alone = None
    if trainer.name not in ("sgd", "psgd"):
        alone = f"trainer.name = {trainer.name!r}"
    elif getattr(trainer, "update_fraction", 1.0) < 1:
        alone = f"trainer.update_fraction = {trainer.update_fraction:g}"
    elif getattr(trainer, "gradients", "auto") != "auto":
        alone = f"trainer.gradients = {trainer.gradients!r}"
    elif experiment.privacy.noise_source == "secure":
        alone = "privacy.noise_source = 'secure'"
    if alone:
        raise ValueError(
            f"clients.together = {experiment.clients.together}: with {alone}, each client is trained alone; "
            "allowed: 'auto', 1"
        )


def _check_paper_form(experiment: Experiment) -> None:
    model, privacy = experiment.model, experiment.privacy
    of_paper = model.name in PAPER_MODELS
    if of_paper != (privacy.variant != "proved"):
        wanted = "'paper', which is only claimed," if of_paper else "'proved'"
        raise ValueError(
            f"privacy.variant = {privacy.variant!r}: model.name = {model.name!r} is trained as "
            f"{wanted} with trainer.name = {experiment.trainer.name!r}"
        )
    if of_paper and privacy.delta is not None:
        raise ValueError(f"privacy.delta = {privacy.delta:g}: the papers' noise is Laplace; allowed: none")
    if of_paper and privacy.noise_source == "secure":
        raise ValueError("privacy.noise_source = 'secure': what is only claimed is for simulation alone")
    trainer: Any = experiment.trainer
    shares = getattr(trainer, "relevance_share", 0.0) + getattr(trainer, "label_share", 0.0)
    if of_paper and shares >= 1:
        raise ValueError(
            f"trainer.relevance_share + trainer.label_share = {shares:g}: nothing is left for the inputs; "
            "expected below 1"
        )


def _check_svm(experiment: Experiment) -> None:
    trainer: Any = experiment.trainer
    privacy = experiment.privacy
    if privacy.variant != "proved" and (trainer.noise != "auto" or privacy.delta is not None):
        raise ValueError(
            f"privacy.variant = {privacy.variant!r}: the paper's noise is Laplace noise of its own scale; "
            "expected without trainer.noise and privacy.delta"
        )
    if trainer.noise != "auto" and (trainer.noise == "gaussian") != (privacy.delta is not None):
        raise ValueError(
            f"trainer.noise = {trainer.noise!r}: expected "
            + ("with" if trainer.noise == "gaussian" else "without")
            + " privacy.delta"
        )
    if privacy.noise_source == "secure" and trainer.noise == "gamma":
        raise ValueError(
            "trainer.noise = 'gamma': no exact sampler is known to us; with privacy.noise_source = 'secure', "
            "allowed: laplace, gaussian"
        )
