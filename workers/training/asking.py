"""Prompts that the model makes itself: asked for nothing, a chat model goes on with what a user may say.

What is given is the beginning of a chat, up to where the user's words would stand; what comes until an end
id is a prompt (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing", 2024). So they are about what the model was trained on, and like no template.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from workers.engine.engine import Engine
from workers.progress import Progress
from workers.training.answers import answers_to
from workers.training.prompts import Part, Prompt, TextError
from workers.types import GenerateRequest, RequestId, SamplingParams

_MARK = "0123456789"
_SHORTEST, _LONGEST = 4, 64  # tokens
_EVERY = 100  # lines of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What prompts depend on; stored beside them."""

    target_hash: str  # `Checkpoint.model_hash` of the model
    count: int  # tries
    seed: int


def read_or_ask(
    file: Path, asking: Asking, engine: Engine, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> list[Prompt]:
    """Different prompts to train on: of all tries those that ended in time. From the file, if there is one;
    else they are written to it when all are there.

    Raises ValueError where the chat template does not have the user's words as they are, TextError as
    `stored_prompts` and `answers_to`, OSError."""
    prompts = stored_prompts(file, asking)
    if prompts is None:
        prompts = _ask(asking, engine, tokenizer, progress)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({**asdict(asking), "prompts": prompts}), encoding="utf-8")
        part.replace(file)
    return [Prompt(text=text, part=Part.TRAINING) for text in prompts]


def stored_prompts(file: Path, asking: Asking) -> list[str] | None:
    """None: there is no file. Raises TextError when other prompts are in it, OSError."""
    if not file.exists():
        return None
    stored, wanted = json.loads(file.read_text(encoding="utf-8")), asdict(asking)
    if not isinstance(stored, dict) or {name: stored.get(name) for name in wanted} != wanted:
        raise TextError(f"{file} has other prompts than those of {json.dumps(wanted)}: delete it first")
    prompts: list[str] = stored["prompts"]
    return prompts


def _ask(asking: Asking, engine: Engine, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> list[str]:
    chat = [{"role": "user", "content": _MARK}]
    written = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    if written.count(_MARK) != 1:
        raise ValueError("the model's chat template does not have what the user says in one place as it is")
    before = tuple(tokenizer(written.split(_MARK)[0], add_special_tokens=False)["input_ids"])
    requests = {
        RequestId(f"prompt-{number}"): SamplingParams(
            max_tokens=_LONGEST, temperature=1.0, top_p=0.95, seed=asking.seed + number
        )
        for number in range(asking.count)
    }
    found: dict[RequestId, tuple[int, ...]] = {}
    answers = answers_to(
        engine,
        (
            GenerateRequest(request_id=request_id, prompt_token_ids=before, sampling=sampling)
            for request_id, sampling in requests.items()
        ),
    )
    for num_done, answer in enumerate(answers, 1):
        if answer.is_ended:
            found[answer.request_id] = answer.token_ids[:-1]
        if num_done % _EVERY == 0:
            progress.start(f"asking for prompts: {num_done} of {asking.count}")
    texts = [
        str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
        for request_id in requests
        if len(ids := found.get(request_id, ())) >= _SHORTEST
    ]
    return [text for text in dict.fromkeys(texts) if text]
