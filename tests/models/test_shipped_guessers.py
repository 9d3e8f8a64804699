"""What is shipped to guess for the embedded model: it was trained for that model, and the engine opens it."""

from __future__ import annotations

import json
from pathlib import Path

import workers.decoding
from workers.model.checkpoint import Checkpoint
from workers.model.lending import TARGET_HASH
from workers.model.medusa_folder import MedusaFolder

ASSETS = Path(workers.decoding.__file__).parent / "assets" / "SmolLM2-135M-Instruct"


def test_they_fit_the_embedded_model(embedded_folder: Path) -> None:
    target = Checkpoint(embedded_folder)
    for name in ("medusa", "draft"):
        config = json.loads((ASSETS / name / "config.json").read_text())
        assert config[TARGET_HASH] == target.model_hash()
    assert MedusaFolder(ASSETS / "medusa", target).num_heads == 2
    draft = Checkpoint(ASSETS / "draft", lender=target)
    assert draft.has_draft_token_ids
    assert draft.spec.num_layers == 1


def test_they_stay_small() -> None:
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) < 12 << 20
