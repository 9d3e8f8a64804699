"""What `python -m workers` does: one prompt streamed to stdout, or a table of times."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.config import CacheConfig, GroupConfig
from workers.engine.engine import Engine
from workers.engine.step import GroupFailed
from workers.model.errors import CheckpointError
from workers.progress import Progress
from workers.runtime.launch import LocalGroup
from workers.types import FinishReason, GenerateRequest, RequestId, RequestRefused, SamplingParams, TokenChunk

_REPLACEMENT = "\ufffd"  # what a tokenizer decodes half a character to


def run(config: GroupConfig, options: argparse.Namespace, progress: Progress) -> int:
    """Carries out the command `options.command` (options as `workers.__main__` reads them)."""
    try:
        if options.command == "generate":
            _generate(config, options, progress)
        else:
            _bench(config, options, progress)
    except (CheckpointError, GroupFailed, RequestRefused, ValueError, OSError) as error:
        progress.end(f"error: {error}")
        return 1
    return 0


def _engine(config: GroupConfig, group: LocalGroup, *, prefix_reuse: bool = True) -> Engine:
    facts = group.facts
    return Engine(
        limits=facts.limits,
        cache=CacheConfig(block_size=facts.block_size, prefix_reuse=prefix_reuse),
        schedule=config.schedule,
        executor=group.executor,
        starter=group.starter,
        speculative=config.speculative,
    )


def _generate(config: GroupConfig, options: argparse.Namespace, progress: Progress) -> None:
    progress.start(f"loading {config.model.path}")
    with LocalGroup(config) as group:
        progress.start("loading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, local_files_only=True, trust_remote_code=False
        )
        text = options.prompt
        if options.chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=not options.chat)["input_ids"]
        room = max(0, group.facts.limits.max_model_len - len(prompt))
        sampling = SamplingParams(
            max_tokens=min(256, room) if options.max_tokens is None else options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
        )
        engine = _engine(config, group)
        engine.add(
            GenerateRequest(request_id=RequestId("prompt"), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
        progress.start(f"ready, {len(prompt)} prompt tokens")
        for piece in _text_of(_run(engine), tokenizer):
            progress.end()
            print(piece, end="", flush=True)
        print()


def _run(engine: Engine) -> Iterator[TokenChunk]:
    """All chunks until no request is left. Raises GroupFailed when one ends in an error."""
    while engine.has_work():
        for chunk in engine.step():
            if chunk.finish_reason is FinishReason.ERROR:
                raise GroupFailed(chunk.error or "the request ended in an error")
            yield chunk


def _text_of(chunks: Iterator[TokenChunk], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Text as it becomes certain: a character whose tokens are not all there waits.

    Decodes from the last certain place only: ids[start:], of which `shown` characters are out already.
    """
    ids: list[int] = []
    start, certain, shown = 0, 0, 0
    for chunk in chunks:
        ids += [token_id for token_id in chunk.token_ids if token_id != chunk.stop_token_id]
        text = str(tokenizer.decode(ids[start:]))
        if chunk.finish_reason is None and text.endswith(_REPLACEMENT):
            continue
        yield text[shown:]
        # Some tokenizers drop a leading space: the tokens before the new ones stay as context.
        start, certain = certain, len(ids)
        shown = len(tokenizer.decode(ids[start:certain]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One batch size. Times of a request are means over the batch."""

    batch: int
    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float  # per token after the first
    decode_tokens_per_s: float  # of the whole batch, after all first tokens
    total_s: float


def _bench(config: GroupConfig, options: argparse.Namespace, progress: Progress) -> None:
    progress.start(f"loading {config.model.path}")
    started = time.perf_counter()
    with LocalGroup(config) as group:
        if not options.json:
            facts = group.facts
            pool_mib = facts.num_blocks * facts.kv_bytes_per_block >> 20
            print(
                f"{config.model.path}: {facts.dtype} on {facts.device}, {facts.tensor_parallel} ranks, "
                f"{facts.num_blocks} KV blocks ({pool_mib} MiB), ready in "
                f"{time.perf_counter() - started:.1f} s"
            )
            print(
                f"{'batch':>6} {'prompt':>7} {'TTFT ms':>9} {'TPOT ms':>9} {'decode tok/s':>13} {'all s':>8}"
            )
        rows = []
        for batch in options.batch:
            progress.start(f"batch {batch}")
            _measure(config, group, batch, options)  # the first run touches memory and fills caches
            row = _measure(config, group, batch, options)
            rows.append(row)
            if not options.json:
                print(
                    f"{row.batch:>6} {row.prompt_tokens:>7} {row.ttft_ms:>9.1f} {row.tpot_ms:>9.2f} "
                    f"{row.decode_tokens_per_s:>13.1f} {row.total_s:>8.2f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


def _measure(config: GroupConfig, group: LocalGroup, batch: int, options: argparse.Namespace) -> BenchRow:
    engine = _engine(config, group, prefix_reuse=False)
    vocab_size, prompt_len = group.facts.limits.vocab_size, options.prompt_len
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        ids = tuple((number * 7919 + place * 31) % vocab_size for place in range(prompt_len))
        engine.add(
            GenerateRequest(request_id=RequestId(str(number)), prompt_token_ids=ids, sampling=sampling)
        )
    start = time.perf_counter()
    first: dict[RequestId, float] = {}
    last: dict[RequestId, float] = {}
    late_tokens = 0
    for chunk in _run(engine):
        now = time.perf_counter()
        late_tokens += len(chunk.token_ids) if len(first) == batch else 0
        first.setdefault(chunk.request_id, now)
        last[chunk.request_id] = now
    all_first, end = max(first.values()), max(last.values())
    gaps = max(1, options.max_tokens - 1)
    return BenchRow(
        batch=batch,
        prompt_tokens=prompt_len,
        ttft_ms=1e3 * sum(at - start for at in first.values()) / batch,
        tpot_ms=1e3 * sum(last[key] - first[key] for key in first) / batch / gaps,
        decode_tokens_per_s=late_tokens / (end - all_first) if end > all_first else 0.0,
        total_s=end - start,
    )
