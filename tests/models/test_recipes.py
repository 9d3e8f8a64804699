"""The toy tokenizers and scripted checkpoints say what their descriptions promise."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from tests.models import checkpoints, toy_tokenizers
from tests.models.loading import paged_model
from tests.models.oracle import Oracle


def test_a_byte_a_token(tmp_path: Path) -> None:
    tokenizer = toy_tokenizers.byte_tokenizer()
    assert len(tokenizer) == 259
    assert tokenizer("🦙").input_ids == [175, 256, 102, 250]
    text = "ok 🦙 żółć 漢字 👩‍🚀 fin"
    prompt, script = tokenizer("Say it:").input_ids, tokenizer(text).input_ids
    folder = checkpoints.pos_script(tmp_path / "m", [*script, 1], prompt_len=len(prompt), tokenizer=tokenizer)
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved("🦙").input_ids == [175, 256, 102, 250]
    assert saved.chat_template == toy_tokenizers.CHAT_TEMPLATE
    said = paged_model(folder).greedy([prompt], len(script) + 3)[0]
    assert said == [*script, 1, 1, 1]
    assert saved.decode(said, skip_special_tokens=True) == text
    assert Oracle(folder).continuation(prompt, 100, eos_token_id=1).token_ids == [*script, 1]


def test_beginning_of_sequence_is_written_by_template_and_tokenizer() -> None:
    tokenizer = toy_tokenizers.ascii_tokenizer()
    assert tokenizer("hi").input_ids == [0, 75, 76]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<s>user: hi<eot>"
    assert max(tokenizer.get_vocab().values()) < 128


def test_metaspace_drops_the_first_space_only() -> None:
    tokenizer = toy_tokenizers.metaspace_tokenizer()
    prompt, words = tokenizer("Who:").input_ids, [3, 4, 5, 6, 7]
    assert tokenizer.decode(prompt + words) == "Who: the cat satdown !"
    assert tokenizer.decode(words) == "the cat satdown !"
