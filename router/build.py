"""Puts a router's parts together. The one place that chooses clocks and randomness."""

from __future__ import annotations

import time
from random import Random, SystemRandom

from router.admission import Admission
from router.api.protocol import INT64_MIN
from router.api.sampling_defaults import load_sampling_defaults
from router.dispatch.interface import Dispatcher
from router.serving.prepare import Preparer
from router.serving.service import Service
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from router.text.text_workers import TextWorkers
from router.text.tokenizer import TextTokenizer


def new_random() -> Random:
    """A generator for what only has to be different: seeds, ids. Asking the system each time is slow."""
    return Random(SystemRandom().getrandbits(256))


def build_service(
    dispatcher: Dispatcher,
    tokenizer: TextTokenizer,
    settings: RouterSettings,
    *,
    model_folder: str | None = None,
) -> Service:
    """A service over a dispatcher. `model_folder`: where the model's own sampling defaults stand, if any."""
    defaults = {}
    if model_folder is not None and settings.sampling_defaults == "model":
        defaults = load_sampling_defaults(model_folder)
    random = new_random()
    admission = Admission(settings, clock=time.monotonic, random=random.random)
    metrics = RouterMetrics(
        model=settings.model_name,
        replica=settings.replica,
        version=settings.version,
        admission=admission,
        dispatcher=dispatcher,
        clock=time.monotonic,
    )
    preparer = Preparer(
        tokenizer=tokenizer,
        workers=TextWorkers(settings.text_threads, max_calls=settings.max_queued_requests),
        settings=settings,
        draw_seed=lambda: INT64_MIN + random.getrandbits(64),
        clock=time.monotonic,
    )
    return Service(
        dispatcher=dispatcher,
        tokenizer=tokenizer,
        preparer=preparer,
        admission=admission,
        metrics=metrics,
        settings=settings,
        sampling_defaults=defaults,
        clock=time.monotonic,
        wall_clock=time.time,
    )
