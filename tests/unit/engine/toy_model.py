"""The arithmetic of the toy model, and a draft model that knows it."""

from __future__ import annotations

from collections.abc import Sequence

from workers.decoding.beam_search import Candidate
from workers.engine.proposals import DraftTask, HeadTask, Proposals
from workers.engine.step import SampleTask
from workers.types import TokenLogprob

VOCAB = 97
_MOD = (1 << 61) - 1


def content_of(before: int, token_id: int, position: int) -> int:
    """The "keys and values" of a position."""
    return (before * 1_000_003 + token_id * 7_919 + position * 104_729 + 12_345) % _MOD


def contents_of(token_ids: Sequence[int]) -> list[int]:
    contents: list[int] = []
    for position, token_id in enumerate(token_ids):
        contents.append(content_of(contents[-1] if contents else 0, token_id, position))
    return contents


def mixed(contents: Sequence[int]) -> int:
    """One number of a whole context."""
    mix = 0
    for content in contents:
        mix = (mix * 31 + content) % _MOD
    return mix


def choose(contents: Sequence[int], task: SampleTask) -> int:
    """The toy's token: greedy ones are alike for all choices, others differ by choice and seed. With top_k
    one of the first ids, so that guesses from what came before are right now and then."""
    mix = mixed(contents)
    if task.params.temperature > 0:
        mix += 1_009 * task.choice + 7 * task.params.seed
    token_id = mix % (task.params.top_k or VOCAB)
    bits = task.allowed.bits(len(task.drafts)) if task.allowed is not None else None
    while token_id in task.forbidden_token_ids or (bits and not bits[token_id >> 3] >> (token_id & 7) & 1):
        token_id = (token_id + 1) % VOCAB
    return token_id


def score_of(contents: Sequence[int], token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-float(sum(contents) % 1_000 + 1))


def candidates_of(contents: Sequence[int], task: SampleTask) -> tuple[Candidate, ...]:
    """The toy's best tokens: every one has a score of its own by the context."""
    mix = mixed(contents)
    scores = []
    for token_id in range(VOCAB):
        if token_id not in task.forbidden_token_ids:
            spread = content_of(mix, token_id, 1) % 1_000_003
            scores.append((-3.0 * spread / 1_000_003 - 0.01, -token_id))
    best = sorted(scores, reverse=True)[: task.num_candidates]
    wants = task.params.num_logprobs is not None
    return tuple(
        Candidate(-minus_id, score, score_of(contents, -minus_id) if wants else None)
        for score, minus_id in best
    )


def seen_of(contents: Sequence[int], window: int | None) -> list[int]:
    """Zeros for what lies before the window of the last one."""
    num_hidden = 0 if window is None else max(0, len(contents) - window)
    return [0] * num_hidden + list(contents[num_hidden:])


class ToyDraft:
    """A draft model that knows the toy: it has numbers of its own for each position, checks that those it is
    said to have are the toy's, and guesses with half of the luck."""

    def __init__(self, model_pool: list[int | None], block_size: int) -> None:
        self._model_pool = model_pool
        self._pool: list[int | None] = [None] * len(model_pool)
        self._block_size = block_size
        self.max_tokens = 4096
        self.tasks: list[DraftTask] = []

    def propose(self, tasks: Sequence[DraftTask]) -> Proposals:
        self.tasks += tasks
        return Proposals([self._guess(task) for task in tasks])  # in no time

    def _guess(self, task: DraftTask) -> tuple[int, ...]:
        known = [self._slot(task, position) for position in range(task.start)]
        contents = [self._pool[slot] for slot in known]
        assert contents == [self._model_pool[slot] for slot in known], "keys and values of other tokens"
        for token_id in task.token_ids:
            self._read(task, contents, token_id)
        found: list[int] = []
        while len(found) < task.num_drafts:
            found.append(_guessed(contents))
            if len(found) < task.num_drafts:
                self._read(task, contents, found[-1])
        return tuple(found)

    def _read(self, task: DraftTask, contents: list[int], token_id: int) -> None:
        contents.append(content_of(contents[-1] if contents else 0, token_id, len(contents)))
        self._pool[self._slot(task, len(contents) - 1)] = contents[-1]

    def _slot(self, task: DraftTask, position: int) -> int:
        return task.block_table[position // self._block_size] * self._block_size + position % self._block_size


class ToyHeads:
    """Heads that know the toy: they see the numbers of the row that a token came from, and the token."""

    def __init__(self) -> None:
        self.num_heads = 3
        self.seen: list[list[list[int]]] = []  # of each slice and row of the last step
        self.step_number = 0

    def propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        if step_number != self.step_number or any(task.slice >= len(self.seen) for task in tasks):
            return Proposals([()] * len(tasks))
        found = [self._guess(task) for task in tasks]
        return Proposals(
            [drafts for drafts, _ in found],
            (),
            [None if task.is_chain else parents for task, (_, parents) in zip(tasks, found, strict=True)],
        )

    def _guess(self, task: HeadTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens 0 and 1, then those after them, and so on; with nonsense among them."""
        drafts: list[int] = []
        parents: list[int] = []
        contexts = {-1: list(self.seen[task.slice][task.row])}
        for parent in range(-1, task.num_drafts):
            first = _guessed(contexts[parent])
            for token_id in (first,) if task.is_chain else (first, 1 - first):
                if len(drafts) < task.num_drafts:
                    before = contexts[parent]
                    contexts[len(drafts)] = [*before, content_of(before[-1], token_id, len(before))]
                    drafts.append(token_id)
                    parents.append(parent)
        assert not task.is_chain or task.num_drafts <= self.num_heads
        return tuple(drafts), tuple(parents)


def _guessed(contents: Sequence[int]) -> int:
    """What the toy says to every second context, or to the others where choice or seed turn it round."""
    return mixed(contents) // 8 % 2
