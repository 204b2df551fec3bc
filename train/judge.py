"""What a run's weights are worth while it trains: evaluated, compared, and the best ones kept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.records import Record
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.checkpoint import save_drafter
from .corpus import Data
from .distributed import Whole
from .fingerprints import check_frozen, check_trained, fingerprints, together
from .metrics import MetricsLog, log_samples
from .objective import Objective
from .progress import Progress
from .validate import TAU, held_out_figures

BEST = "best"
"""Where the best weights lie, by held-out expected τ."""

Decode = Callable[[Drafter, Sequence[Record]], list[dict[str, Any]]]
"""Decodes held-out prompts with a drafter, for the log."""


class Judge:
    """Held-out figures of the weights as they are. Made before the drafter is spread.

    scorer, average: the prepared module that holds the drafter, and its moving average, if any.
    """

    scorer: nn.Module
    average: AveragedModel | None = None

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        accelerator: Accelerator,
        target: Target,
        drafter: Drafter,
        data: Data,
        folder: Path,
        decode: Decode | None,
    ):
        self.recipe, self.objective, self.accelerator = recipe, objective, accelerator
        self.target, self.data, self.folder, self.decode = target, data, folder, decode
        assert isinstance(drafter, nn.Module)
        self._trained = fingerprints(drafter, trained=True)
        self._frozen = fingerprints(drafter, trained=False)
        self._whole = Whole(drafter, accelerator)

    def measured(self) -> Drafter:
        """The weights that are evaluated and saved: the moving average, if there is one.

        To be called by all processes at once; only the main one's may be whole.
        """
        if self.average is not None:
            return self.average.module  # type: ignore[return-value]
        return self._whole.gather(self.scorer)

    def sound(self, step: int) -> Drafter:
        """The drafter as it is saved in the end, after a look at what must and must not change."""
        drafter = self.measured()
        assert isinstance(drafter, nn.Module)
        if self.accelerator.is_main_process:
            self._check_trained(fingerprints(drafter, trained=True), step)
            check_frozen(self._frozen, fingerprints(drafter, trained=False))
        return drafter

    def _check_trained(self, prints: dict[str, str], step: int) -> None:
        if step > 1:  # half of an adapter waits for the other half to leave zero
            check_trained(self._trained, prints)

    def evaluate(self, at: Progress, log: MetricsLog) -> dict[str, float]:
        """Held-out figures, which the main process works out for all; better weights are kept."""
        drafter, figures = self.measured(), {}
        assert isinstance(drafter, nn.Module)
        if self.accelerator.is_main_process:
            weights = self._changed(drafter, at)
            drafter.eval()
            figures = held_out_figures(
                self.target, drafter, self.data.held_out, self.objective,
                self.recipe.train.unroll, self.data.limit,
            )  # fmt: skip
            log.write("heldout", at.step, figures, weights=weights)
            self._sample(drafter, at.step)
            drafter.train()
            at.weights_hash = weights
            if figures and (at.best is None or figures[TAU] > at.best):
                trained = {"recipe": self.recipe.name, "steps": at.step, TAU: figures[TAU]}
                save_drafter(drafter, self.folder / BEST, self.target, trained)
        self._whole.release()
        figures = dict(broadcast_object_list([figures])[0])
        if figures and (at.best is None or figures[TAU] > at.best):
            at.best, at.worse = figures[TAU], 0
        elif figures:
            at.worse += 1
        return figures

    def _changed(self, drafter: nn.Module, at: Progress) -> str:
        """The hash of the trained weights, which are not those that were evaluated before."""
        prints = fingerprints(drafter, trained=True)
        self._check_trained(prints, at.step)
        if at.weights_hash is None:  # what is wrong from the start shows at once
            check_frozen(self._frozen, fingerprints(drafter, trained=False))
        weights = together(prints)
        if weights == at.weights_hash:
            raise UserError(
                f"the weights evaluated at step {at.step} are those of the evaluation before it, "
                "so what was trained since has not reached them"
            )
        return weights

    def _sample(self, drafter: Drafter, step: int) -> None:
        count = self.recipe.train.samples
        if self.decode is not None and count:
            samples = self.decode(drafter, self.data.held_out[:count])
            log_samples(self.accelerator, self.folder, step, samples)
