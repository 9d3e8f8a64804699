"""Prompts that the model makes itself: asked for nothing, a chat model goes on with what a user may say.

What is given is the beginning of a chat, up to where the user's words would stand; what comes until an end
id is a prompt (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing", 2024). So they are about what the model was trained on, and like no template.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from workers.engine.engine import Engine
from workers.progress import Progress
from workers.training.prompts import Part, Prompt, TextError
from workers.types import FinishReason, GenerateRequest, RequestId, SamplingParams

_MARK = "0123456789"
_SHORTEST, _LONGEST = 4, 64  # tokens
_EVERY = 100  # lines of progress


def read_or_ask(
    file: Path, count: int, seed: int, engine: Engine, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> list[Prompt]:
    """Different prompts to train on, of `count` tries: those that ended in time. From the file, if there is
    one; else they are written to it when all are there. Raises ValueError where the chat template does not
    have the user's words as they are, OSError."""
    if not file.exists():
        texts = _ask(count, seed, engine, tokenizer, progress)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(texts), encoding="utf-8")
        part.replace(file)
    stored: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return [Prompt(text=text, part=Part.TRAINING) for text in stored]


def _ask(
    count: int, seed: int, engine: Engine, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> list[str]:
    chat = [{"role": "user", "content": _MARK}]
    written = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    if written.count(_MARK) != 1:
        raise ValueError("the model's chat template does not have what the user says in one place as it is")
    before = tuple(tokenizer(written.split(_MARK)[0], add_special_tokens=False)["input_ids"])
    found: dict[RequestId, list[int]] = {}
    for number in range(count):
        request_id = RequestId(f"prompt-{number}")
        found[request_id] = []
        sampling = SamplingParams(max_tokens=_LONGEST, temperature=1.0, top_p=0.95, seed=seed + number)
        engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=before, sampling=sampling))
    ended: set[RequestId] = set()
    num_done = 0
    while engine.has_work():
        for chunk in engine.step():
            if chunk.finish_reason is FinishReason.ERROR:
                raise TextError(f"{chunk.request_id}: {chunk.error or 'ended in an error'}")
            found[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is None:
                continue
            num_done += 1
            if chunk.finish_reason is FinishReason.STOP:
                found[chunk.request_id].pop()  # the end id
                ended.add(chunk.request_id)
            if num_done % _EVERY == 0:
                progress.start(f"asking for prompts: {num_done} of {count}")
    texts = [
        str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        for request_id, ids in found.items()
        if request_id in ended and len(ids) >= _SHORTEST
    ]
    return [text for text in dict.fromkeys(texts) if text]
