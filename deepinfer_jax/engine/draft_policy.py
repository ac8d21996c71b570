"""How many drafts a step verifies, as far as the host decides it (engine.md 2.8, 3.5, 3.6).

"scheduled" takes the total from survivals that are two rounds old and from what rows cost; the
device shares it out by the newest ones. Nothing here changes a token of verify="exact".
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.layout import ANY_DRAFTS, PlanLayout
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.speculative.budget import Budget, best_total, complete_survival
from deepinfer_jax.speculative.cost import Corrections, StepCost

#: Steps without drafts after they did not pay: at first, and at most when they do not again.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
#: Weight of a step in the usual survivals.
_NEWS = 0.1


def assumed_cost(row_step: int, most: int) -> StepCost:
    """Returns a curve for a device that nobody has measured: time grows with every tile of rows.

    A fixed part as large as two tiles, and drafting for a tile of sequences as dear as one.
    """
    rows = np.arange(row_step, most + row_step, row_step)
    drafts = np.asarray([1, most])
    return StepCost(
        rows=rows,
        contexts=np.asarray([0]),
        step_seconds=(2.0 + rows / row_step)[:, None],
        draft_rows=drafts,
        draft_seconds=np.ceil(drafts / row_step),
    )


@dataclass(slots=True)
class DraftPolicy:
    """The policy of `RuntimeConfig.draft_policy`.

    size: drafts of a round, 0 without drafting. most, threshold: words of the plan's header.
    corrections: what rows cost, None unless scheduled. budget: rows of a step that rounds share
    with prompts. exact_only: no request can have another rule.
    """

    size: int
    most: int
    threshold: int = ANY_DRAFTS
    corrections: Corrections | None = None
    budget: int = 0
    exact_only: bool = True
    _paused: int = field(default=0, init=False)
    _next_pause: int = field(default=_FIRST_PAUSE, init=False)
    _has_drafts: bool = field(default=False, init=False)
    _prompts: int = field(default=0, init=False)  # rows that they would like of the next step
    # Survivals a round usually has [size]; drafts count as certain until the first are known.
    _usual: np.ndarray | None = field(default=None, init=False)

    def layouts(self, layouts: Items[PlanLayout]) -> list[PlanLayout]:
        """Returns the layouts, of those given, that steps under this policy have."""
        found: list[PlanLayout] = [*layouts] if self.most else []
        if not self.most or self.corrections is not None:
            found += [layout.without_drafting for layout in layouts]
        return list(dict.fromkeys(found))

    def limit(self, params: SamplingParams) -> int:
        """Returns how many drafts of a sequence a step may verify at most, whatever its room."""
        return self.most if params.max_draft is None else min(self.most, params.max_draft)

    def expect(self, active: Items[Sequence], waiting: Items[Sequence]) -> None:
        """Notes the rows that prompts would like to have of the next step: what a plan left.

        waiting: sequences that there are slots for.
        """
        if self.corrections is None:
            return
        left = sum(one.count - one.computed for one in active if one.phase is Phase.PREFILL)
        left += sum(one.count for one in waiting)
        self._prompts = min(left, self.budget)

    def rows(self, sequences: Items[Sequence], spans: Items[int]) -> tuple[int, bool]:
        """Returns (rows that the rounds of these sequences share, whether drafts are made).

        spans: rows of each round at most.
        """
        most = sum(spans)
        if self.corrections is None:
            return most, self.most > 0
        if not sequences:
            return 0, self._makes_drafts()
        count, usual = len(sequences), self._usual
        usual = np.ones(self.size, np.float32) if usual is None else usual
        context = sum(sequence.computed for sequence in sequences) / count
        if self._prompts and not self._pays_beside_prompts(spans, usual, context):
            self._has_drafts = False  # no pause: they may pay as soon as the prompts are done
            return count, False
        drafts = np.asarray(spans) - 1 if self._has_drafts else np.zeros(count, np.int64)
        survival = np.ones((count, self.size), np.float32)
        is_known = np.zeros(count, bool)
        for place, sequence in enumerate(sequences):
            age = 0 if self.exact_only else _age(sequence)
            if len(sequence.survivals) > age:
                survival[place], is_known[place] = sequence.survivals[age], True
        budget = self._best(complete_survival(survival, is_known, drafts, usual), drafts, context)
        if is_known.any():
            self._note(np.nan_to_num(survival[is_known]).mean(axis=0))
        if self._has_drafts:
            self._judge(budget.drafting_pays, bool(is_known.all()))
        return budget.total, self._makes_drafts()

    def _pays_beside_prompts(
        self, spans: Items[int], usual: Float[np.ndarray, " n"], context: float
    ) -> bool:
        """Returns whether drafts like the usual ones are worth the rows that prompts would like."""
        drafts = np.asarray(spans) - 1
        nothing = np.zeros(len(drafts), bool)
        survival = np.tile(usual, (len(drafts), 1))
        survival = complete_survival(survival, nothing, drafts, usual)
        return self._best(survival, drafts, context).drafting_pays

    def _best(
        self,
        survival: Float[np.ndarray, "r n"],
        drafts: Int[np.ndarray, " r"],
        context: float,
    ) -> Budget:
        """Returns the best total for sequences with so many drafts each, beside the prompts."""
        corrections, count = self.corrections, len(drafts)
        assert corrections is not None
        return best_total(
            survival,
            lambda rows: corrections.seconds(rows, context),
            capacity=count + int(drafts.sum()),
            prompt_rows=self._prompts,
            budget=self.budget,
            draft_seconds=corrections.drafting_seconds(count),
        )

    def _note(self, survival: Float[np.ndarray, " n"]) -> None:
        """Takes the mean survivals of a step into the usual ones, which the next steps use."""
        before = survival if self._usual is None else self._usual
        self._usual = before + np.float32(_NEWS) * (survival - before)

    def _judge(self, pays: bool, is_sure: bool) -> None:
        """Begins a pause if drafts do not pay; only known survivals end a row of longer ones."""
        if not pays:
            self._paused = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        elif is_sure:
            self._next_pause = _FIRST_PAUSE

    def _makes_drafts(self) -> bool:
        """Returns whether this step makes drafts; called once a step."""
        self._has_drafts = not self._paused
        self._paused = max(0, self._paused - 1)
        return self._has_drafts

    def observe(
        self, rows: int, sequences: int, context: float, seconds: float, *, made_drafts: bool
    ) -> None:
        """Notes how long a step of a busy device took."""
        if self.corrections is not None:
            drafting = self.corrections.drafting_seconds(sequences) if made_drafts else 0.0
            self.corrections.observe(rows, context, max(seconds - drafting, 0.0))


def _age(sequence: Sequence) -> int:
    """Returns the place of the newest survivals whose drafts an earlier plan has verified.

    A total that knew the confidences of the very drafts it lets be verified would bias the rules
    other than "exact" (engine.md 3.5). The plan that is being made is counted already.
    """
    is_newest_used = sequence.planned - 1 > sequence.produced
    return 0 if is_newest_used else 1


def draft_policy(
    runtime: RuntimeConfig, size: int, config: ModelConfig, layouts: Items[PlanLayout]
) -> DraftPolicy:
    """Returns the policy for drafts of `size` tokens in plans of these layouts.

    Raises:
        ConfigError: `draft_length` or `draft_threshold` cannot be honoured.
    """
    if runtime.draft_length is not None and runtime.draft_length > size:
        raise ConfigError(
            f"RuntimeConfig.draft_length must be at most the {size} drafts of a round here, got "
            f"{runtime.draft_length}"
        )
    if runtime.draft_threshold is not None and not size:
        raise ConfigError("RuntimeConfig.draft_threshold needs drafts, and this engine makes none")
    if not size:
        return DraftPolicy(size=0, most=0)
    if runtime.draft_policy == "fixed":
        assert runtime.draft_length is not None
        return DraftPolicy(size=size, most=runtime.draft_length)
    if runtime.draft_policy == "threshold":
        assert runtime.draft_threshold is not None
        bits = int(np.float32(runtime.draft_threshold).view(np.int32))
        return DraftPolicy(size=size, most=size, threshold=bits)
    execution = config.execution
    return DraftPolicy(
        size=size,
        most=size,
        corrections=Corrections(assumed_cost(execution.row_step, layouts[-1].rows)),
        budget=runtime.max_tokens_per_step,
        exact_only=execution.determinism == "batch",
    )
