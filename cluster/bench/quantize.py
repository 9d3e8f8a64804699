"""A model folder in few bits, with the figures by which to judge it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.bench.orders import QuantizeOrder
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.quantizing.folder import quantize_folder
from workers.quantizing.quality import passage_ids, perplexity


def quantize(order: QuantizeOrder, report: Callable[[str], None]) -> dict[str, Any]:
    """Raises CheckpointError, GroupFailed and OSError; then there is no folder, unless it was the scoring of
    the finished one that failed."""
    source, out = Path(order.model), Path(order.out)
    checkpoint, started = Checkpoint(source), time.monotonic()
    errors = quantize_folder(checkpoint, Quantization(order.form), out, report)
    seconds, made = time.monotonic() - started, Checkpoint(out)
    worst = max(errors, key=lambda error: error.relative)
    found: dict[str, Any] = {
        "folder": str(out),
        "form": order.form,
        "bytes_before": checkpoint.weight_bytes,
        "bytes_after": made.weight_bytes,
        "seconds": round(seconds, 2),
        "matrices": len(errors),
        "worst_matrix": worst.name,
        "worst_error": round(worst.relative, 6),
        "mean_error": round(sum(error.relative for error in errors) / len(errors), 6),
        "perplexity": None,
    }
    token_ids = passage_ids(out) if order.has_report else None
    if token_ids is not None:
        report(f"scoring {len(token_ids)} tokens with {source.name}")
        before = perplexity(source, token_ids, "auto")
        report(f"scoring {len(token_ids)} tokens with {out.name}")
        after = perplexity(out, token_ids, "auto")
        found["perplexity"] = {
            "tokens": len(token_ids),
            "before": round(before, 4),
            "after": round(after, 4),
            "ratio": round(after / before, 5),
        }
    return found
