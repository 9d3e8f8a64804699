"""What `/metrics` says, for tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The value of every series, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def only(text: str, name: str, **labels: str) -> float:
    """The value of a series; groups' series carry their role and no replica."""
    of = {"role": "unified"} if "group" in labels else {"replica": "router"}
    wanted = {"model": "toy", **of, **labels}
    return samples(text)[(f"tandem_{name}", tuple(sorted(wanted.items())))]
