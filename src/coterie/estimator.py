"""A scikit-learn classifier that trains one model per site, with whatever method is named."""

import contextlib
from collections.abc import Hashable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from .api import configure
from .core.batches import EVALUATION_BLOCK
from .data.federation import Dataset
from .engines.evaluation import outputs
from .runs.assemble import assemble
from .runs.config.schema import METHOD
from .runs.execute import train_cell
from .runs.plan import Plan


class PersonalisedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier in which every site finds its right collaborators.

    ``method`` and ``model`` are names or, for ``model``, a module or what makes one;
    ``options`` sets any other field of a config by its dotted name. A fifth of each site's samples
    is validation data, which methods weigh models by.

        found = PersonalisedClassifier("fedfomo").fit(X, y, sites=hospital)
        found.predict_proba(new, site="north")
    """

    def __init__(
        self,
        method: str = METHOD,
        *,
        model: Any = "auto",
        rounds: int = 20,
        epochs: int = 1,
        lr: float = 0.1,
        batch: int = 10,
        options: dict[str, Any] | None = None,
        random_state: int = 0,
    ) -> None:
        self.method, self.model, self.rounds, self.epochs = method, model, rounds, epochs
        self.lr, self.batch, self.options, self.random_state = lr, batch, options, random_state

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train; ``sites`` names the site of each sample, and without it there is one site."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"found one class, {self.classes_[0]!r}; expected at least two")
        names = np.zeros(len(X), dtype=np.int64) if sites is None else np.asarray(sites)
        if names.shape != (len(X),):
            raise ValueError(f"sites: found shape {names.shape}; expected one for each sample")
        self.sites_, first, owners = np.unique(names, return_index=True, return_inverse=True)
        self._train(X, codes, owners, first)
        return self

    def _train(self, X: Any, codes: Any, owners: Any, first: Any) -> None:
        """Train on all samples; each site's first one stands for test data, which nobody reads."""
        every = np.concatenate([np.arange(len(X)), first])
        dataset = Dataset(
            name="data",
            x=torch.from_numpy(X[every]),
            y=torch.from_numpy(codes[every]),
            classes=len(self.classes_),
            fixed=torch.tensor([0] * len(X) + [2] * len(first), dtype=torch.int8),
            owners=torch.from_numpy(owners[every]),
            owner_names=tuple(map(str, self.sites_)),
            class_names=tuple(map(str, self.classes_)),
            numeric=torch.ones(X.shape[1], dtype=torch.bool),
        )
        config = configure(
            {"train": {"precision": "float64"}, "run": {"evaluate_every": self.rounds}},
            data=dataset,
            method=self.method,
            model=self.model,
            rounds=self.rounds,
            epochs=self.epochs,
            lr=self.lr,
            batch=self.batch,
            seed=self.random_state,
            set=self.options,
        )
        (cell,) = Plan.single(config, None).cells
        with contextlib.closing(assemble(cell.config)) as setting:
            self._run = train_cell(setting, cell)
            self._preprocessing: Any = setting.preprocessing(cell.seed)
            self._network = setting.prepare(cell.method.build(), cell.config).problem.model

    def predict(self, X: Any, site: Any = None) -> Any:
        """The most likely class of each sample, as :meth:`predict_proba` finds it."""
        best = self.predict_proba(X, site).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any, site: Any = None) -> Any:
        """The probabilities of the classes ``[n, C]`` by the model of a site.

        ``site`` is the site of all samples or a list with that of each; without it, all sites'
        models answer, and the mean of their answers is given.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        if site is None:
            return np.mean([self._of(X, k) for k in range(len(self.sites_))], axis=0)
        asked = np.broadcast_to(np.asarray(site), len(X))
        found = np.empty((len(X), len(self.classes_)))
        for name in np.unique(asked):
            found[asked == name] = self._of(X[asked == name], self._place(name))
        return found

    def _place(self, name: Hashable) -> int:
        if name not in self.sites_:
            raise ValueError(f"site: found {name!r}; expected one of {self.sites_.tolist()}")
        return int(np.flatnonzero(self.sites_ == name)[0])

    def _of(self, X: Any, site: int) -> Any:
        x = self._preprocessing.inputs(torch.from_numpy(X), torch.float64)
        blocks = x.split(EVALUATION_BLOCK)
        with torch.no_grad():
            parts = [outputs(self._network, self._run.predictor(site), b, False) for b in blocks]
        return torch.cat(parts).numpy()
