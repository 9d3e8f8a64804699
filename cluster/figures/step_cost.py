"""How long one step of the engine takes, from its shape alone.

    seconds = overhead + blend(weights, tokens * token) + rows * row + context * context_token + pairs * pair

`weights` is the time to read every weight once, `token` the products of one token: a step of few tokens waits
for memory, one of many for arithmetic, and around the turn it pays for both in part. The blend of the two is
their p-norm, (a^p + b^p)^(1/p): p = 1 adds them, a large p takes the longer one. Keys and values that decode
rows read count by the token of context, attention of prompt tokens by the pair of query and key.

Not covered: the number of prompts that a step's prefill tokens belong to, windows of attention (pass the
pairs and context that are really read), and transfers between groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cluster.whole_file import replace_file
from workers.regular_file import read_regular

SCHEMA = "tandem.step-cost.1"
DEFAULT_STEP_TOKENS = 512  # as workers.config.ScheduleConfig.max_step_tokens
_MAX_FILE_BYTES = 1 << 22
_MOST = 1e9  # of a coefficient: far above any use, and sums stay finite


class StepCostError(ValueError):
    """A file or mapping that is not a step cost. The text says where and what is wrong."""


def causal_pairs(tokens: int, cached: int = 0) -> int:
    """Pairs of query and key when `tokens` new ones follow `cached` known ones: each sees itself and all
    before it."""
    return tokens * cached + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step computes. Prompt tokens and decode rows may be mixed."""

    prefill_tokens: int = 0  # of prompt chunks
    prefill_pairs: int = 0  # sum over the chunks' tokens of the keys that each attends to
    decode_rows: int = 0  # sequences that get their next token
    context_tokens: int = 0  # sum over the decode rows of the tokens they attend to


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The measured or derived coefficients of a model on a machine; all of them seconds but `blend`."""

    overhead_s: float  # of any step: host work, launches
    weights_s: float  # reading all weights once
    token_s: float  # products of one token, prompt or decode
    row_s: float  # of a decode row beyond its token: logits, choosing, bookkeeping
    context_token_s: float  # reading the keys and values of one token of a decode row's context
    pair_s: float  # attention of one query and one key in prefill
    blend: float = 2.0  # p of the norm that joins weights and tokens, at least 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 1.0 if entry.name == "blend" else 0.0
            if not (isinstance(value, int | float) and least <= value <= _MOST):
                raise StepCostError(
                    f"{entry.name} is {repr(value)[:40]}: it must be a number from {least:g} to {_MOST:g}"
                )

    def seconds(self, shape: StepShape) -> float:
        """Of one step; 0 for an empty one, which the engine does not run."""
        tokens = shape.prefill_tokens + shape.decode_rows
        if not tokens:
            return 0.0
        return (
            self.overhead_s
            + self._linear_s(tokens)
            + self.row_s * shape.decode_rows
            + self.context_token_s * shape.context_tokens
            + self.pair_s * shape.prefill_pairs
        )

    def prefill_seconds(
        self, tokens: int, cached: int = 0, *, prompts: int = 1, step_tokens: int = DEFAULT_STEP_TOKENS
    ) -> float:
        """Of `prompts` alike, `tokens` long with the first `cached` known, in full steps of nothing else."""
        new = tokens - cached
        if new <= 0:
            return 0.0
        full, rest = divmod(prompts * new, step_tokens)
        chunks = full * (self.overhead_s + self._linear_s(step_tokens))
        if rest:
            chunks += self.overhead_s + self._linear_s(rest)
        return chunks + self.pair_s * prompts * causal_pairs(new, cached)

    def prefill_tokens_per_s(
        self, tokens: int, cached: int = 0, *, prompts: int = 1, step_tokens: int = DEFAULT_STEP_TOKENS
    ) -> float:
        """New prompt tokens a second of such prompts."""
        seconds = self.prefill_seconds(tokens, cached, prompts=prompts, step_tokens=step_tokens)
        return prompts * (tokens - cached) / seconds

    def decode_step_seconds(self, batch: float, context: float) -> float:
        """Of a step that gives `batch` sequences, `context` tokens long each, their next token. Both may be
        means over time."""
        return self.overhead_s + self._linear_s(batch) + self._rows_s(batch, context)

    def added_by_rows(self, batch: float, context: float) -> float:
        """Seconds that such decode rows add to a step that is bound by the products of a prompt's tokens."""
        return self.token_s * batch + self._rows_s(batch, context)

    def decode_tokens_per_s(self, batch: float, context: float) -> float:
        """Tokens a second of the whole batch."""
        return batch / self.decode_step_seconds(batch, context)

    def _rows_s(self, batch: float, context: float) -> float:
        return batch * (self.row_s + self.context_token_s * context)

    def _linear_s(self, tokens: float) -> float:
        """The p-norm of reading the weights and multiplying them, without overflow."""
        products = tokens * self.token_s
        longer, shorter = (
            (products, self.weights_s) if products > self.weights_s else (self.weights_s, products)
        )
        if not shorter:
            return longer
        return float(longer * (1.0 + (shorter / longer) ** self.blend) ** (1.0 / self.blend))

    def save(self, file: Path, *, about: Mapping[str, object] | None = None) -> None:
        """Writes JSON; `about` says where the figures come from. A reader never sees half a file."""
        content = {"schema": SCHEMA, "about": dict(about or {}), "cost": asdict(self)}
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> StepCost:
        """Raises StepCostError, naming the file, for anything but what `save` writes."""
        return load_with_facts(file)[0]

    @classmethod
    def of(cls, values: object) -> StepCost:
        """From the mapping of coefficients. Raises StepCostError for missing, unknown or unusable ones."""
        if not isinstance(values, Mapping):
            raise StepCostError(f"cost is {type(values).__name__}, it must be a mapping of coefficients")
        names = {entry.name for entry in fields(cls)}
        if set(values) != names:
            missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
            raise StepCostError(
                f"cost lacks {missing or 'nothing'} and has the unknown {unknown or 'nothing'}"
            )
        if wrong := [name for name in sorted(names) if isinstance(values[name], bool | str)]:
            raise StepCostError(f"cost.{wrong[0]} is {repr(values[wrong[0]])[:40]}, it must be a number")
        return cls(**values)


def load_with_facts(file: Path) -> tuple[StepCost, dict[str, object]]:
    """The cost and what the file tells about its origin. Raises StepCostError."""
    try:
        content: object = json.loads(read_regular(file, max_bytes=_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise StepCostError(
            f"{file}: not readable as JSON ({error}); run `tandem bench calibrate`"
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise StepCostError(f"{file}: schema is {found!r}, this version reads {SCHEMA!r}: calibrate again")
    about = content.get("about", {})
    if not isinstance(about, dict):
        raise StepCostError(f"{file}: about is {type(about).__name__}, it must be a mapping")
    try:
        return StepCost.of(content.get("cost")), about
    except StepCostError as error:
        raise StepCostError(f"{file}: {error}") from error


# Used until somebody calibrates: SmolLM2-135M in bf16 on two cores of an AMD EPYC (Zen 4, AVX512-BF16), made
# from the engine's medians there (112 / 707 / 1115 tok/s at batch 1 / 8 / 32, prefill of 512 at 1474 tok/s).
# Another machine or model is off by its ratio to that one; only orders of magnitude are to be trusted.
SMOLLM2_ON_SMALL_CPU = StepCost(
    overhead_s=0.5e-3,
    weights_s=8.1e-3,
    token_s=0.64e-3,
    row_s=0.04e-3,
    context_token_s=0.95e-6,
    pair_s=0.144e-6,
    blend=2.0,
)
